"""Operations without a sum on cuda: the embedding's rows, and RoPE with the cache write."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.thread import add, ceil_div, from_bf16, mul, vector_width
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
