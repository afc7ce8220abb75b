"""Attention on cuda's tensor cores in one piece: blocks go through all chains, one after the other.

That is the tree of schedules/gpu/attention_split.py and schedules/gpu/attention_join.py.
"""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.attention_fragments import (
    PAIRS,
    SLOTS,
    STEPS,
    THREADS,
    WARPS,
    WORDS,
    MmaTile,
    Sizes,
    blocks_of,
    fitting,
    serves,
)
from schedules.gpu.attention_mma import CHAINS, begin_with, fold, norm_warp, start_chain, turn_of
from schedules.gpu.attention_warp import MASK_WORDS, Plan, plan_of
from schedules.gpu.thread import WARP, ceil_div, span
from schedules.space import Card, Template
from schedules.workload import Workload


def choose(work: Workload, card: Card) -> MmaTile:
    """The rule's tile: the largest that leaves every multiprocessor a block.

    Each block reads all keys and values: of a long context, more blocks wait for the L2.
    """
    tiles = fitting(work)
    busy = [tile for tile in tiles if blocks_of(work, tile) >= card.multiprocessors]
    return busy[-1] if busy else tiles[0]


def _chains(plan: Plan, sizes: Sizes):
    """A macro that goes through all chains of a block's pairs and folds them."""
    tiles, held, turn_slots = sizes.tiles, sizes.held, CHAINS * SLOTS
    one_turn = turn_of(plan, sizes)

    def following(slot, end):
        """The next 64 slots: of the same chain, or the first ones of the next chain."""
        same, chain = slot + turn_slots, slot // SLOTS % CHAINS
        return T.Select(same < end, same, (chain + 1) * SLOTS)

    @T.macro
    def one_step(cache, shared, state, whole, keys, values, kv, boundary, at, end, more, thread):
        if at[0] < turn_slots:
            start_chain(state[2], state[3], state[4], tiles, tiles * held)
        one_turn(
            cache,
            shared,
            state,
            keys,
            values,
            kv,
            boundary,
            at[0],
            following(at[0], end),
            more,
            end - 1,
            thread // WARP,
            thread % WARP,
        )
        if at[0] + turn_slots >= end:
            for tile in T.unroll(tiles):
                fold(state[2], state[3], state[4], whole, tile, held)
        at[0] = following(at[0], end)

    @T.macro
    def all_chains(cache, shared, state, whole, keys, values, kv, boundary, at, end, thread):
        at[0] = 0
        for step in range((end + SLOTS - 1) // SLOTS):
            one_step(
                cache,
                shared,
                state,
                whole,
                keys,
                values,
                kv,
                boundary,
                at,
                end,
                (step + 1) * SLOTS < end,
                thread,
            )

    return all_chains


def _finish(plan: Plan, sizes: Sizes):
    """A macro that divides a block's sums by its norms, which one warp has."""
    tiles, held, head_dim = sizes.tiles, sizes.held, sizes.head_dim

    @T.macro
    def store_pair(whole, highest, out, row, head, warp, lane, tile):
        norm = T.sblock_alloc_buffer((1,), "float32", scope="local")
        norm[0] = highest[tile * PAIRS + lane // 4]
        for i in T.unroll(held // 4):
            for j in T.unroll(4):
                whole[2][tile * held + i * 4 + j] = whole[2][tile * held + i * 4 + j] / norm[0]
            out[row, span(head * head_dim + sizes.element(warp, lane, i * 4), 4)] = whole[2][
                span(tile * held + i * 4, 4)
            ]

    @T.macro
    def finish(whole, highest, out, kv, first, warp, lane):
        T.tvm_storage_sync("shared")
        for tile in T.unroll(tiles):
            if (warp == norm_warp(tile)) and (lane % 4 == 0):
                highest[tile * PAIRS + lane // 4] = whole[1][tile]
        T.tvm_storage_sync("shared")
        for tile in T.unroll(tiles):
            if first + tile * PAIRS + lane // 4 < plan.pairs:
                store_pair(
                    whole,
                    highest,
                    out,
                    plan.row_of(first, tile * PAIRS + lane // 4),
                    plan.head_of(kv, first, tile * PAIRS + lane // 4),
                    warp,
                    lane,
                    tile,
                )

    return finish


def _block(plan: Plan, sizes: Sizes):
    tiles, held = sizes.tiles, sizes.held
    begin, all_chains, finish = begin_with(plan, sizes), _chains(plan, sizes), _finish(plan, sizes)

    @T.macro
    def one_block(q, cache, boundary, visible, out, kv, first, end, thread):
        queries = T.sblock_alloc_buffer(
            (tiles * sizes.key_steps * WARP * WORDS,), "uint32", scope="shared"
        )
        weights = T.sblock_alloc_buffer((tiles * STEPS * WARP * WORDS,), "uint32", scope="shared")
        highest = T.sblock_alloc_buffer((tiles * PAIRS * WARPS,), "float32", scope="shared")
        rows = T.sblock_alloc_buffer((tiles,), "int32", scope="local")
        masks = T.sblock_alloc_buffer((tiles * MASK_WORDS,), "uint32", scope="local")
        keys = T.sblock_alloc_buffer((sizes.keys,), "uint32", scope="local")
        values = T.sblock_alloc_buffer((sizes.values,), "uint32", scope="local")
        top = T.sblock_alloc_buffer((tiles,), "float32", scope="local")
        norm = T.sblock_alloc_buffer((tiles,), "float32", scope="local")
        acc = T.sblock_alloc_buffer((tiles * held,), "float32", scope="local")
        whole_top = T.sblock_alloc_buffer((tiles,), "float32", scope="local")
        whole_norm = T.sblock_alloc_buffer((tiles,), "float32", scope="local")
        whole_acc = T.sblock_alloc_buffer((tiles * held,), "float32", scope="local")
        at = T.sblock_alloc_buffer((1,), "int32", scope="local")
        start_chain(whole_top, whole_norm, whole_acc, tiles, tiles * held)
        begin(q, cache, visible, queries, rows, masks, keys, values, kv, first, 0, end - 1, thread)
        all_chains(
            cache,
            (queries, weights, highest),
            (rows, masks, top, norm, acc),
            (whole_top, whole_norm, whole_acc),
            keys,
            values,
            kv,
            boundary,
            at,
            end,
            thread,
        )
        finish(
            (whole_top, whole_norm, whole_acc),
            highest,
            out,
            kv,
            first,
            thread // WARP,
            thread % WARP,
        )

    return one_block


def _whole(work: Workload, plan: Plan) -> tirx.PrimFunc:
    width, heads, head_dim = work.shapes[0]
    cache_shape = work.shapes[1]
    kv_heads, pairs = cache_shape[1], plan.tile.pairs
    parts = ceil_div(plan.pairs, pairs)
    grid = kv_heads * parts
    one_block = _block(plan, Sizes(head_dim, plan.tile.tiles))

    def first_of(block):
        """A block's first pair: those that see most begin first."""
        return (parts - 1 - block // kv_heads) * pairs

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
                        known = T.sblock_alloc_buffer((1,), "int32", scope="local")
                        known[0] = boundary[0]
                        one_block(
                            q,
                            cache,
                            known[0],
                            None,
                            out,
                            block % kv_heads,
                            first_of(block),
                            plan.end(known[0], first_of(block)),
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
                    known = T.sblock_alloc_buffer((1,), "int32", scope="local")
                    known[0] = boundary[0]
                    one_block(
                        q,
                        cache,
                        known[0],
                        visible,
                        out,
                        block % kv_heads,
                        first_of(block),
                        plan.end(known[0], first_of(block)),
                        thread,
                    )

    return masked


TEMPLATE = Template(
    name="attention_mma",
    tile=MmaTile,
    serves=lambda work, card: serves(work.shapes[0][2]),
    choose=choose,
    candidates=lambda work, card: [
        MmaTile(tile.tiles, at_once)
        for tile in fitting(work)
        for at_once in sorted({1, tile.at_once})
    ],
    make=lambda work, tile, target: _whole(work, plan_of(work, tile, CHAINS, SLOTS)),
)
