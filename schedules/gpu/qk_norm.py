"""RMSNorm of query and key heads on cuda: one warp a head, whose tree depends on its size alone."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.thread import WARP, ceil_div, constant, fma, span, splat, vector_width, warp_sum
from schedules.workload import Workload

WARPS = 4


def qk_norm(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.ops.qk_norm`."""
    (width, columns), (size,) = work.shapes[:2]
    query_heads = work.settings["num_heads"]
    first_v = query_heads + work.settings["num_kv_heads"]
    heads = columns // size
    items, threads = width * heads, WARPS * WARP
    vector = vector_width(size, 4)
    turns = ceil_div(size, WARP * vector)
    zeros = splat(T.float32(0), vector)
    eps = constant(work.settings["eps"])

    def first(turn, lane):
        """The first element of a lane's vector in a turn."""
        return (turn * WARP + lane) * vector

    @T.macro
    def normalize(held, q_norm, k_norm, head, lane):
        square = T.sblock_alloc_buffer((1,), "float32", scope="local")
        square[0] = T.float32(0)
        for i in T.unroll(turns * vector):
            square[0] = fma(held[i], held[i], square[0])
        warp_sum(square, 0, WARP)
        square[0] = T.float32(1) / T.sqrt(square[0] / T.float32(size) + eps)
        for turn in T.unroll(turns):
            if first(turn, lane) < size:
                held[span(turn * vector, vector)] = (
                    held[span(turn * vector, vector)]
                    * splat(square[0], vector)
                    * T.if_then_else(
                        head < query_heads,
                        q_norm[span(first(turn, lane), vector)],
                        k_norm[span(first(turn, lane), vector)],
                    )
                )

    @T.macro
    def one_head(qkv, q_norm, k_norm, normed, row, head, lane):
        held = T.sblock_alloc_buffer((turns * vector,), "float32", scope="local")
        for turn in T.unroll(turns):
            held[span(turn * vector, vector)] = T.if_then_else(
                first(turn, lane) < size,
                qkv[row, span(head * size + first(turn, lane), vector)],
                zeros,
            )
        if head < first_v:
            normalize(held, q_norm, k_norm, head, lane)
        for turn in T.unroll(turns):
            if first(turn, lane) < size:
                normed[row, span(head * size + first(turn, lane), vector)] = held[
                    span(turn * vector, vector)
                ]

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv: T.Buffer((width, columns), "float32"),
        q_norm: T.Buffer((size,), "float32"),
        k_norm: T.Buffer((size,), "float32"),
        normed: T.Buffer((width, columns), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(items, WARPS), thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("head"):
                    block = T.axis.spatial(ceil_div(items, WARPS), bx)
                    thread = T.axis.spatial(threads, tx)
                    # The same for all lanes of a warp.
                    if block * WARPS + thread // WARP < items:
                        one_head(
                            qkv,
                            q_norm,
                            k_norm,
                            normed,
                            (block * WARPS + thread // WARP) // heads,
                            (block * WARPS + thread // WARP) % heads,
                            thread % WARP,
                        )

    return func
