"""The search over all kernels of a step together.

Where kernels start early, what is best alone is not best in its place: how a kernel leaves the
device to the next one counts too. So the measure is the whole chain, and one task after the other
tries its best candidates in it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TOP = 8
ROUNDS = 2
FINALISTS = 4
REPEATS = 3

Choice = tuple[str, ...]
"""A candidate's name for each task, in the order of the tasks."""


@dataclass(frozen=True)
class Descent:
    """choice: by task, the candidate of the fastest chain; seconds: that chain's; before: those of
    the first chain that the descent was given; tried: chains that were timed."""

    choice: dict[str, str]
    seconds: float
    before: float
    tried: int


def descend(
    tops: Mapping[str, Sequence[str]],
    starts: Sequence[Mapping[str, str]],
    measure: Callable[[dict[str, str]], float],
    rounds: int = ROUNDS,
) -> Descent:
    """The fastest chain that coordinate descent finds from the best of `starts`.

    `tops`: each task's candidates, tasks in the order in which they are tried; `measure` gives the
    seconds of the chain with these candidates, infinity for one that fails. The fastest few are
    measured again, in turns, and the least median wins, since repeats differ by a percent or two.
    """
    tasks = tuple(tops)
    seen: dict[Choice, float] = {}

    def again(choice: Choice) -> float:
        return measure(dict(zip(tasks, choice, strict=True)))

    def timed(choice: Choice) -> float:
        if choice not in seen:
            seen[choice] = again(choice)
        return seen[choice]

    first = [tuple(start[task] for task in tasks) for start in starts]
    before, best = timed(first[0]), min(first, key=timed)
    for _ in range(rounds):
        start = best
        for place, names in enumerate(tops.values()):
            others = [(*best[:place], name, *best[place + 1 :]) for name in names]
            best = min([best, *others], key=timed)
        if best == start:
            break
    choice, seconds = _settle(seen, again)
    return Descent(dict(zip(tasks, choice, strict=True)), seconds, before, len(seen))


def _settle(
    seen: Mapping[Choice, float], measure: Callable[[Choice], float]
) -> tuple[Choice, float]:
    finalists = sorted(seen, key=lambda choice: seen[choice])[:FINALISTS]
    samples: dict[Choice, list[float]] = {choice: [] for choice in finalists}
    for _ in range(REPEATS):
        for choice in finalists:
            samples[choice].append(measure(choice))
    medians = {choice: sorted(values)[len(values) // 2] for choice, values in samples.items()}
    winner = min(finalists, key=lambda choice: medians[choice])
    return winner, medians[winner]


def shortlist(seconds: Mapping[str, float], always: Sequence[str], top: int = TOP) -> list[str]:
    """The fastest candidates alone, fastest first, with those of `always` that work."""
    order = sorted(seconds, key=lambda name: seconds[name])
    kept = [name for name in order if name in always]
    others = [name for name in order if name not in always][: max(top - len(kept), 0)]
    return sorted([*kept, *others], key=lambda name: seconds[name])


def shares(
    seconds: float, alone: Mapping[str, float], counts: Mapping[str, int]
) -> dict[str, float]:
    """Seconds of one launch of each task in a chain of `seconds`, shared out as it is alone."""
    whole = math.fsum(alone[name] * counts[name] for name in alone)
    return {name: seconds * alone[name] / whole for name in alone}
