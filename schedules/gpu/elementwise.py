"""The embedding's rows on cuda."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.thread import ceil_div, from_bf16, vector_width
from schedules.workload import Workload

THREADS = 128


def embed(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.ops.embed`."""
    (width,), (vocab_size, size), _ = work.shapes
    vector = vector_width(size, 4)
    parts = ceil_div(size, vector * THREADS)

    @T.prim_func(private=True, s_tir=True)
    def func(
        tokens: T.Buffer((width,), "int32"),
        table: T.Buffer((vocab_size, size), "uint16"),
        hidden: T.Buffer((width, size), "float32"),
    ):
        for bx in T.thread_binding(width * parts, thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                for j in T.vectorized(vector):
                    with T.sblock("hidden"):
                        row = T.axis.spatial(width, bx // parts)
                        k = T.axis.spatial(size, (bx % parts * THREADS + tx) * vector + j)
                        T.where((bx % parts * THREADS + tx) * vector + j < size)
                        hidden[row, k] = from_bf16(table[tokens[row], k])

    return func
