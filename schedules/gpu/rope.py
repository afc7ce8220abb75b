"""RoPE and the cache write on cuda, with or without the norm of the heads before it: one warp a
head (schedules/gpu/heads.py)."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.heads import (
    WARPS,
    Heads,
    cache_writer,
    loader,
    normalizer,
    rotator,
    weight_loader,
)
from schedules.gpu.thread import WARP, let_others_start, overlaps, wait_for_others
from schedules.workload import Workload


def rope_kv_write(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.rope_kv_write`."""
    (width, columns), _, _, (positions, half, _), cache_shape, _ = work.shapes
    heads = _heads(work)
    one_head = _writer(heads)

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv: T.Buffer((width, columns), "float32"),
        position: T.Buffer((width,), "int32"),
        boundary: T.Buffer((1,), "int32"),
        table: T.Buffer((positions, half, 2), "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        q: T.Buffer((width, heads.queries, heads.size), "float32"),
    ):
        for bx in T.thread_binding(heads.blocks, thread="blockIdx.x"):
            for tx in T.thread_binding(WARPS * WARP, thread="threadIdx.x"):
                with T.sblock("head"):
                    item = T.axis.spatial(heads.blocks * WARPS, bx * WARPS + tx // WARP)
                    lane = T.axis.spatial(WARP, tx % WARP)
                    one_head(qkv, None, None, position, boundary, table, cache, q, item, lane)

    return func


def norm_rope_kv_write(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.fused_ops.norm_rope_kv_write`."""
    (width, columns), (size,), _, _, _, (positions, half, _), cache_shape, _ = work.shapes
    heads = _heads(work)
    one_head = _writer(heads, work.settings["eps"], overlaps(target))

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv: T.Buffer((width, columns), "float32"),
        q_norm: T.Buffer((size,), "float32"),
        k_norm: T.Buffer((size,), "float32"),
        position: T.Buffer((width,), "int32"),
        boundary: T.Buffer((1,), "int32"),
        table: T.Buffer((positions, half, 2), "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        q: T.Buffer((width, heads.queries, heads.size), "float32"),
    ):
        for bx in T.thread_binding(heads.blocks, thread="blockIdx.x"):
            for tx in T.thread_binding(WARPS * WARP, thread="threadIdx.x"):
                with T.sblock("head"):
                    item = T.axis.spatial(heads.blocks * WARPS, bx * WARPS + tx // WARP)
                    lane = T.axis.spatial(WARP, tx % WARP)
                    one_head(qkv, q_norm, k_norm, position, boundary, table, cache, q, item, lane)

    return func


def _heads(work: Workload) -> Heads:
    (_, keys, _, size), (width, queries, _) = work.shapes[-2:]
    return Heads(width, queries, keys, size)


def _writer(heads: Heads, eps: float | None = None, early: bool = False):
    """A macro for one warp's head; with `eps` it is normed first, and with `early` the norm's
    weight is on its way before the kernel waits for others."""
    load, load_weights, rotate = loader(heads), weight_loader(heads), rotator(heads)
    write, normed = cache_writer(heads), eps is not None
    normalize = normalizer(heads, eps or 0.0)

    @T.macro
    def prepare(q_norm, k_norm, weights, head, lane):
        if early:
            let_others_start()
        if normed:
            load_weights(q_norm, k_norm, weights, head, lane)
        if early:
            wait_for_others()

    @T.macro
    def turn(held, weights, position, boundary, table, cache, q, row, head, lane):
        if head < heads.first_value:
            if normed:
                normalize(held, weights)
            rotate(held, position[row], table, lane)
        write(held, cache, q, row, boundary[0] + row, head, lane)

    @T.macro
    def one_head(qkv, q_norm, k_norm, position, boundary, table, cache, q, item, lane):
        T.reads(
            qkv[0 : heads.width, 0 : heads.columns],
            position[0 : heads.width],
            boundary[0],
            table[0 : table.shape[0], 0 : heads.half, 0:2],
        )
        T.writes(
            cache[0:2, 0 : heads.keys, 0 : cache.shape[2], 0 : heads.size],
            q[0 : heads.width, 0 : heads.queries, 0 : heads.size],
        )
        held = T.sblock_alloc_buffer((heads.held,), "float32", scope="local")
        weights = T.sblock_alloc_buffer((heads.held,), "float32", scope="local")
        prepare(q_norm, k_norm, weights, item % heads.count, lane)
        # The same for all lanes of a warp.
        if item < heads.items:
            load(qkv, held, item // heads.count, item % heads.count, lane)
            turn(
                held,
                weights,
                position,
                boundary,
                table,
                cache,
                q,
                item // heads.count,
                item % heads.count,
                lane,
            )

    return one_head
