"""Schedules made with primitives, whose decisions can be drawn: MetaSchedule's part of tuning.

A space is a function in plain loops and the steps that schedule it. Every number that the steps
could choose otherwise is a decision with a name, a list of values and the rule's value. The rule,
a record and a search all go through the same steps; what a decision changes is speed alone, so that
the results are the same bits whatever is decided.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import tvm
from tvm import s_tir, tirx

from schedules.workload import Workload

MAIN = "main"


class Decisions:
    """What the steps of a space decide on one schedule; `made` are the names and values so far.

    With `drawn` MetaSchedule draws each value; otherwise it is the one `given`, else the rule's.
    """

    def __init__(
        self, schedule: s_tir.Schedule, given: Mapping[str, int] | None = None, drawn: bool = False
    ):
        self.schedule = schedule
        self.given = given or {}
        self.drawn = drawn
        self.made: dict[str, int] = {}
        self.values: dict[str, tuple[int, ...]] = {}

    def one_of(self, name: str, values: Sequence[int], default: int) -> Any:
        """One of ascending `values`, as the schedule's own variable.

        Raises ValueError for a given value that is not among them.
        """
        wanted = self.given.get(name, default)
        if wanted not in values:
            raise ValueError(f"{name} is {wanted}, not one of {', '.join(map(str, values))}")
        index = None if self.drawn else values.index(wanted)
        chosen = self.schedule.sample_categorical(
            list(values), len(values) * [1 / len(values)], index
        )
        self.values[name] = tuple(values)
        self.made[name] = int(self.schedule.get(chosen))
        return chosen


Base = Callable[[tirx.PrimFunc, Workload, tvm.target.Target], tirx.PrimFunc | None]
Steps = Callable[[s_tir.Schedule, Decisions], None]


@dataclass(frozen=True)
class Space:
    """base: the operation in plain loops, None where the space does not serve it; steps: how its
    loops are scheduled."""

    base: Base
    steps: Steps


@dataclass(frozen=True)
class Sampled:
    """One operation that a space serves: `mod` holds its base alone, under the name `MAIN`.

    MetaSchedule knows the operation by the structural hash of `mod`.
    """

    work: Workload
    space: Space
    mod: tvm.IRModule

    def schedule(self, given: Mapping[str, int] | None = None) -> tuple[s_tir.Schedule, Decisions]:
        """The base under the decisions `given`, the rule's where none is.

        Raises ValueError for a decision that the space does not have.
        """
        schedule = s_tir.Schedule(self.mod)
        decisions = Decisions(schedule, given)
        self.space.steps(schedule, decisions)
        unknown = sorted(set(given or {}) - set(decisions.made))
        if unknown:
            raise ValueError(f"it decides nothing called {unknown[0]}")
        return schedule, decisions

    def function(self, given: Mapping[str, int] | None = None) -> tirx.PrimFunc:
        """The scheduled function, private as every kernel."""
        return self.schedule(given)[0].mod[MAIN].without_attr("global_symbol")

    def draw(self, schedule: s_tir.Schedule) -> None:
        """The steps with drawn decisions: the function of MetaSchedule's `ScheduleFn`."""
        self.space.steps(schedule, Decisions(schedule, drawn=True))

    def is_open(self) -> bool:
        """Whether anything could be decided otherwise."""
        return self.count() > 1

    def count(self) -> int:
        """Ways to schedule it."""
        _, decisions = self.schedule()
        return math.prod(len(values) for values in decisions.values.values())

    def combinations(self) -> Iterator[dict[str, int]]:
        """All that can be decided; the rule's first."""
        _, decisions = self.schedule()
        first = decisions.made
        yield first
        for values in product(*decisions.values.values()):
            found = dict(zip(decisions.values, values, strict=True))
            if found != first:
                yield found


def sampled(
    func: tirx.PrimFunc, work: Workload, space: Space, target: tvm.target.Target
) -> Sampled | None:
    """The operation `func` as `space` serves it, or None."""
    base = space.base(func, work, target)
    if base is None:
        return None
    # MetaSchedule's own estimate fails at vectors, and only its reports need one.
    marks = {"global_symbol": MAIN, "tirx.noalias": True, "estimated_flops": 1}
    named = base.with_attr(marks)
    return Sampled(work, space, tvm.IRModule({MAIN: named}))


def powers(extent: int, most: int | None = None) -> list[int]:
    """1, 2, 4 and so on below `extent`, then `extent` itself; none above `most`."""
    found = [1 << i for i in range((extent - 1).bit_length())] + [extent]
    return [n for n in found if most is None or n <= most]


def dividing(extent: int, most: int) -> list[int]:
    """The powers of two up to `most` that divide `extent`."""
    return [n for n in powers(most) if extent % n == 0]


def tasks(block: str, alone: int = 0) -> Steps:
    """Steps for a block whose outermost loop runs over independent tasks.

    Threads of the processor share them in portions of `grain`; a portion of all is one thread's.
    The rule's portion is one task, or all of them where the operation's first argument has no more
    than `alone` elements: by the time that other threads are awake, one would be done.
    """

    def steps(schedule: s_tir.Schedule, decide: Decisions) -> None:
        loop = schedule.get_loops(schedule.get_sblock(block))[0]
        extent = int(schedule.get(loop).extent)
        elements = math.prod(int(dim) for dim in schedule.mod[MAIN].params[0].ty.shape)
        ruled = extent if elements <= alone else 1
        grain = decide.one_of("grain", powers(extent), ruled)
        portions, _ = schedule.split(loop, [None, grain])
        schedule.parallel(portions)

    return steps


def tiled(block: str) -> Steps:
    """Steps for a block below two loops: tiles of a matrix, and groups of rows that meet them.

    `tiles` neighbouring tiles wait for the next group of rows together; the rule's one tile meets
    all groups before the next. Threads share runs of tiles in portions of `grain`.
    """

    def steps(schedule: s_tir.Schedule, decide: Decisions) -> None:
        loop, groups = schedule.get_loops(schedule.get_sblock(block))
        extent, meetings = (int(schedule.get(axis).extent) for axis in (loop, groups))
        together = decide.one_of("tiles", powers(extent, 16) if meetings > 1 else [1], 1)
        grain = decide.one_of("grain", powers(extent, 256), 1)
        portions, runs, tiles = schedule.split(loop, [None, grain, together])
        schedule.reorder(portions, runs, groups, tiles)
        schedule.parallel(portions)

    return steps
