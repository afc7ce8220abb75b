"""Embeddings, RoPE and the KV write on the processor: the definition's loops, vectorised."""

import tvm
from tvm import s_tir, tirx

from schedules.cpu.vector import lanes_for
from schedules.workload import Workload


def embed(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.ops.embed`."""
    return _vectorized(func, ["hidden"])


def rope_kv_write(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.rope_kv_write`."""
    return _vectorized(func, ["rotate_q", "rotate_k", "write_v"])


def low_bit_embed(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.low_bit_embed`. A few rows of the table: the plain loops will do."""
    return func


def _vectorized(func: tirx.PrimFunc, blocks: list[str]) -> tirx.PrimFunc:
    """Vectorise the innermost loop of each block by the lanes that divide it."""
    schedule = s_tir.Schedule(func.with_attr("global_symbol", "main"))
    for name in blocks:
        inner = schedule.get_loops(schedule.get_sblock(name))[-1]
        _, lane = schedule.split(inner, [None, lanes_for(int(schedule.get(inner).extent))])
        schedule.vectorize(lane)
    return schedule.mod["main"].without_attr("global_symbol")
