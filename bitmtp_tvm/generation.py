"""One generation as its caller sees it: pieces of text, token ids, a result."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bitmtp_tvm.decoder import TokenStream
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.statistics import Statistics
from bitmtp_tvm.stopping import STOP, StopStrings
from bitmtp_tvm.text import TextCodec, TextStream


@dataclass(frozen=True)
class Result:
    """A finished generation.

    `text`: without the end token or stop string; None when the artifact has no tokenizer.
    `token_ids`: the new tokens, the one that ended it included; `logprobs`: of each, natural, at
    temperature 1. `finish_reason`: "stop" (an end token or a stop string), "length" (the wanted
    number of tokens, or the context limit) or "cancelled".
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Statistics
    logprobs: tuple[float, ...] = ()

    def to_dict(self, logprobs: bool = False) -> dict[str, Any]:
        """As JSON has it; the logprobs when they are asked for."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            **({"logprobs": [round(value, 6) for value in self.logprobs]} if logprobs else {}),
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(),
        }


class Generation(Iterator[str]):
    """A generation under way: iterate for pieces of text, or `tokens()` for ids.

    Both read the same generation; `result()` runs what is left of it. `token_ids`, `logprobs`,
    `stats` and `finish_reason` (None until the end) may be looked at any time.
    """

    def __init__(
        self,
        stream: TokenStream,
        codec: TextCodec | None,
        end_ids: frozenset[int],
        stop_strings: Sequence[str] = (),
    ) -> None:
        self.token_ids: list[int] = []
        self.logprobs = stream.logprobs
        self.stats = stream.statistics
        self.finish_reason: str | None = None
        self._stream = stream
        self._end_ids = end_ids
        self._text = TextStream(codec) if codec else None
        self._stop_strings = StopStrings(stop_strings)
        self._stopped = False
        self._pieces: list[str] = []
        self._events = self._run()
        self._reading = threading.Lock()

    def __next__(self) -> str:
        if self._text is None:
            raise UsageError("this artifact has no tokenizer: read tokens() instead of text")
        for _, piece in self._read():
            if piece:
                return piece
        raise StopIteration

    def tokens(self) -> Iterator[int]:
        """The new token ids as they come, the end token included."""
        for token, _ in self._read():
            if token is not None:
                yield token

    def result(self) -> Result:
        """Run to the end; everything that was generated."""
        for _ in self._read():
            pass
        if self.finish_reason is None:
            raise BitMTPError("this generation failed before its end: start it again")
        text = "".join(self._pieces) if self._text else None
        ids, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        return Result(text, ids, self.finish_reason, self.stats, logprobs)

    def cancel(self) -> None:
        """End it behind the tokens that were read, as "cancelled" if it has not ended yet.

        From another thread than the one that reads, it takes effect at that one's next read-back.
        """
        self._stream.cancel()
        if self._reading.acquire(blocking=False):
            self._reading.release()
            for _ in self._read():
                pass

    def _read(self) -> Iterator[tuple[int | None, str]]:
        """What is left of the events; one thread at a time runs them."""
        while True:
            with self._reading:
                event = next(self._events, None)
            if event is None:
                return
            yield event

    def _run(self) -> Iterator[tuple[int | None, str]]:
        for token in self._stream:
            self.token_ids.append(token)
            # The end token is not text, whatever the tokenizer says that it looks like.
            shown = self._text is not None and token not in self._end_ids
            yield token, self._push(token) if shown else ""
        rest = self._flush()
        # Where one token meets several conditions, the text was done.
        self.finish_reason = STOP if self._stopped else self._stream.finish_reason
        yield None, rest

    def _push(self, token: int) -> str:
        assert self._text is not None
        return self._decide(self._text.push(token))

    def _flush(self) -> str:
        if self._text is None or self._stopped:
            return ""
        rest = self._decide(self._text.flush())
        return rest if self._stopped else rest + self._keep(self._stop_strings.flush())

    def _decide(self, text: str) -> str:
        """The part of the text so far that no stop string can take away any more."""
        piece, self._stopped = self._stop_strings.push(text)
        if self._stopped:
            self._stream.end(STOP)
        return self._keep(piece)

    def _keep(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece
