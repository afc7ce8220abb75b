"""The two ends of a decode step on cuda: small integer work in one block."""

import tvm
from tvm import s_tir, tirx

from schedules.workload import Workload


def step_rows(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.step_ops.step_rows`: one thread a row."""
    return _bound(func, "rows")


def accept(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.step_ops.accept`: one thread, for each decision hangs on the one before."""
    return _bound(func, "accept")


def _bound(func: tirx.PrimFunc, block: str) -> tirx.PrimFunc:
    # Without checks: they refuse to bind a block that reads what it writes, since they cannot know
    # that one thread does it all, or that rows stay out of each other's way.
    schedule = s_tir.Schedule(func.with_attr("global_symbol", "main"), enable_check=False)
    (loop,) = schedule.get_loops(schedule.get_sblock(block))
    schedule.bind(loop, "threadIdx.x")
    return schedule.mod["main"].without_attr("global_symbol")
