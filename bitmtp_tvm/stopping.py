"""When a generation ends: end tokens, stop strings, the wanted number of tokens, the context."""

from collections.abc import Sequence
from dataclasses import dataclass

from bitmtp_tvm.errors import BitMTPError, UsageError, shown
from relax_models.state import MOST_STOPS

STOP = "stop"
LENGTH = "length"
CANCELLED = "cancelled"


@dataclass(frozen=True)
class StopCondition:
    """What ends a generation on the device.

    `eos_token_ids`: any of these ends it, as the last committed token. `max_new_tokens`: tokens at
    most, the end token counted. `context`: tokens at most, the prompt counted. Raises `UsageError`
    when `max_new_tokens` is below 1, `BitMTPError` for more end tokens than the device has room
    for.
    """

    eos_token_ids: frozenset[int]
    max_new_tokens: int
    context: int

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise UsageError(
                f"max_new_tokens is {self.max_new_tokens!r}: ask for a whole number of at least 1"
            )
        if len(self.eos_token_ids) > MOST_STOPS:
            raise BitMTPError(
                f"this model names {len(self.eos_token_ids)} end tokens and at most {MOST_STOPS} "
                "can be looked for: shorten eos_token_id in its generation_config.json and compile "
                "it again"
            )

    def before(self, prompt_tokens: int) -> str | None:
        """The finish reason of a prompt of `prompt_tokens` tokens that leaves no room for another.

        End tokens inside the prompt do not count: only generated ones stop.
        """
        return LENGTH if prompt_tokens >= self.context else None

    def limit(self, prompt_tokens: int) -> int:
        """Tokens of the whole sequence at most."""
        return min(prompt_tokens + self.max_new_tokens, self.context)


def check_stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a request; one text is one of them. Raises `UsageError`."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UsageError(
                f"{shown(string)} is no stop string: give texts of at least one character"
            )
    return strings


class StopStrings:
    """Looks for stop strings in a text that arrives in pieces.

    The one that is complete first ends the text, and of those that end with the same character the
    longest; so it does not matter where the pieces part.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that is decided by `piece`, and whether a stop string follows it.

        What may be the beginning of a stop string is held back.
        """
        text, self._held = self._held + piece, ""
        found = [(text.find(s) + len(s), text.find(s)) for s in self._strings if s in text]
        if found:
            return text[: min(found)[1]], True
        undecided = max((_overlap(text, string) for string in self._strings), default=0)
        shown_up_to = len(text) - undecided
        self._held = text[shown_up_to:]
        return text[:shown_up_to], False

    def flush(self) -> str:
        """What is still held back, now that no text follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Characters at the end of `text` that `string` begins with, all of `string` left out."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)
