"""Attention on the processor: a few rows and query heads a task, three passes over their slots.

Keys and values are float16, so that turning one into float32 costs as much as using it: up to four
pairs of a row and a head (`members`) share each. A dot product is summed in lanes, the softmax in
lanes by absolute slot number, and the mix adds slots in ascending order, so a row's result is the
same in every bucket and beside any other row: slots that it does not see add exactly nothing.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.cpu.vector import (
    LANES,
    exp,
    group_for,
    lanes_for,
    span,
    splat,
    sums_of_fours,
    tree_max,
    tree_sum,
    vector,
)
from schedules.workload import NEG_INF, Workload

MEMBERS = 4
"""Pairs of a row and a head that share a pass, at most."""

SUMS = 8
"""Registers of sums, which hide the latency of adding and leave AVX2 as many for the factors."""

TASKS = 8
"""Heads share a pass only where as many tasks remain: two cores gain by fewer, eight do not."""


def heads_for(heads: int, kv_heads: int, width: int) -> int:
    """Query heads of one task: a divisor of those that have the same keys.

    Rows come first: a step of four shares among those, whatever the heads.
    """
    rows = group_for(width)
    alone = heads * (width // rows)
    most = max(1, min(MEMBERS // rows, alone // TASKS))
    return max(n for n in range(1, most + 1) if heads // kv_heads % n == 0)


def attention(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.attention`."""
    width, heads, head_dim = work.shapes[0]
    cache_shape = work.shapes[1]
    kv_heads, slots = cache_shape[1:3]
    shared = heads // kv_heads
    causal = work.settings["causal"]
    rows = group_for(width)
    beside = heads_for(heads, kv_heads, width)
    members = rows * beside
    together = SUMS >> (members - 1).bit_length()
    lanes, chunk = lanes_for(head_dim, LANES), lanes_for(head_dim, together * LANES)
    room = -(-slots // LANES) * LANES
    factor = head_dim**-0.5

    def end(boundary, first):
        """Slots from here on are seen by no row of the task."""
        return boundary[0] + (T.Cast("int32", first) + rows if causal else width)

    def row(first, m):
        return first + m // beside

    def blocks(boundary, first):
        return (end(boundary, first) + LANES - 1) // LANES

    def key(cache, head, t, k):
        # The last block reads on behind what is seen, which `hide` drops, but not behind the cache.
        slot = T.min(t, slots - 1) if slots % LANES else t
        return T.Cast(vector("float32", lanes), cache[0, head // shared, slot, span(k, lanes)])

    def value(cache, head, t, c):
        return T.Cast(vector("float32", chunk), cache[1, head // shared, t, span(c, chunk)])

    def sees(visible, row, j):
        word = visible[row, j // 32]
        return T.bitwise_and(
            T.shift_right(word, T.Cast("uint32", j % 32)), T.uint32(1)
        ) != T.uint32(0)

    def folded(sums, i):
        """The lanes of accumulator i added up to four; fewer stay as they are."""
        if lanes <= 4:
            return sums[span(i * lanes, lanes)]
        return sums[span(i * lanes, 4)] + sums[span(i * lanes + 4, 4)]

    def place(i, n):
        """Where the sums of accumulator n belong in `part`; the first is of slot i of a block."""
        at = n // together * LANES + i + n % together
        return span(at * 4, min(lanes, 4))

    def product(q, keys, first, head, n, k):
        m = n // together
        query = q[row(first, m), head + m % beside, span(k, lanes)]
        return query * keys[span(n % together * lanes, lanes)]

    @T.macro
    def dots(q, cache, part, first, head, t, i):
        """The queries of all members times keys t + i and the next, `together` of them."""
        sums = T.sblock_alloc_buffer((members * together * lanes,), "float32")
        keys = T.sblock_alloc_buffer((together * lanes,), "float32")
        for n in T.unroll(members * together):
            sums[span(n * lanes, lanes)] = splat(T.float32(0), lanes)
        for k in T.unroll(head_dim // lanes):
            for n in T.unroll(together):
                keys[span(n * lanes, lanes)] = key(cache, head, t + i + n, k * lanes)
            for n in T.unroll(members * together):
                sums[span(n * lanes, lanes)] = sums[span(n * lanes, lanes)] + product(
                    q, keys, first, head, n, k * lanes
                )
        for n in T.unroll(members * together):
            part[place(i, n)] = folded(sums, n)

    @T.macro
    def all_scores(q, cache, boundary, score, first, head):
        part = T.sblock_alloc_buffer((members * LANES * 4,), "float32")
        for i in range(members * 4):
            part[span(i * LANES, LANES)] = splat(T.float32(0), LANES)
        for t in range(blocks(boundary, first)):
            for i in range(LANES // together):
                dots(q, cache, part, first, head, t * LANES, i * together)
            for m in T.unroll(members):
                score[span(m * room + t * LANES, LANES)] = sums_of_fours(
                    part, m * LANES * 4
                ) * splat(T.float32(factor), LANES)

    @T.macro
    def hide(boundary, visible, score, first):
        """NEG_INF for what a row does not see, up to the end of the last block."""
        for m in range(members):
            if visible is None:
                for t in range(blocks(boundary, first) * LANES - boundary[0] - row(first, m) - 1):
                    score[m * room + boundary[0] + row(first, m) + 1 + t] = T.float32(NEG_INF)
            else:
                for j in range(width):
                    score[m * room + boundary[0] + j] = T.Select(
                        sees(visible, row(first, m), j),
                        score[m * room + boundary[0] + j],
                        T.float32(NEG_INF),
                    )
                for t in range(blocks(boundary, first) * LANES - boundary[0] - width):
                    score[m * room + boundary[0] + width + t] = T.float32(NEG_INF)

    @T.macro
    def weigh(boundary, score, norm, first):
        """exp(score - largest) in place, and one over the sum of them for every member."""
        top = T.sblock_alloc_buffer((members * LANES,), "float32")
        norms = T.sblock_alloc_buffer((members * LANES,), "float32")
        for m in T.unroll(members):
            top[span(m * LANES, LANES)] = splat(T.float32(NEG_INF), LANES)
            norms[span(m * LANES, LANES)] = splat(T.float32(0), LANES)
        for t in range(blocks(boundary, first)):
            for m in T.unroll(members):
                top[span(m * LANES, LANES)] = T.max(
                    top[span(m * LANES, LANES)], score[span(m * room + t * LANES, LANES)]
                )
        for m in T.unroll(members):
            top[m * LANES] = tree_max(top, m * LANES, LANES)
            for t in range(blocks(boundary, first)):
                score[span(m * room + t * LANES, LANES)] = exp(
                    score[span(m * room + t * LANES, LANES)] - splat(top[m * LANES], LANES), LANES
                )
                norms[span(m * LANES, LANES)] = (
                    norms[span(m * LANES, LANES)] + score[span(m * room + t * LANES, LANES)]
                )
            norm[m] = T.float32(1) / tree_sum(norms, m * LANES, LANES)

    @T.macro
    def mix(cache, boundary, score, norm, out, first, head):
        mixed = T.sblock_alloc_buffer((members * chunk,), "float32")
        v_lanes = T.sblock_alloc_buffer((chunk,), "float32")
        for c in range(head_dim // chunk):
            for m in T.unroll(members):
                mixed[span(m * chunk, chunk)] = splat(T.float32(0), chunk)
            for t in range(end(boundary, first)):
                v_lanes[span(0, chunk)] = value(cache, head, t, c * chunk)
                for m in T.unroll(members):
                    mixed[span(m * chunk, chunk)] = (
                        mixed[span(m * chunk, chunk)]
                        + splat(score[m * room + t], chunk) * v_lanes[span(0, chunk)]
                    )
            for m in T.unroll(members):
                out[row(first, m), span((head + m % beside) * head_dim + c * chunk, chunk)] = mixed[
                    span(m * chunk, chunk)
                ] * splat(norm[m], chunk)

    @T.macro
    def one_head(q, cache, boundary, visible, out, first, head):
        score = T.sblock_alloc_buffer((members * room,), "float32")
        norm = T.sblock_alloc_buffer((members,), "float32")
        all_scores(q, cache, boundary, score, first, head)
        hide(boundary, visible, score, first)
        weigh(boundary, score, norm, first)
        mix(cache, boundary, score, norm, out, first, head)

    groups = width // rows
    tasks = heads // beside * groups

    @T.prim_func(private=True, s_tir=True)
    def prefill(
        q: T.Buffer((width, heads, head_dim), "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        boundary: T.Buffer((1,), "int32"),
        out: T.Buffer((width, heads * head_dim), "float32"),
    ):
        for task in range(tasks):
            with T.sblock("head"):
                vt = T.axis.spatial(tasks, task)
                one_head(q, cache, boundary, None, out, vt % groups * rows, vt // groups * beside)

    @T.prim_func(private=True, s_tir=True)
    def decode(
        q: T.Buffer((width, heads, head_dim), "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        boundary: T.Buffer((1,), "int32"),
        visible: T.Buffer((width, 2), "uint32"),
        out: T.Buffer((width, heads * head_dim), "float32"),
    ):
        for task in range(tasks):
            with T.sblock("head"):
                vt = T.axis.spatial(tasks, task)
                one_head(
                    q, cache, boundary, visible, out, vt % groups * rows, vt // groups * beside
                )

    return prefill if causal else decode
