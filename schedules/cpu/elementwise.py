"""Embeddings, RoPE and the KV write on the processor: the definition's loops, vectorised."""

import math

import tvm
from tvm import s_tir, tirx

from schedules.cpu.vector import lanes_for
from schedules.sampled import Decisions, Space, Steps, dividing, powers
from schedules.workload import Workload

MOST_LANES = 64


def definition(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """The operation as relax_models defines it."""
    return func


def rows(*blocks: str, vectorized: bool = True) -> Steps:
    """Steps for blocks that write rows: `lanes` elements at a time, rows shared by the threads in
    portions of `grain`. The rule leaves all rows to one thread: there are few, and little to do."""

    def steps(schedule: s_tir.Schedule, decide: Decisions) -> None:
        loops = [schedule.get_loops(schedule.get_sblock(block)) for block in blocks]
        size = math.gcd(*(int(schedule.get(nest[-1]).extent) for nest in loops))
        width = int(schedule.get(loops[0][0]).extent)
        ruled = lanes_for(size) if vectorized else 1
        lanes = decide.one_of("lanes", dividing(size, MOST_LANES), ruled)
        grain = decide.one_of("grain", powers(width), width)
        for outer, *_, inner in loops:
            portions, _ = schedule.split(outer, [None, grain])
            _, lane = schedule.split(inner, [None, lanes])
            schedule.parallel(portions)
            schedule.vectorize(lane)

    return steps


embed = Space(definition, rows("hidden"))
rope_kv_write = Space(definition, rows("rotate_q", "rotate_k", "write_v"))
# A few rows of the table, and a code of each word at a time: the plain loops will do.
low_bit_embed = Space(definition, rows("hidden", vectorized=False))
