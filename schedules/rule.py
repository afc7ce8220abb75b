"""From a stamped operation and a target kind to its schedule."""

from collections.abc import Callable

import tvm
from tvm import tirx

from schedules import cpu, gpu
from schedules.parsing import quick_frames
from schedules.workload import Workload, read, scheduled

Rule = Callable[[tirx.PrimFunc, Workload, tvm.target.Target], tirx.PrimFunc | None]

RULES: dict[str, dict[str, Rule]] = {"llvm": cpu.RULES, "cuda": gpu.RULES}


def apply(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """The scheduled form of a specialised PrimFunc, with its signature and stamp, or None where the
    operation is not ours. Raises ValueError for a shape that the rule does not serve."""
    work = read(func)
    rule = RULES.get(target.kind.name, {}).get(work.op)
    with quick_frames():
        result = rule(func, work, target) if rule else None
    return None if result is None else scheduled(result, func)
