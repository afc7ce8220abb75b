"""Attention of a decode step on cuda in two kernels, so that many blocks share a row.

A step has few rows and a long cache: a block for each key/value head would leave most of a card
idle. `attention_parts` gives each chain of slots to a warp of its own, and the warps of a block are
chains that lie apart, so that a short cache keeps all blocks busy. `attention_join` adds the chains
up in their order: the tree of `schedules.gpu.attention`, with more chains.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.attention import MAX_VISIBLE, fetch_block, tile_for
from schedules.gpu.attention_warp import (
    MASK_WORDS,
    NEG_INF,
    TILE,
    AttentionTile,
    Plan,
    exp,
    warp_pass,
)
from schedules.gpu.thread import WARP, ceil_div, constant, fma
from schedules.workload import Workload

WARPS = 4
THREADS = WARPS * WARP
PAIRS = (8, 4, 2, 1)
# Several for each multiprocessor: most chains of a short cache are empty.
ENOUGH_BLOCKS = 640


def choose_tile(pairs: int, splits: int, head_dim: int) -> AttentionTile:
    """The tile for `pairs` (row, head) pairs in all, each shared by `splits` blocks.

    Pairs that share a block share its loads of keys and values, but blocks come first.
    """
    shared = next((n for n in PAIRS if pairs * splits >= n * ENOUGH_BLOCKS), 1)
    return tile_for(shared, head_dim)


def attention_parts(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.attention_ops.attention_parts`. Raises ValueError for masks of more than 64
    rows."""
    width, heads, head_dim = work.shapes[0]
    kv_heads, chains = work.shapes[1][1], work.settings["chains"]
    if width > MAX_VISIBLE:
        raise ValueError(f"masks speak of {MAX_VISIBLE} rows at most, and this step has {width}")
    if work.settings["chain_slots"] != TILE or chains % WARPS:
        raise ValueError(
            f"{chains} chains of {work.settings['chain_slots']} slots have no schedule"
        )
    group = heads // kv_heads
    tile = choose_tile(width * heads, chains // WARPS, head_dim)
    return _parts(work, Plan(width, group, head_dim, False, tile, chains))


def _keep(plan: Plan):
    """Macros that leave what a warp found at its pair and chain."""

    @T.macro
    def keep(tops, norms, kv, first, i, chain, top, norm):
        if first + i < plan.pairs:
            tops[plan.row_of(first, i), plan.head_of(kv, first, i), chain] = top
            norms[plan.row_of(first, i), plan.head_of(kv, first, i), chain] = norm

    @T.macro
    def keep_element(mixed, kv, first, i, chain, d, value):
        if first + i < plan.pairs:
            mixed[plan.row_of(first, i), plan.head_of(kv, first, i), chain, d] = value

    return keep, keep_element


def _parts(work: Workload, plan: Plan) -> tirx.PrimFunc:
    width, heads, head_dim = work.shapes[0]
    cache_shape, pairs, chains = work.shapes[1], plan.tile.pairs, plan.chains
    splits, blocks = chains // WARPS, ceil_div(plan.pairs, pairs)
    grid = cache_shape[1] * blocks * splits
    fetch, one_warp = fetch_block(plan, THREADS), warp_pass(plan, *_keep(plan))

    @T.macro
    def one_block(q, cache, boundary, visible, tops, norms, mixed, kv, first, split, thread):
        queries = T.sblock_alloc_buffer((pairs * head_dim,), "float32", scope="shared")
        masks = T.sblock_alloc_buffer((pairs * MASK_WORDS,), "uint32", scope="shared")
        # The first chain of a block has the earliest slots.
        if split * TILE < plan.end(boundary[0], first):
            fetch(q, visible, queries, masks, kv, first, thread)
            T.tvm_storage_sync("shared")
            if (thread // WARP * splits + split) * TILE < plan.end(boundary[0], first):
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
                    thread // WARP * splits + split,
                    thread % WARP,
                )

    @T.prim_func(private=True, s_tir=True)
    def func(
        q: T.Buffer((width, heads, head_dim), "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        boundary: T.Buffer((1,), "int32"),
        visible: T.Buffer((width, MASK_WORDS), "uint32"),
        tops: T.Buffer((width, heads, chains), "float32"),
        norms: T.Buffer((width, heads, chains), "float32"),
        mixed: T.Buffer((width, heads, chains, head_dim), "float32"),
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
                        tops,
                        norms,
                        mixed,
                        block // (blocks * splits),
                        block // splits % blocks * pairs,
                        block % splits,
                        thread,
                    )

    return func


def attention_join(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.attention_ops.attention_join`: a block for each row and head."""
    width, heads, chains, head_dim = work.shapes[2]
    slots = work.settings["chain_slots"]
    threads = ceil_div(head_dim, WARP) * WARP

    @T.macro
    def join(tops, norms, mixed, boundary, out, row, head, d):
        top = T.sblock_alloc_buffer((chains,), "float32", scope="local")
        norm = T.sblock_alloc_buffer((chains,), "float32", scope="local")
        value = T.sblock_alloc_buffer((chains,), "float32", scope="local")
        last = T.sblock_alloc_buffer((1,), "int32", scope="local")
        sums = T.sblock_alloc_buffer((3,), "float32", scope="local")
        # Behind the last chain in use that one is read again, and counts nothing: so no load waits
        # for another.
        last[0] = T.min((boundary[0] + width - 1) // slots, chains - 1)
        for c in T.unroll(chains):
            top[c] = tops[row, head, T.min(c, last[0])]
            norm[c] = norms[row, head, T.min(c, last[0])]
            value[c] = mixed[row, head, T.min(c, last[0]), d]
        sums[0] = constant(NEG_INF)
        sums[1] = T.float32(0)
        sums[2] = T.float32(0)
        for c in T.unroll(chains):
            sums[0] = T.max(sums[0], top[c])
        for c in T.unroll(chains):
            top[c] = T.Select(c <= last[0], exp(top[c] - sums[0]), T.float32(0))
            sums[1] = fma(norm[c], top[c], sums[1])
            sums[2] = fma(value[c], top[c], sums[2])
        out[row, head * head_dim + d] = sums[2] / sums[1]

    @T.prim_func(private=True, s_tir=True)
    def func(
        tops: T.Buffer((width, heads, chains), "float32"),
        norms: T.Buffer((width, heads, chains), "float32"),
        mixed: T.Buffer((width, heads, chains, head_dim), "float32"),
        boundary: T.Buffer((1,), "int32"),
        out: T.Buffer((width, heads * head_dim), "float32"),
    ):
        for bx in T.thread_binding(width * heads, thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("join"):
                    block = T.axis.spatial(width * heads, bx)
                    d = T.axis.spatial(threads, tx)
                    if d < head_dim:
                        join(tops, norms, mixed, boundary, out, block // heads, block % heads, d)

    return func
