"""The first half of a decode step's attention on cuda, for heads of any size.

A step has few rows and a long cache: a block for each key/value head would leave most of a card
idle. So each chain of slots has a warp of its own, and the warps of a block are chains that lie
apart, so that a short cache keeps all blocks busy.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.attention import fetch_block, tile_for
from schedules.gpu.attention_fragments import serves
from schedules.gpu.attention_warp import (
    MASK_WORDS,
    TILE,
    AttentionTile,
    Plan,
    plan_of,
    warp_pass,
)
from schedules.gpu.thread import WARP, ceil_div
from schedules.space import Card, Template
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
        if split * plan.chain_slots < plan.end(boundary[0], first):
            fetch(q, visible, queries, masks, kv, first, thread)
            T.tvm_storage_sync("shared")
            if (thread // WARP * splits + split) * plan.chain_slots < plan.end(boundary[0], first):
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


def _serves(work: Workload, card: Card) -> bool:
    fits = work.settings["chain_slots"] % TILE == 0 and work.settings["chains"] % WARPS == 0
    # Where the tensor cores serve, theirs is the tree of the sums.
    return fits and not serves(work.shapes[0][2])


def _choose(work: Workload, card: Card) -> AttentionTile:
    width, heads, head_dim = work.shapes[0]
    return choose_tile(width * heads, work.settings["chains"] // WARPS, head_dim)


def _make(work: Workload, tile: AttentionTile, target: tvm.target.Target) -> tirx.PrimFunc:
    settings = work.settings
    return _parts(work, plan_of(work, tile, settings["chains"], settings["chain_slots"]))


TEMPLATE = Template(
    name="attention_parts",
    tile=AttentionTile,
    serves=_serves,
    choose=_choose,
    candidates=lambda work, card: [_choose(work, card)],
    make=_make,
)
