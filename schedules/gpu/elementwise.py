"""The embedding's rows on cuda."""

import tvm
from tvm import s_tir, tirx

from schedules.gpu.thread import vector_width
from schedules.sampled import Decisions, Space, dividing
from schedules.workload import Workload

THREADS = 128


def _embed_definition(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.embed`: a row of the table is converted as it stands."""
    return func


def _embed_steps(schedule: s_tir.Schedule, decide: Decisions) -> None:
    """A row is shared by blocks of `threads`, each of which converts `vector` elements."""
    row, column = schedule.get_loops(schedule.get_sblock("hidden"))
    size = int(schedule.get(column).extent)
    threads = decide.one_of("threads", [32, 64, 128, 256, 512], THREADS)
    vector = decide.one_of("vector", dividing(size, 8), vector_width(size, 4))
    parts, thread, lane = schedule.split(column, [None, threads, vector])
    schedule.bind(schedule.fuse(row, parts), "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    schedule.vectorize(lane)


embed = Space(_embed_definition, _embed_steps)
