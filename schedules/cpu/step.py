"""The two ends of a decode step on the processor: the definition's loops, which are short."""

import tvm
from tvm import tirx

from schedules.workload import Workload


def step_rows(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.step_ops.step_rows`."""
    return func


def accept(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.step_ops.accept`."""
    return func


def running(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.step_ops.running`."""
    return func
