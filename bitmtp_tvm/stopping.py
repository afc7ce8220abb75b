"""When a generation ends: end tokens, the wanted number of tokens, the context limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from bitmtp_tvm.errors import UsageError

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True)
class StopCondition:
    """What ends a generation.

    `eos_token_ids`: any of these ends it, as the last committed token. `max_new_tokens`: tokens at
    most, the end token counted. `context`: tokens at most, the prompt counted. Raises `UsageError`
    when `max_new_tokens` is below 1.
    """

    eos_token_ids: frozenset[int]
    max_new_tokens: int
    context: int

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise UsageError(
                f"max_new_tokens is {self.max_new_tokens!r}: ask for a whole number of at least 1"
            )

    def before(self, prompt_tokens: int) -> str | None:
        """The finish reason of a prompt of `prompt_tokens` tokens that leaves no room for another.

        End tokens inside the prompt do not count: only generated ones stop.
        """
        return LENGTH if prompt_tokens >= self.context else None

    def cut(self, accepted: Sequence[int], n: int, prompt_tokens: int) -> tuple[int, str | None]:
        """How many of the `accepted` tokens stay, and the finish reason if one of them is the last.

        `accepted` are the tokens of one forward, in order, that follow the `n` committed ones, of
        which the first `prompt_tokens` are the prompt. The earliest stop wins; where one token
        meets several conditions the end token does.
        """
        for kept, token in enumerate(accepted, start=1):
            if token in self.eos_token_ids:
                return kept, STOP
            if n + kept - prompt_tokens >= self.max_new_tokens or n + kept >= self.context:
                return kept, LENGTH
        return len(accepted), None
