"""How a request draws its tokens, with the names of vLLM and transformers."""

import os
from dataclasses import dataclass, replace

import numpy as np

from bitmtp_tvm.errors import UsageError, shown
from relax_models.state import Word

SEEDS = 1 << 64

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 1000.0
"""Below the least one float32 hardly tells the distribution from greedy choice."""

LEAST_PENALTY, MOST_PENALTY = 0.01, 100.0


@dataclass(frozen=True)
class SamplingOptions:
    """What changes the distribution that tokens are drawn from; the defaults are greedy.

    temperature: 0 takes the likeliest token. top_k: only the so many likeliest (0: all). top_p: of
    those only the fewest whose probabilities reach it together (1: all). min_p: of those only the
    ones at least this fraction as probable as the likeliest (0: all). repetition_penalty: positive
    logits of tokens that stand in the sequence are divided by it, negative ones multiplied (1:
    none), before everything else and for greedy choice too. seed: 0 to 2^64 - 1; a draw depends on
    it, the position and the distribution alone. Raises `UsageError` for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        # Written so that nan is refused too.
        if not _is_number(self.temperature) or not (
            self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE
        ):
            raise UsageError(
                f"temperature is {shown(self.temperature)}: give 0 for the likeliest token, or "
                f"{LEAST_TEMPERATURE} to {MOST_TEMPERATURE:g}"
            )
        if not _is_whole(self.top_k) or self.top_k < 0:
            raise UsageError(
                f"top_k is {shown(self.top_k)}: give a whole number of tokens, or 0 for all"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise UsageError(
                f"top_p is {shown(self.top_p)}: give a probability above 0, at most 1 (all tokens)"
            )
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise UsageError(
                f"min_p is {shown(self.min_p)}: give a fraction from 0 (all tokens) to 1"
            )
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not LEAST_PENALTY <= penalty <= MOST_PENALTY:
            raise UsageError(
                f"repetition_penalty is {shown(penalty)}: give {LEAST_PENALTY} to "
                f"{MOST_PENALTY:g}, where 1 changes nothing"
            )
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < SEEDS):
            raise UsageError(
                f"seed is {shown(self.seed)}: give a whole number from 0 to 2^64 - 1, or none for "
                "new draws every time"
            )

    def with_seed(self) -> "SamplingOptions":
        """These options with a seed: their own, or one that the system draws now."""
        if self.seed is not None:
            return self
        return replace(self, seed=int.from_bytes(os.urandom(8), "little"))

    def words(self) -> dict[Word, int]:
        """The words of the state that hold these options, int32; without a seed a new one."""
        seed = self.with_seed().seed or 0
        return {
            Word.TEMPERATURE: _bits(self.temperature),
            Word.TOP_K: min(self.top_k, 2**31 - 1),
            Word.TOP_P: _bits(self.top_p),
            Word.MIN_P: _bits(self.min_p),
            Word.PENALTY: _bits(self.repetition_penalty),
            Word.SEED_LOW: _signed(seed & 0xFFFFFFFF),
            Word.SEED_HIGH: _signed(seed >> 32),
        }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
