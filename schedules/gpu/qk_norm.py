"""RMSNorm of query and key heads on cuda: one warp a head (schedules/gpu/heads.py)."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.heads import SIDES, WARPS, Heads, loader, normalizer, weight_loader
from schedules.gpu.thread import WARP, span
from schedules.workload import Workload


def qk_norm(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.ops.qk_norm`."""
    (width, columns), (size,) = work.shapes[:2]
    heads = Heads(width, work.settings["num_heads"], work.settings["num_kv_heads"], size)
    load, load_weights = loader(heads), weight_loader(heads)
    normalize = normalizer(heads, work.settings["eps"])

    @T.macro
    def store(held, normed, row, head, lane):
        for turn in T.unroll(heads.turns):
            for side in T.unroll(SIDES):
                if heads.exists(turn, lane):
                    normed[row, span(heads.column(head, turn, side, lane), heads.vector)] = held[
                        span(heads.at(turn, side), heads.vector)
                    ]

    @T.macro
    def one_head(qkv, q_norm, k_norm, normed, row, head, lane):
        held = T.sblock_alloc_buffer((heads.held,), "float32", scope="local")
        weights = T.sblock_alloc_buffer((heads.held,), "float32", scope="local")
        load_weights(q_norm, k_norm, weights, head, lane)
        load(qkv, held, row, head, lane)
        if head < heads.first_value:
            normalize(held, weights)
        store(held, normed, row, head, lane)

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv: T.Buffer((width, columns), "float32"),
        q_norm: T.Buffer((size,), "float32"),
        k_norm: T.Buffer((size,), "float32"),
        normed: T.Buffer((width, columns), "float32"),
    ):
        for bx in T.thread_binding(heads.blocks, thread="blockIdx.x"):
            for tx in T.thread_binding(WARPS * WARP, thread="threadIdx.x"):
                with T.sblock("head"):
                    item = T.axis.spatial(heads.blocks * WARPS, bx * WARPS + tx // WARP)
                    lane = T.axis.spatial(WARP, tx % WARP)
                    # The same for all lanes of a warp.
                    if item < heads.items:
                        one_head(
                            qkv,
                            q_norm,
                            k_norm,
                            normed,
                            item // heads.count,
                            item % heads.count,
                            lane,
                        )

    return func
