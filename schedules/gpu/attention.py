"""Grouped-query attention over the shared cache on cuda: a warp takes 32 slots at a time.

A block serves up to eight (row, head) pairs of one key/value head. Tiles start at absolute
multiples of 32 slots; tile t belongs to warp t mod 8, which keeps a running maximum, norm and
weighted sum of values, and the block adds its warps up at the end in their order. So the tree of a
row's sums depends on the slots that the row sees and on nothing else: a tile of which it sees
nothing multiplies by exactly one and adds nothing, and how many rows share a block or a step does
not matter.
"""

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.thread import (
    STATIC_SHARED_BYTES,
    WARP,
    ceil_div,
    constant,
    fma,
    from_lane,
    mul,
    rolled,
    span,
    vector_width,
    warp_max,
    warp_sum,
)
from schedules.workload import Workload

# Part of the tree of the sums: the same for every width.
WARPS = 8
TILE = WARP
THREADS = WARPS * WARP

NEG_INF = -3.0e38
"""Score of a slot that a row does not see: finite, so that the difference of two is no NaN."""

MASK_WORDS = 2
MAX_VISIBLE = 32 * MASK_WORDS
# Counts in between make the compiler spill a register or two for the sake of occupancy.
PAIRS = (8, 2, 1)
ENOUGH_BLOCKS = 64
SLOTS_AHEAD = 8


@dataclass(frozen=True)
class AttentionTile:
    """How much a block and a lane take at once; nothing here is part of the tree.

    pairs: (row, head) pairs of a block; key, value: float16 elements of one load of a lane;
    keys_ahead: loads of a key that a lane has in flight; value_turns: loads for a slot's value.
    """

    pairs: int
    key: int
    keys_ahead: int
    value: int
    value_turns: int


def choose_tile(width: int, group: int, kv_heads: int, head_dim: int) -> AttentionTile:
    """The tile for `width` rows of `group` heads on each of `kv_heads`.

    Pairs that share a block share its loads, but blocks come first while there are few. Raises
    ValueError for a head that does not fit the shared memory.
    """
    shared = 4 * ((WARPS + 1) * head_dim + 2 * WARPS)
    if shared > STATIC_SHARED_BYTES:
        raise ValueError(f"a head of {head_dim} elements is too long for the shared memory")
    fitting = min(width * group * kv_heads // ENOUGH_BLOCKS, STATIC_SHARED_BYTES // shared)
    pairs = next((pairs for pairs in PAIRS if pairs <= fitting), 1)
    key = vector_width(head_dim, 8)
    keys_ahead = vector_width(head_dim // key, 16 if pairs <= 2 else 4)
    value = next((v for v in (2, 4) if head_dim % v == 0 and head_dim <= v * WARP), 0)
    value = value or vector_width(head_dim, 8)
    return AttentionTile(pairs, key, keys_ahead, value, ceil_div(head_dim, value * WARP))


def attention(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.attention`. Raises ValueError for masks of more than 64 rows."""
    width, heads, head_dim = work.shapes[0]
    kv_heads = work.shapes[1][1]
    if not work.settings["causal"] and width > MAX_VISIBLE:
        raise ValueError(f"masks speak of {MAX_VISIBLE} rows at most, and this step has {width}")
    return _template(work, choose_tile(width, heads // kv_heads, kv_heads, head_dim))


def _sight(causal: bool, width: int):
    """What a row sees: expressions for the end of a block's slots, and for one slot of one row.

    `masks` has MASK_WORDS words a pair.
    """

    def end(boundary, last_row):
        return boundary + last_row + 1 if causal else boundary + width

    def sees(masks, pair, row, slot, boundary):
        if causal:
            return slot <= boundary + row
        word = T.Select(
            slot - boundary < 32, masks[pair * MASK_WORDS], masks[pair * MASK_WORDS + 1]
        )
        bit = T.shift_right(word, T.Cast("uint32", T.bitwise_and(slot - boundary, 31)))
        marked = T.bitwise_and(bit, T.uint32(1)) == T.uint32(1)
        return T.Or(slot < boundary, T.And(slot < boundary + width, marked))

    return end, sees


def _template(work: Workload, tile: AttentionTile) -> tirx.PrimFunc:
    width, heads, head_dim = work.shapes[0]
    cache_shape = work.shapes[1]
    kv_heads, causal = cache_shape[1], work.settings["causal"]
    group = heads // kv_heads
    pairs, value, turns = tile.pairs, tile.value, tile.value_turns
    parts = ceil_div(width * group, pairs)
    held = turns * value
    keys_ahead, step_size = tile.keys_ahead, tile.keys_ahead * tile.key
    end, sees = _sight(causal, width)

    def row_of(first, i):
        return T.min(first + i, width * group - 1) // group

    def head_of(kv, first, i):
        return kv * group + T.min(first + i, width * group - 1) % group

    def exp(x):
        return T.call_pure_extern("float32", "expf", x)

    @T.macro
    def fetch_masks(visible, masks, first, thread):
        if visible is not None:
            if thread < pairs * MASK_WORDS:
                masks[thread] = visible[row_of(first, thread // MASK_WORDS), thread % MASK_WORDS]

    @T.macro
    def fetch_queries(q, queries, kv, first, thread):
        for turn in T.unroll(ceil_div(pairs * head_dim, THREADS)):
            if turn * THREADS + thread < pairs * head_dim:
                queries[turn * THREADS + thread] = q[
                    row_of(first, (turn * THREADS + thread) // head_dim),
                    head_of(kv, first, (turn * THREADS + thread) // head_dim),
                    (turn * THREADS + thread) % head_dim,
                ]

    @T.macro
    def dot_products(cache, queries, even, odd, kv, slot):
        """q · k of one slot a lane, even and odd elements apart."""
        key = T.sblock_alloc_buffer((step_size,), "float16", scope="local")
        for i in T.unroll(pairs):
            even[i] = T.float32(0)
            odd[i] = T.float32(0)
        for step in rolled(head_dim // step_size):
            for j in T.unroll(keys_ahead):
                key[span(j * tile.key, tile.key)] = cache[
                    0, kv, slot, span(step * step_size + j * tile.key, tile.key)
                ]
            for i in T.unroll(pairs):
                for d in T.unroll(step_size // 2):
                    even[i] = fma(
                        queries[i * head_dim + step * step_size + d * 2],
                        T.Cast("float32", key[d * 2]),
                        even[i],
                    )
                    odd[i] = fma(
                        queries[i * head_dim + step * step_size + d * 2 + 1],
                        T.Cast("float32", key[d * 2 + 1]),
                        odd[i],
                    )

    @T.macro
    def weigh(score, weight, top, norm, acc, i, seen):
        """Scores of a tile to weights, -1 for a slot not seen; sums so far to the new maximum."""
        before = T.sblock_alloc_buffer((1,), "float32", scope="local")
        before[0] = top[i]
        weight[i] = T.Select(seen, score, constant(NEG_INF))
        top[i] = weight[i]
        warp_max(top, i)
        top[i] = T.max(before[0], top[i])
        weight[i] = T.Select(seen, exp(weight[i] - top[i]), T.float32(-1))
        before[0] = exp(before[0] - top[i])
        norm[i] = fma(norm[i], before[0], T.Select(seen, weight[i], T.float32(0)))
        for j in T.unroll(held):
            acc[i * held + j] = mul(acc[i * held + j], before[0])

    @T.macro
    def add_values(cache, weight, acc, kv, first_slot, last_slot, lane):
        values = T.sblock_alloc_buffer((SLOTS_AHEAD * held,), "float16", scope="local")
        share = T.sblock_alloc_buffer((1,), "float32", scope="local")
        for step in rolled(TILE // SLOTS_AHEAD):
            for s in T.unroll(SLOTS_AHEAD):
                for turn in T.unroll(turns):
                    values[span(s * held + turn * value, value)] = cache[
                        1,
                        kv,
                        T.min(first_slot + step * SLOTS_AHEAD + s, last_slot),
                        span(T.min((turn * WARP + lane) * value, head_dim - value), value),
                    ]
            for s in T.unroll(SLOTS_AHEAD):
                for i in T.unroll(pairs):
                    share[0] = from_lane(weight[i], step * SLOTS_AHEAD + s)
                    # What a row does not see may be no number at all: it is not even multiplied.
                    # A weight that is none itself has made the norm none.
                    if share[0] >= T.float32(0):
                        for j in T.unroll(held):
                            acc[i * held + j] = fma(
                                share[0],
                                T.Cast("float32", values[s * held + j]),
                                acc[i * held + j],
                            )

    @T.macro
    def one_tile(cache, queries, masks, top, norm, acc, kv, first, boundary, slot, last_slot, lane):
        even = T.sblock_alloc_buffer((pairs,), "float32", scope="local")
        odd = T.sblock_alloc_buffer((pairs,), "float32", scope="local")
        weight = T.sblock_alloc_buffer((pairs,), "float32", scope="local")
        # Slots behind the last one hold nothing yet: such lanes read the last one, unseen.
        dot_products(cache, queries, even, odd, kv, T.min(slot + lane, last_slot))
        for i in T.unroll(pairs):
            even[i] = mul(even[i] + odd[i], constant(head_dim**-0.5))
            weigh(
                even[i],
                weight,
                top,
                norm,
                acc,
                i,
                sees(masks, i, row_of(first, i), slot + lane, boundary),
            )
        add_values(cache, weight, acc, kv, slot, last_slot, lane)

    @T.macro
    def start(top, norm, acc):
        for i in T.unroll(pairs):
            top[i] = constant(NEG_INF)
            norm[i] = T.float32(0)
        for i in T.unroll(pairs * held):
            acc[i] = T.float32(0)

    @T.macro
    def one_warp(cache, masks, queries, tops, norms, mixed, kv, first, boundary, warp, lane):
        top = T.sblock_alloc_buffer((pairs,), "float32", scope="local")
        norm = T.sblock_alloc_buffer((pairs,), "float32", scope="local")
        acc = T.sblock_alloc_buffer((pairs * held,), "float32", scope="local")
        start(top, norm, acc)
        for turn in range(
            (end(boundary, row_of(first, pairs - 1)) + TILE - 1) // TILE // WARPS + 1
        ):
            if (turn * WARPS + warp) * TILE < end(boundary, row_of(first, pairs - 1)):
                one_tile(
                    cache,
                    queries,
                    masks,
                    top,
                    norm,
                    acc,
                    kv,
                    first,
                    boundary,
                    (turn * WARPS + warp) * TILE,
                    boundary + width - 1,
                    lane,
                )
        for i in T.unroll(pairs):
            warp_sum(norm, i, WARP)
            if lane == 0:
                tops[i * WARPS + warp] = top[i]
                norms[i * WARPS + warp] = norm[i]
            for turn in T.unroll(turns):
                if (turn * WARP + lane) * value < head_dim:
                    for j in T.unroll(value):
                        mixed[(i * WARPS + warp) * head_dim + (turn * WARP + lane) * value + j] = (
                            acc[i * held + turn * value + j]
                        )

    @T.macro
    def join(tops, norms, mixed, out, kv, first, i, d):
        """Element d of pair i: the warps' sums, brought to one maximum."""
        top = T.sblock_alloc_buffer((1,), "float32", scope="local")
        norm = T.sblock_alloc_buffer((1,), "float32", scope="local")
        acc = T.sblock_alloc_buffer((1,), "float32", scope="local")
        factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
        top[0] = constant(NEG_INF)
        norm[0] = T.float32(0)
        acc[0] = T.float32(0)
        for warp in T.unroll(WARPS):
            top[0] = T.max(top[0], tops[i * WARPS + warp])
        for warp in T.unroll(WARPS):
            factor[0] = exp(tops[i * WARPS + warp] - top[0])
            norm[0] = fma(norms[i * WARPS + warp], factor[0], norm[0])
            acc[0] = fma(mixed[(i * WARPS + warp) * head_dim + d], factor[0], acc[0])
        if first + i < width * group:
            out[row_of(first, i), head_of(kv, first, i) * head_dim + d] = acc[0] / norm[0]

    @T.macro
    def one_block(q, cache, boundary, visible, out, kv, first, thread):
        queries = T.sblock_alloc_buffer((pairs * head_dim,), "float32", scope="shared")
        tops = T.sblock_alloc_buffer((pairs * WARPS,), "float32", scope="shared")
        norms = T.sblock_alloc_buffer((pairs * WARPS,), "float32", scope="shared")
        mixed = T.sblock_alloc_buffer((pairs * WARPS * head_dim,), "float32", scope="shared")
        masks = T.sblock_alloc_buffer((pairs * MASK_WORDS,), "uint32", scope="shared")
        fetch_masks(visible, masks, first, thread)
        fetch_queries(q, queries, kv, first, thread)
        T.tvm_storage_sync("shared")
        one_warp(
            cache,
            masks,
            queries,
            tops,
            norms,
            mixed,
            kv,
            first,
            boundary[0],
            thread // WARP,
            thread % WARP,
        )
        T.tvm_storage_sync("shared")
        for turn in T.unroll(ceil_div(pairs * head_dim, THREADS)):
            if turn * THREADS + thread < pairs * head_dim:
                join(
                    tops,
                    norms,
                    mixed,
                    out,
                    kv,
                    first,
                    (turn * THREADS + thread) // head_dim,
                    (turn * THREADS + thread) % head_dim,
                )

    if causal:

        @T.prim_func(private=True, s_tir=True)
        def plain(
            q: T.Buffer((width, heads, head_dim), "float32"),
            cache: T.Buffer(cache_shape, "float16"),
            boundary: T.Buffer((1,), "int32"),
            out: T.Buffer((width, heads * head_dim), "float32"),
        ):
            for bx in T.thread_binding(kv_heads * parts, thread="blockIdx.x"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    with T.sblock("attention"):
                        block = T.axis.spatial(kv_heads * parts, bx)
                        thread = T.axis.spatial(THREADS, tx)
                        one_block(
                            q,
                            cache,
                            boundary,
                            None,
                            out,
                            block // parts,
                            block % parts * pairs,
                            thread,
                        )

        return plain

    @T.prim_func(private=True, s_tir=True)
    def masked(
        q: T.Buffer((width, heads, head_dim), "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        boundary: T.Buffer((1,), "int32"),
        visible: T.Buffer((width, MASK_WORDS), "uint32"),
        out: T.Buffer((width, heads * head_dim), "float32"),
    ):
        for bx in T.thread_binding(kv_heads * parts, thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("attention"):
                    block = T.axis.spatial(kv_heads * parts, bx)
                    thread = T.axis.spatial(THREADS, tx)
                    one_block(
                        q,
                        cache,
                        boundary,
                        visible,
                        out,
                        block // parts,
                        block % parts * pairs,
                        thread,
                    )

    return masked
