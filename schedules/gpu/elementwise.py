"""Operations without a sum on cuda: the embedding's rows, and RoPE with the cache write."""

import tvm
from tvm import s_tir, tirx
from tvm.script import tirx as T

from schedules.gpu.thread import add, ceil_div, mul, vector_width
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


def rope_kv_write(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.rope_kv_write`."""
    (width, columns), _, _, (positions, half, _), cache_shape, (_, heads, head_dim) = work.shapes
    kv_heads, slots = cache_shape[1:3]
    first_v = heads + kv_heads
    pairs = width * columns // 2

    # A thread's pair of elements d and d + half of one head; heads stand in the order q, k, v.
    def low(qkv, table, i, c, position, d):
        cos, sin = table[position, d, 0], table[position, d, 1]
        return add(mul(qkv[i, c], cos), -mul(qkv[i, c + half], sin))

    def high(qkv, table, i, c, position, d):
        cos, sin = table[position, d, 0], table[position, d, 1]
        return add(mul(qkv[i, c + half], cos), mul(qkv[i, c], sin))

    @T.macro
    def rotate(qkv, position, boundary, table, cache, q, i, head, d):
        if head < heads:
            q[i, head, d] = low(qkv, table, i, head * head_dim + d, position[i], d)
            q[i, head, d + half] = high(qkv, table, i, head * head_dim + d, position[i], d)
        elif head < first_v:
            cache[0, head - heads, boundary[0] + i, d] = T.Cast(
                "float16", low(qkv, table, i, head * head_dim + d, position[i], d)
            )
            cache[0, head - heads, boundary[0] + i, d + half] = T.Cast(
                "float16", high(qkv, table, i, head * head_dim + d, position[i], d)
            )
        else:
            cache[1, head - first_v, boundary[0] + i, d] = T.Cast(
                "float16", qkv[i, head * head_dim + d]
            )
            cache[1, head - first_v, boundary[0] + i, d + half] = T.Cast(
                "float16", qkv[i, head * head_dim + d + half]
            )

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv: T.Buffer((width, columns), "float32"),
        position: T.Buffer((width,), "int32"),
        boundary: T.Buffer((1,), "int32"),
        table: T.Buffer((positions, half, 2), "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        q: T.Buffer((width, heads, head_dim), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(pairs, THREADS), thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("pair"):
                    pair = T.axis.spatial(pairs, bx * THREADS + tx)
                    T.where(bx * THREADS + tx < pairs)
                    T.reads(
                        qkv[0:width, 0:columns],
                        position[0:width],
                        boundary[0],
                        table[0:positions, 0:half, 0:2],
                    )
                    T.writes(
                        cache[0:2, 0:kv_heads, 0:slots, 0:head_dim],
                        q[0:width, 0:heads, 0:head_dim],
                    )
                    rotate(
                        qkv,
                        position,
                        boundary,
                        table,
                        cache,
                        q,
                        pair // (columns // 2),
                        pair % (columns // 2) // half,
                        pair % half,
                    )

    return func
