"""Grouped-query attention on cuda for heads of any size: a warp takes 32 slots at a time.

A block serves up to eight (row, head) pairs of one key/value head. Tiles start at absolute
multiples of 32 slots; tile t belongs to warp t mod 8, which keeps a running maximum, norm and
weighted sum of values, and the block adds its warps up at the end in their order. So the tree of a
row's sums depends on the slots that the row sees and on nothing else: a tile of which it sees
nothing multiplies by exactly one and adds nothing, and how many rows share a block or a step does
not matter.
"""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.attention_fragments import serves
from schedules.gpu.attention_warp import (
    MASK_WORDS,
    NEG_INF,
    TILE,
    AttentionTile,
    Plan,
    exp,
    plan_of,
    warp_pass,
)
from schedules.gpu.thread import (
    STATIC_SHARED_BYTES,
    WARP,
    ceil_div,
    constant,
    fma,
    vector_width,
)
from schedules.space import Card, Template
from schedules.workload import Workload

# Chains of a row's sums, one a warp: part of the tree.
WARPS = 8
THREADS = WARPS * WARP
# Counts in between make the compiler spill a register or two for the sake of occupancy.
PAIRS = (8, 2, 1)
ENOUGH_BLOCKS = 64


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
    return tile_for(pairs, head_dim)


def tile_for(pairs: int, head_dim: int) -> AttentionTile:
    """The tile of a block that serves so many pairs."""
    key = vector_width(head_dim, 8)
    keys_ahead = vector_width(head_dim // key, 16 if pairs <= 2 else 4)
    value = next((v for v in (2, 4) if head_dim % v == 0 and head_dim <= v * WARP), 0)
    value = value or vector_width(head_dim, 8)
    return AttentionTile(pairs, key, keys_ahead, value, ceil_div(head_dim, value * WARP))


def fetch_block(plan: Plan, threads: int):
    """A macro that brings a block's masks and queries into shared memory."""
    pairs, head_dim = plan.tile.pairs, plan.head_dim

    @T.macro
    def fetch_masks(visible, masks, first, thread):
        if visible is not None:
            if thread < pairs * MASK_WORDS:
                masks[thread] = visible[
                    plan.row_of(first, thread // MASK_WORDS), thread % MASK_WORDS
                ]

    @T.macro
    def fetch_queries(q, queries, kv, first, thread):
        for turn in T.unroll(ceil_div(pairs * head_dim, threads)):
            if turn * threads + thread < pairs * head_dim:
                queries[turn * threads + thread] = q[
                    plan.row_of(first, (turn * threads + thread) // head_dim),
                    plan.head_of(kv, first, (turn * threads + thread) // head_dim),
                    (turn * threads + thread) % head_dim,
                ]

    @T.macro
    def fetch(q, visible, queries, masks, kv, first, thread):
        fetch_masks(visible, masks, first, thread)
        fetch_queries(q, queries, kv, first, thread)

    return fetch


def _join(plan: Plan):
    """A macro that adds up a block's warps, in their order, for one element of one pair."""
    head_dim = plan.head_dim

    @T.macro
    def join(tops, norms, mixed, out, kv, first, i, d):
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
        if first + i < plan.pairs:
            out[plan.row_of(first, i), plan.head_of(kv, first, i) * head_dim + d] = acc[0] / norm[0]

    return join


def _keep(plan: Plan):
    """Macros that leave what a warp found in shared memory, pair by pair and warp by warp."""
    head_dim = plan.head_dim

    @T.macro
    def keep(tops, norms, kv, first, i, warp, top, norm):
        tops[i * WARPS + warp] = top
        norms[i * WARPS + warp] = norm

    @T.macro
    def keep_element(mixed, kv, first, i, warp, d, value):
        mixed[(i * WARPS + warp) * head_dim + d] = value

    return keep, keep_element


def _block(plan: Plan):
    pairs, head_dim = plan.tile.pairs, plan.head_dim
    fetch, one_warp, join = fetch_block(plan, THREADS), warp_pass(plan, *_keep(plan)), _join(plan)

    @T.macro
    def one_block(q, cache, boundary, visible, out, kv, first, thread):
        queries = T.sblock_alloc_buffer((pairs * head_dim,), "float32", scope="shared")
        tops = T.sblock_alloc_buffer((pairs * WARPS,), "float32", scope="shared")
        norms = T.sblock_alloc_buffer((pairs * WARPS,), "float32", scope="shared")
        mixed = T.sblock_alloc_buffer((pairs * WARPS * head_dim,), "float32", scope="shared")
        masks = T.sblock_alloc_buffer((pairs * MASK_WORDS,), "uint32", scope="shared")
        fetch(q, visible, queries, masks, kv, first, thread)
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

    return one_block


def _template(work: Workload, plan: Plan) -> tirx.PrimFunc:
    width, heads, head_dim = work.shapes[0]
    cache_shape = work.shapes[1]
    pairs = plan.tile.pairs
    parts = ceil_div(plan.pairs, pairs)
    grid = cache_shape[1] * parts
    one_block = _block(plan)

    if plan.causal:

        @T.prim_func(private=True, s_tir=True)
        def plain(
            q: T.Buffer((width, heads, head_dim), "float32"),
            cache: T.Buffer(cache_shape, "float16"),
            boundary: T.Buffer((1,), "int32"),
            out: T.Buffer((width, heads * head_dim), "float32"),
        ):
            for bx in T.thread_binding(grid, thread="blockIdx.x"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    with T.sblock("attention"):
                        block = T.axis.spatial(grid, bx)
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
        for bx in T.thread_binding(grid, thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("attention"):
                    block = T.axis.spatial(grid, bx)
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


def _choose(work: Workload, card: Card) -> AttentionTile:
    width, heads, head_dim = work.shapes[0]
    kv_heads = work.shapes[1][1]
    return choose_tile(width, heads // kv_heads, kv_heads, head_dim)


TEMPLATE = Template(
    name="attention",
    tile=AttentionTile,
    # Where the tensor cores serve, theirs is the tree of the sums.
    serves=lambda work, card: not serves(work.shapes[0][2]),
    choose=_choose,
    candidates=lambda work, card: [_choose(work, card)],
    make=lambda work, tile, target: _template(work, plan_of(work, tile, WARPS, TILE)),
)
