"""An artifact that is ready to answer: text in, pieces of text out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitmtp_tvm.chat import ChatTemplate, Message, read_template
from bitmtp_tvm.decoder import Decoder, Statistics, TokenSession, check_prompt
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.stopping import StopCondition
from bitmtp_tvm.text import TextCodec, TextStream

# Called with the phase in words, the amount done and the total, in bytes.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Parts:
    """What an engine is made of.

    `codec` is None for an artifact without a tokenizer, `chat` for one without a chat template.
    """

    session: TokenSession
    codec: TextCodec | None
    eos_token_ids: frozenset[int]
    chat: ChatTemplate | None = None


def open_parts(directory: Path, progress: Progress | None) -> Parts:
    """Check the artifact in `directory` and load it; raises `BitMTPError` with the reason."""
    # Here and not above: these load TVM, and an engine's class can be looked at without it.
    from bitmtp_tvm.artifact import check_device, open_artifact
    from bitmtp_tvm.session import Session

    artifact = open_artifact(directory)
    check_device(artifact)
    info, path = artifact.manifest.tokenizer, artifact.tokenizer
    vocab_size = artifact.manifest.config["vocab_size"]
    # Before the parameters, which take longer to load than a bad tokenizer takes to be found.
    codec = TextCodec(path, info.add_bos, info.bos_token_id, vocab_size) if path else None
    template = artifact.chat_template
    chat = read_template(template, info.special_tokens) if template else None
    return Parts(Session(artifact, progress), codec, frozenset(info.eos_token_ids), chat)


@dataclass(frozen=True)
class Result:
    """A finished generation.

    `text`: without the end token; None when the artifact has no tokenizer. `token_ids`: the new
    tokens, the end token included. `finish_reason`: "stop" (an end token) or "length" (the wanted
    number of tokens, or the context limit).
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Statistics

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(),
        }


class Generation(Iterator[str]):
    """A generation under way: iterate for pieces of text, or `tokens()` for ids.

    Both read the same generation; `result()` runs what is left of it. `token_ids`, `stats` and
    `finish_reason` (None until the end) may be looked at any time.
    """

    def __init__(
        self, decoder: Decoder, ids: Iterator[int], codec: TextCodec | None, end_ids: frozenset[int]
    ) -> None:
        self.token_ids: list[int] = []
        self.stats = decoder.statistics
        self.finish_reason: str | None = None
        self._has_text = codec is not None
        self._text: list[str] = []
        self._events = self._run(decoder, ids, TextStream(codec) if codec else None, end_ids)

    def __next__(self) -> str:
        if not self._has_text:
            raise UsageError("this artifact has no tokenizer: read tokens() instead of text")
        for _, piece in self._events:
            if piece:
                return piece
        raise StopIteration

    def tokens(self) -> Iterator[int]:
        """The new token ids as they come, the end token included."""
        for token, _ in self._events:
            if token is not None:
                yield token

    def result(self) -> Result:
        """Run to the end; everything that was generated."""
        for _ in self._events:
            pass
        if self.finish_reason is None:
            raise BitMTPError("this generation failed before its end: start it again")
        text = "".join(self._text) if self._has_text else None
        return Result(text, tuple(self.token_ids), self.finish_reason, self.stats)

    def _run(
        self,
        decoder: Decoder,
        ids: Iterator[int],
        stream: TextStream | None,
        end_ids: frozenset[int],
    ) -> Iterator[tuple[int | None, str]]:
        for token in ids:
            self.token_ids.append(token)
            # The end token is not text, whatever the tokenizer says that it looks like.
            piece = stream.push(token) if stream and token not in end_ids else ""
            self._text.append(piece)
            yield token, piece
        self.finish_reason = decoder.finish_reason
        rest = stream.flush() if stream else ""
        self._text.append(rest)
        yield None, rest


class Engine:
    """A loaded artifact: `for piece in Engine("dist/…").generate("…"): print(piece, end="")`.

    One generation at a time. Loading checks the artifact first and raises `BitMTPError` when it
    does not fit this machine; `progress` is called while it loads.
    """

    def __init__(self, directory: str | Path, progress: Progress | None = None) -> None:
        parts = open_parts(Path(directory), progress)
        self._session = parts.session
        self._codec = parts.codec
        self._chat = parts.chat
        self._eos_token_ids = parts.eos_token_ids
        self._decoder = Decoder(parts.session)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids of a prompt: text with the start token, or ids as they are.

        Raises `UsageError` when the prompt cannot be served (empty, too long, unknown ids, text
        for an artifact without a tokenizer).
        """
        ids = self._text_codec().encode(prompt) if isinstance(prompt, str) else prompt
        return check_prompt(ids, self._session.vocab_size, self._session.context)

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        """The ids of a conversation that the assistant answers next; a text is one user message.

        A message is {"role": "system" | "user" | "assistant", "content": text}. The artifact's chat
        template writes them out, start token included. Raises `UsageError` as `encode` does, and
        without a template.
        """
        codec = self._text_codec()
        if self._chat is None:
            raise UsageError(
                "this artifact has no chat template, for its checkpoint had none: give the prompt "
                "as plain text, without --chat"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids = codec.encode_rendered(self._chat.render(messages))
        return check_prompt(ids, self._session.vocab_size, self._session.context)

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int = 128) -> Generation:
        """Start a greedy generation after `prompt` (text, or token ids taken as they are).

        Raises `UsageError` as `encode` does, and for `max_new_tokens` below 1. The work is done as
        the `Generation` is read.
        """
        return self._start(self.encode(prompt), max_new_tokens)

    def chat(self, messages: str | Sequence[Message], max_new_tokens: int = 128) -> Generation:
        """Start a greedy generation of the answer to `messages`; see `encode_chat`."""
        return self._start(self.encode_chat(messages), max_new_tokens)

    def _start(self, prompt_ids: list[int], max_new_tokens: int) -> Generation:
        stop = StopCondition(self._eos_token_ids, max_new_tokens, self._session.context)
        ids = self._decoder.generate(prompt_ids, stop)
        return Generation(self._decoder, ids, self._codec, self._eos_token_ids)

    def _text_codec(self) -> TextCodec:
        if self._codec is None:
            raise UsageError(
                "this artifact has no tokenizer: give token ids (--prompt-ids 1,2,3) instead of "
                "text"
            )
        return self._codec
