"""What a generation did and how long it took."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax_models.state import MOST_ROWS, Kind, Word


@dataclass
class Statistics:
    """Counts and host-side durations (seconds) of one generation; nothing after its end counts.

    `cached_tokens`: prompt tokens whose K/V were there already. `forwards`: steps that committed
    the new tokens; `idle_steps`: steps that the device ran after the sequence had ended.
    `evaluated`, `accepted`: by place in the step, drafts that were compared with their target (all
    before them right), and those found right. `steps`: steps run by bucket width, idle ones too.
    `decode_seconds`: from the first step to the last read-back; the caller's time is in it only
    while the device works ahead. `host_gap_seconds`: the part of it in which no step was enqueued.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    forwards: int = 0
    idle_steps: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)
    evaluated: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    steps: Counter[int] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_gap_seconds: float = 0.0
    _last: Kind = field(default=Kind.TARGET, repr=False)

    @property
    def accepted_length(self) -> float:
        """Tokens that a forward commits, on average; 0 before the first."""
        return self.new_tokens / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding, prefill left out; 0 when nothing was decoded."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def count_token(self, kind: Kind) -> None:
        """Count one delivered token, in the order of the sequence."""
        self.new_tokens += 1
        self.kinds[kind] += 1
        # A forward commits drafts, then one target, then unverified tokens; a stop may cut it off
        # after a draft. So what comes first says where a forward begins.
        if kind != Kind.UNVERIFIED and self._last != Kind.DRAFT:
            self.forwards += 1
        self._last = kind

    def settle(self, state: np.ndarray) -> None:
        """Take over the counters of `state` `(STATE_WORDS,)` int32, now that its tokens are out."""
        self.idle_steps = int(state[Word.IDLE])
        evaluated = state[Word.EVALUATED : Word.EVALUATED + MOST_ROWS]
        used = int(np.count_nonzero(evaluated))
        self.evaluated = evaluated[:used].tolist()
        self.accepted = state[Word.ACCEPTED : Word.ACCEPTED + used].tolist()

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "new_tokens": self.new_tokens,
            "forwards": self.forwards,
            "idle_steps": self.idle_steps,
            "accepted_length": round(self.accepted_length, 3),
            "tokens_by_kind": {kind.name.lower(): self.kinds[kind] for kind in Kind},
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "steps_by_bucket": {str(width): self.steps[width] for width in sorted(self.steps)},
            "prefill_seconds": round(self.prefill_seconds, 6),
            "decode_seconds": round(self.decode_seconds, 6),
            "host_gap_seconds": round(self.host_gap_seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 3),
        }
