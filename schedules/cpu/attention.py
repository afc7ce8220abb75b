"""Attention on the processor: one query head of one row a task, three passes over its slots.

The sum over slots runs in lanes by absolute slot number, and the mix adds slots in ascending order,
so a row's result is the same in every bucket: slots that it does not see add exactly nothing.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.cpu.vector import LANES, exp, lanes_for, span, splat, tree_sum, vector
from schedules.workload import NEG_INF, Workload

CHUNK = 4 * LANES
"""Columns of v that one pass over the slots keeps in registers."""


def attention(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.attention`."""
    width, heads, head_dim = work.shapes[0]
    cache_shape = work.shapes[1]
    kv_heads, slots = cache_shape[1:3]
    group = heads // kv_heads
    causal = work.settings["causal"]
    lanes, chunk = lanes_for(head_dim), lanes_for(head_dim, CHUNK)
    room = -(-slots // LANES) * LANES
    factor = head_dim**-0.5

    def end(boundary, row):
        """Slots from here on are seen by no row that matters."""
        return boundary[0] + (T.Cast("int32", row) + 1 if causal else width)

    def seen(visible, row, j):
        if visible is None:
            return j <= row
        bit = T.shift_right(visible[row, T.max(j, 0) // 32], T.Cast("uint32", T.max(j, 0) % 32))
        return T.Or(j < 0, T.bitwise_and(bit, T.uint32(1)) == T.uint32(1))

    def dot_step(q, cache, row, head, t, k):
        key = T.Cast(vector("float32", lanes), cache[0, head // group, t, span(k, lanes)])
        return q[row, head, span(k, lanes)] * key

    def mix_step(cache, head, t, c):
        return T.Cast(vector("float32", chunk), cache[1, head // group, t, span(c, chunk)])

    @T.macro
    def one_head(q, cache, boundary, visible, out, row, head):
        score = T.sblock_alloc_buffer((room,), "float32")
        sums = T.sblock_alloc_buffer((lanes,), "float32")
        top = T.sblock_alloc_buffer((1,), "float32")
        norms = T.sblock_alloc_buffer((LANES,), "float32")
        mixed = T.sblock_alloc_buffer((chunk,), "float32")
        top[0] = T.float32(NEG_INF)
        for t in range(end(boundary, row)):
            sums[span(0, lanes)] = splat(T.float32(0), lanes)
            for k in T.unroll(head_dim // lanes):
                sums[span(0, lanes)] = sums[span(0, lanes)] + dot_step(
                    q, cache, row, head, t, k * lanes
                )
            score[t] = T.Select(
                seen(visible, row, t - boundary[0]),
                tree_sum(sums, 0, lanes) * T.float32(factor),
                T.float32(NEG_INF),
            )
            top[0] = T.max(top[0], score[t])
        for t in range((LANES - end(boundary, row) % LANES) % LANES):
            score[end(boundary, row) + t] = T.float32(NEG_INF)
        norms[span(0, LANES)] = splat(T.float32(0), LANES)
        for t in range((end(boundary, row) + LANES - 1) // LANES):
            score[span(t * LANES, LANES)] = exp(
                score[span(t * LANES, LANES)] - splat(top[0], LANES), LANES
            )
            norms[span(0, LANES)] = norms[span(0, LANES)] + score[span(t * LANES, LANES)]
        top[0] = T.float32(1) / tree_sum(norms, 0, LANES)
        for c in range(head_dim // chunk):
            mixed[span(0, chunk)] = splat(T.float32(0), chunk)
            for t in range(end(boundary, row)):
                mixed[span(0, chunk)] = mixed[span(0, chunk)] + splat(score[t], chunk) * mix_step(
                    cache, head, t, c * chunk
                )
            out[row, span(head * head_dim + c * chunk, chunk)] = mixed[span(0, chunk)] * splat(
                top[0], chunk
            )

    @T.prim_func(private=True, s_tir=True)
    def prefill(
        q: T.Buffer((width, heads, head_dim), "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        boundary: T.Buffer((1,), "int32"),
        out: T.Buffer((width, heads * head_dim), "float32"),
    ):
        for task in range(width * heads):
            with T.sblock("head"):
                vt = T.axis.spatial(width * heads, task)
                one_head(q, cache, boundary, None, out, vt // heads, vt % heads)

    @T.prim_func(private=True, s_tir=True)
    def decode(
        q: T.Buffer((width, heads, head_dim), "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        boundary: T.Buffer((1,), "int32"),
        visible: T.Buffer((width, 2), "uint32"),
        out: T.Buffer((width, heads * head_dim), "float32"),
    ):
        for task in range(width * heads):
            with T.sblock("head"):
                vt = T.axis.spatial(width * heads, task)
                one_head(q, cache, boundary, visible, out, vt // heads, vt % heads)

    return prefill if causal else decode
