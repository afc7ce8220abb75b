"""How much of the budget is spent, and the learning rate that goes with it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A learning rate by the fraction of the budget that is spent, from 0 to 1.

    It rises over `warmup` (a fraction), then falls as half a cosine ("cosine") or stays and falls
    along a line over the last `decay` ("wsd"); both end at 0.
    """

    name: str
    lr: float
    warmup: float
    decay: float

    def at(self, spent: float) -> float:
        """The learning rate after this fraction of the budget."""
        spent = min(max(spent, 0.0), 1.0)
        if spent < self.warmup:
            return self.lr * spent / self.warmup
        if self.name == "cosine":
            rest = (spent - self.warmup) / max(1 - self.warmup, 1e-9)
            return self.lr * 0.5 * (1 + math.cos(math.pi * rest))
        return self.lr * min(1.0, (1 - spent) / max(self.decay, 1e-9))


@dataclass
class Budget:
    """Tokens or minutes to spend; `tokens` and `seconds` are what is spent."""

    most_tokens: int | None
    most_minutes: float | None
    tokens: int = 0
    # Of the loop alone: what comes before a process's first step, compiling above all, is not in.
    seconds: float = 0.0

    @property
    def spent(self) -> float:
        """The fraction that is spent."""
        if self.most_tokens is not None:
            return min(1.0, self.tokens / self.most_tokens)
        return min(1.0, self.seconds / (60 * float(self.most_minutes or 1)))

    @property
    def over(self) -> bool:
        return self.spent >= 1.0
