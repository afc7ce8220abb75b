"""The decode loop: it knows tokens, the committed length and the materialised boundary."""

import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.stopping import StopCondition


class TokenSession(Protocol):
    """What the decoder needs of a session."""

    @property
    def context(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def prefill(self, tokens: Sequence[int], start: int) -> None:
        """Write the K/V of `tokens` to the slots from `start` on."""

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        boundary: int,
        visible: np.ndarray | None,
        logit_rows: Sequence[int],
    ) -> np.ndarray:
        """Run the rows at slots `boundary`, …; the greedy token of each of `logit_rows` (int32)."""


@dataclass
class Statistics:
    """Counts and host-side durations of one generation; waiting for the caller is not in them."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    forwards: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding, prefill left out; 0 when nothing was decoded."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, int | float]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "forwards": self.forwards,
            "prefill_seconds": round(self.prefill_seconds, 6),
            "decode_seconds": round(self.decode_seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 3),
        }


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, context: int) -> list[int]:
    """The prompt as a list of ints.

    Raises `UsageError` for an empty prompt, one longer than `context`, or an id outside
    [0, `vocab_size`): on the device such an id would read memory that is not the embedding's.
    """
    if isinstance(prompt_ids, bytes):
        raise UsageError("a prompt is a text or a list of token ids, not bytes: decode it first")
    try:
        tokens = [operator.index(token) for token in prompt_ids]
    except TypeError as fault:
        raise UsageError(f"a prompt is a text or a list of token ids: {fault}") from fault
    if not tokens:
        raise UsageError("the prompt has no tokens: give at least one")
    for place, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"token id {token} at place {place} of the prompt is outside the vocabulary: ids "
                f"go from 0 to {vocab_size - 1}"
            )
    if len(tokens) > context:
        raise UsageError(
            f"the prompt has {len(tokens)} tokens and the artifact's context holds {context}: "
            "shorten it, or compile with a larger --context"
        )
    return tokens


class Decoder:
    """One sequence over one session.

    `tokens`: the committed prefix, `n` its length. `b`: KV slots [0, b) hold the causal K/V of
    tokens[0:b), and b < n once there are tokens; tokens[b:n) are pending. `finish_reason`: "stop",
    "length", or None while the sequence may still grow.
    """

    def __init__(self, session: TokenSession) -> None:
        self.session = session
        self.tokens: list[int] = []
        self.b = 0
        self.finish_reason: str | None = None
        self.statistics = Statistics()
        self._sequence = 0

    @property
    def n(self) -> int:
        return len(self.tokens)

    def generate(self, prompt_ids: Sequence[int], stop: StopCondition) -> Iterator[int]:
        """Greedy tokens after `prompt_ids`, each as soon as it is committed; the end token too.

        The prompt is checked here (`check_prompt`), the work is done as the iterator is read.
        Starting another generation ends this one: reading on raises `BitMTPError`, and so do
        logits that are not finite.
        """
        if stop.context > self.session.context:
            raise ValueError(f"{stop.context} tokens of context, the session has room for fewer")
        tokens = check_prompt(prompt_ids, self.session.vocab_size, stop.context)
        self._sequence += 1
        self.tokens, self.b = tokens, 0
        self.finish_reason = stop.before(self.n)
        self.statistics = Statistics(prompt_tokens=self.n)
        return self._deliver(stop, self._sequence)

    def _deliver(self, stop: StopCondition, sequence: int) -> Iterator[int]:
        self._check_current(sequence)
        if self.finish_reason is None:
            self._prefill()
        while self.finish_reason is None:
            for token in self._step(stop):
                self.statistics.new_tokens += 1
                yield token
                self._check_current(sequence)

    def _check_current(self, sequence: int) -> None:
        if sequence != self._sequence:
            raise BitMTPError(
                "this generation was cut off by a newer one on the same engine: read one to its "
                "end before starting the next"
            )

    def _prefill(self) -> None:
        """Materialise all but the last token, which is the first pending one."""
        start = time.perf_counter()
        if self.b < self.n - 1:
            self.session.prefill(self.tokens[self.b : self.n - 1], self.b)
            self.b = self.n - 1
        self.statistics.prefill_seconds += time.perf_counter() - start

    def _step(self, stop: StopCondition) -> list[int]:
        """One forward; the tokens that it commits."""
        start = time.perf_counter()
        b, n = self.b, self.n
        targets = self.session.decode(self.tokens[b:], range(b, n), b, None, [n - b - 1])
        accepted = [int(target) for target in targets]
        if min(accepted) < 0:
            raise BitMTPError(
                f"the model gave no finite logit for the token at position {n}: its weights are "
                "damaged or do not belong to this program, compile the artifact again"
            )
        committed = self._commit(accepted, n, stop)
        self.statistics.forwards += 1
        self.statistics.decode_seconds += time.perf_counter() - start
        return committed

    def _commit(self, accepted: list[int], materialised: int, stop: StopCondition) -> list[int]:
        """Append `accepted` up to the stop; the forward filled the slots [0, `materialised`)."""
        kept, self.finish_reason = stop.cut(accepted, self.n, self.statistics.prompt_tokens)
        self.tokens += accepted[:kept]
        # A stop inside the accepted tokens leaves rows beyond it: they are scratch again.
        self.b = min(materialised, self.n - 1)
        return accepted[:kept]
