"""What a request accepts: decaying counts by position, and the tokens per step that follow."""

from itertools import accumulate

import numpy as np

from relax_models.state import Layout

HALF_LIFE = 128
"""Steps after which what was seen counts half: text changes."""

PRIOR_STEPS, PRIOR_STEPS_ALONE = 2.0, 8.0
"""Steps that the guesses below are worth: real ones soon outweigh them. Where each request learns
for itself alone they are worth more: the first tokens of a text are its hardest."""

NEIGHBOUR_STEPS = 12.0
"""Steps that a position's guess is worth when it comes from the position before it."""

PRIOR_RUN, PRIOR_RUN_ALONE, PRIOR_RUN_ON = 0.6, 0.7, 0.8
"""Chance that a block drafts anything, and that a draft is followed by another."""

PRIOR_CHAIN, PRIOR_CHAIN_ON = 0.35, 0.8
PRIOR_RIGHT, PRIOR_RIGHT_ALONE = 0.8, 0.95
"""Chance that a draft equals its target, when all before it did. A request that learns alone begins
with about what the demo's drafts do (97 % are right): by low guesses it is over before it comes to
wide steps. Low ones make a first request try more depths, which serves those behind it."""


class Acceptance:
    """Counters as the state keeps them, by position j of a draft or mask row, with a half-life.

    `alone`: they are of one request, which no other's come before.
    """

    def __init__(self, positions: int, alone: bool = False) -> None:
        self._positions = positions
        self._prior = PRIOR_STEPS_ALONE if alone else PRIOR_STEPS
        self._run_guess = PRIOR_RUN_ALONE if alone else PRIOR_RUN
        self._right_guess = PRIOR_RIGHT_ALONE if alone else PRIOR_RIGHT
        self._counts = np.zeros((5, positions))
        self._open = np.zeros(positions)
        self._stale = True
        self._refresh()

    def add(self, counts: np.ndarray, drafts: int, steps: int) -> None:
        """Take in `steps` steps that ran with at most `drafts` drafts.

        counts `(5, positions)`: rises of EVALUATED, ACCEPTED, OFFERED, PROPOSED, CHAINED.
        """
        decay = 0.5 ** (steps / HALF_LIFE)
        self._counts = self._counts * decay + counts
        # Where draft j could have stood behind right ones: rows that the choice left no room for
        # say nothing about it.
        opened = np.concatenate(([0], counts[1, :-1]))
        opened[drafts:] = 0
        self._open = self._open * decay + opened
        self._stale = True

    def tokens_per_step(
        self, layout: Layout, *, drafts: int, masks: int, min_chain: int, most_chain: int
    ) -> float:
        """Expected tokens of a step with at most `drafts` drafts and `masks` mask rows a block.

        A valid block commits its chain if that has `min_chain` tokens, and drafts its run if not.
        """
        if not masks:
            return 1.0
        if self._stale:
            self._refresh()
        longest = min(masks, most_chain)
        committed, chosen = 0.0, 0.0
        if min_chain <= longest:
            chosen = self._chain[min_chain - 1]
            committed = min_chain * chosen + sum(self._chain[min_chain:longest])
        some = max(0.0, self._run[0] - chosen)
        depth = min(drafts, masks)
        gain = committed + some * self._right[depth]
        # In the chain layout a wrong draft voids the masks: one more step, which has no drafts.
        wrong = some * self._wrong[depth] if layout == Layout.CHAIN else 0.0
        return 1 + gain / (1 + wrong)

    def _refresh(self) -> None:
        """Probabilities from the counts; each position's guess is what its predecessor shows."""
        evaluated, accepted, offered, proposed, chained = self._counts.tolist()
        self._run = self._leading(proposed, offered, self._run_guess, PRIOR_RUN_ON)
        self._chain = self._leading(chained, offered, PRIOR_CHAIN, PRIOR_CHAIN_ON)
        right, wrong = [], []
        reached, guess = 1.0, self._right_guess
        for j in range(self._positions):
            if j:
                follows = self._run[j] / self._run[j - 1]
                reached *= min(1.0, self._mean(evaluated[j], float(self._open[j]), follows, j))
            guess = self._mean(accepted[j], evaluated[j], guess, j)
            wrong.append(reached * (1 - guess))
            reached *= guess
            right.append(reached)
        # For a block that drafts at all: accepted drafts, and the chance that one is wrong, when
        # at most so many may stand.
        self._right = [0.0, *accumulate(right)]
        self._wrong = [0.0, *accumulate(wrong)]
        self._stale = False

    def _leading(
        self, hits: list[float], offers: list[float], first: float, on: float
    ) -> list[float]:
        """Chance that a leading run goes beyond position j."""
        found: list[float] = []
        for j, (hit, offer) in enumerate(zip(hits, offers, strict=True)):
            # Sure blocks go on being sure.
            if found:
                on = found[-1] / found[-2] if len(found) > 1 else max(on, found[-1])
            chance = self._mean(hit, offer, found[-1] * on if found else first, j)
            # Never 0, so that ratios exist; never above the shorter run's.
            found.append(max(1e-6, min(chance, found[-1] if found else 1.0)))
        return found

    def _mean(self, hits: float, trials: float, guess: float, position: int) -> float:
        weight = NEIGHBOUR_STEPS if position else self._prior
        return (hits + weight * guess) / (trials + weight)
