"""MetaSchedule's search over a space of named decisions: all of it, in the order of a cost model.

Its own searches draw decisions at random and change some of them. The spaces here are small, so
every combination is known: what is measured next is what the cost model thinks fastest, and every
fourth something at random. The rule is measured before any search.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from bitmtp_tvm.cli import check_stopped
from schedules.sampled import Sampled

MOST_COMBINATIONS = 4096
"""Of a larger space a part is looked at."""
ANYTHING = 4
"""Of so many candidates one is taken at random."""
LOT = 8
"""For one that is taken so many are scored."""


@derived_object
class RankedSearch(ms.search_strategy.PySearchStrategy):
    """Every combination of an operation's decisions, each once."""

    def __init__(self, operation: Sampled, seed: int = 0):
        super().__init__()
        self.operation = operation
        self.seed = seed
        self.context: Any = None
        self.model: Any = None
        self.left: list[dict[str, int]] = []
        self.trials = 0
        self.each = 0

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.context = context

    def pre_tuning(
        self, max_trials: int, num_trials_per_iter: int, design_spaces: Any, *rest: Any
    ) -> None:
        self.left = list(combinations(self.operation, self.seed))
        self.trials, self.each = max_trials, num_trials_per_iter
        self.model = rest[1] if len(rest) > 1 else None

    def post_tuning(self) -> None:
        self.left = []

    def generate_measure_candidates(self) -> list[ms.MeasureCandidate] | None:
        check_stopped()
        count = min(self.each, self.trials, len(self.left))
        if not count:
            return None
        self.trials -= count
        chosen = set(next_ones(len(self.left), count, self._score, self.seed))
        taken = [decided for i, decided in enumerate(self.left) if i in chosen]
        self.left = [decided for i, decided in enumerate(self.left) if i not in chosen]
        return [candidate(self.operation, decided) for decided in taken]

    def _score(self, indices: Sequence[int]) -> Sequence[float]:
        """How good the cost model thinks each is."""
        if self.model is None:
            return [0.0] * len(indices)
        candidates = [candidate(self.operation, self.left[i]) for i in indices]
        return [float(score) for score in self.model.predict(self.context, candidates)]

    def notify_runner_results(self, candidates: Any, results: Any) -> None:
        """The cost model learns by MetaSchedule's own callback."""

    def clone(self) -> "RankedSearch":
        return RankedSearch(self.operation, self.seed)


def next_ones(
    left: int, count: int, score: Callable[[Sequence[int]], Sequence[float]], seed: int
) -> list[int]:
    """Indices of the next `count` of `left` candidates: the best by `score`, and some at random.

    Of many only a part is scored.
    """
    if left <= count:
        return list(range(left))
    random = Random(f"{seed} {left}")
    lot = random.sample(range(left), min(left, LOT * count))
    scores = dict(zip(lot, score(lot), strict=True))
    ranked = sorted(lot, key=lambda index: -scores[index])
    free = count // ANYTHING
    return [*ranked[: count - free], *random.sample(ranked[count - free :], free)]


def combinations(operation: Sampled, seed: int) -> Iterator[dict[str, int]]:
    """What can be decided, in random order behind the rule's; a part of very large spaces."""
    first, *others = islice(operation.combinations(), MOST_COMBINATIONS)
    Random(seed).shuffle(others)
    yield first
    yield from others


def candidate(operation: Sampled, decided: dict[str, int]) -> ms.MeasureCandidate:
    schedule, _ = operation.schedule(decided)
    return ms.MeasureCandidate(schedule, arguments(operation))


def arguments(operation: Sampled) -> list[Any]:
    """Shapes and types of an operation's buffers, as MetaSchedule's runners want them."""
    made: Iterable[Any] = ms.arg_info.ArgInfo.from_entry_func(operation.mod, remove_preproc=False)
    return list(made)
