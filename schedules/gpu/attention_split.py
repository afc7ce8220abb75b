"""Attention of a decode step on cuda's tensor cores, a block for each chain of slots."""

from dataclasses import dataclass

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
from schedules.gpu.attention_mma import begin_with, norm_warp, start_chain, turn_of
from schedules.gpu.attention_warp import MASK_WORDS, Plan, plan_of
from schedules.gpu.thread import (
    WARP,
    ceil_div,
    let_others_start,
    overlaps,
    span,
    wait_for_others,
)
from schedules.space import Card, Template
from schedules.workload import Workload

# Chains that a context has which is neither short nor long.
USUAL_CHAINS = 8
# Blocks that a multiprocessor runs side by side.
MOST_BLOCKS = 3


@dataclass(frozen=True)
class SplitTile(MmaTile):
    """splits: blocks that share the chains of their pairs; it divides their number."""

    splits: int


def choose(work: Workload, card: Card) -> SplitTile:
    """The rule's tile: pairs that share a block share its loads, but blocks come first.

    Blocks without a slot cost time as well: where there are many, each has two chains.
    """
    tiles, chains = fitting(work), work.settings["chains"]
    busy = [t for t in tiles if blocks_of(work, t) * USUAL_CHAINS >= card.multiprocessors]
    tile = busy[-1] if busy else tiles[0]
    crowded = blocks_of(work, tile) * chains > MOST_BLOCKS * card.multiprocessors
    return SplitTile(
        tile.tiles, tile.at_once, chains // 2 if crowded and chains % 2 == 0 else chains
    )


def candidates(work: Workload, card: Card) -> list[SplitTile]:
    """All tiles that fit, with one, two and four chains a block."""
    chains = work.settings["chains"]
    return [
        SplitTile(tile.tiles, at_once, chains // share)
        for tile in fitting(work)
        for at_once in sorted({1, tile.at_once})
        for share in (1, 2, 4)
        if chains % share == 0
    ]


def one_part_of(plan: Plan, sizes: Sizes, load_query=None):
    """A macro that adds up a chain of a block's pairs, if it has slots; `load_query` as
    `attention_mma.begin_with` takes it."""
    width, chains, tiles, held = plan.width, plan.chains, sizes.tiles, sizes.held
    begin, one_turn = begin_with(plan, sizes, load_query), turn_of(plan, sizes)
    piece = min(4, 2 * sizes.value)

    @T.macro
    def store_pair(tops, norms, mixed, top, norm, acc, row, head, chain, warp, lane, tile):
        if (warp == norm_warp(tile)) and (lane % 4 == 0):
            tops[row, head, chain] = top[tile]
            norms[row, head, chain] = norm[tile]
        for i in T.unroll(held // piece):
            mixed[row, head, chain, span(sizes.element(warp, lane, i * piece), piece)] = acc[
                span(tile * held + i * piece, piece)
            ]

    @T.macro
    def store(tops, norms, mixed, top, norm, acc, kv, first, chain, warp, lane, tile):
        if first + tile * PAIRS + lane // 4 < plan.pairs:
            store_pair(
                tops,
                norms,
                mixed,
                top,
                norm,
                acc,
                plan.row_of(first, tile * PAIRS + lane // 4),
                plan.head_of(kv, first, tile * PAIRS + lane // 4),
                chain,
                warp,
                lane,
                tile,
            )

    @T.macro
    def one_chain(q, cache, boundary, visible, tops, norms, mixed, kv, first, chain, thread):
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
        start_chain(top, norm, acc, tiles, tiles * held)
        begin(
            q,
            cache,
            visible,
            queries,
            rows,
            masks,
            keys,
            values,
            kv,
            first,
            chain * SLOTS,
            boundary + width - 1,
            thread,
        )
        for turn in range((boundary + width - 1 - chain * SLOTS) // (chains * SLOTS) + 1):
            one_turn(
                cache,
                (queries, weights, highest),
                (rows, masks, top, norm, acc),
                keys,
                values,
                kv,
                boundary,
                (turn * chains + chain) * SLOTS,
                ((turn + 1) * chains + chain) * SLOTS,
                ((turn + 1) * chains + chain) * SLOTS < boundary + width,
                boundary + width - 1,
                thread // WARP,
                thread % WARP,
            )
        for tile in T.unroll(tiles):
            store(
                tops,
                norms,
                mixed,
                top,
                norm,
                acc,
                kv,
                first,
                chain,
                thread // WARP,
                thread % WARP,
                tile,
            )

    @T.macro
    def one_part(q, cache, boundary, visible, tops, norms, mixed, kv, first, chain, thread):
        if chain * SLOTS < boundary + width:
            one_chain(q, cache, boundary, visible, tops, norms, mixed, kv, first, chain, thread)

    return one_part


@dataclass(frozen=True)
class Grid:
    """Which chains, pairs and head a block has."""

    kv_heads: int
    blocks: int
    splits: int
    pairs: int
    turns: int

    @classmethod
    def of(cls, plan: Plan, kv_heads: int) -> "Grid":
        splits, pairs = plan.tile.splits, plan.tile.pairs
        return cls(kv_heads, ceil_div(plan.pairs, pairs), splits, pairs, plan.chains // splits)

    @property
    def size(self) -> int:
        return self.kv_heads * self.blocks * self.splits

    def kv(self, block):
        return block // self.blocks % self.kv_heads

    def first(self, block):
        """Its first pair: 0 for one of the blocks that share a chain."""
        return block % self.blocks * self.pairs

    def chain(self, block, turn):
        """Chains with the earliest slots begin first."""
        return block // (self.blocks * self.kv_heads) + turn * self.splits


def announcer(plan: Plan, grid: Grid, slots: int):
    """A macro that has the L2 fetch a block's first keys and values, and then waits for others.

    Where the step begins may be written only now, so that what is read here may be that of a step
    before: good enough for what is a hint, and the last few slots are in the L2 anyway.
    """
    row_bytes = 2 * plan.head_dim

    @T.macro
    def fetch(cache, boundary, kv, chain):
        known = T.sblock_alloc_buffer((1,), "uint32", scope="local")
        T.ptx["ld.relaxed.gpu.global.u32"](known[0], T.address_of(boundary[0]))
        # Of no sign: a number that is none of a slot's is too large.
        known[0] = T.min(known[0], T.uint32(slots))
        if known[0] > T.Cast("uint32", chain * SLOTS):
            known[0] = T.min(known[0] - T.Cast("uint32", chain * SLOTS), T.uint32(SLOTS))
            for part in T.unroll(2):
                T.ptx["cp.async.bulk.prefetch.L2.global"](
                    T.address_of(cache[part, kv, chain * SLOTS, 0]),
                    known[0] * T.uint32(row_bytes),
                )

    @T.macro
    def announce(cache, boundary, block, thread):
        let_others_start()
        # Of the blocks that share a chain one asks.
        if (grid.first(block) == 0) and (thread == 0):
            fetch(cache, boundary, grid.kv(block), grid.chain(block, 0))
        wait_for_others()

    return announce


def all_parts_of(grid: Grid, one_part):
    """A macro that adds up the chains of a block; `one_part` is that of `one_part_of`."""

    @T.macro
    def all_parts(q, cache, known, visible, results, block, thread):
        tops, norms, mixed = results
        for turn in T.serial(grid.turns):
            one_part(
                q,
                cache,
                known,
                visible,
                tops,
                norms,
                mixed,
                grid.kv(block),
                grid.first(block),
                grid.chain(block, turn),
                thread,
            )

    return all_parts


def _parts(work: Workload, plan: Plan, early: bool) -> tirx.PrimFunc:
    """See `relax_models.attention_ops.attention_parts`. With `early`, a block's first keys and
    values are on their way to the L2 while the kernel waits for others."""
    width, heads, head_dim = work.shapes[0]
    cache_shape, chains = work.shapes[1], plan.chains
    sizes, grid = Sizes(head_dim, plan.tile.tiles), Grid.of(plan, cache_shape[1])
    announce = announcer(plan, grid, cache_shape[2])
    all_parts = all_parts_of(grid, one_part_of(plan, sizes))

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
        for bx in T.thread_binding(grid.size, thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("attention"):
                    block = T.axis.spatial(grid.size, bx)
                    thread = T.axis.spatial(THREADS, tx)
                    if early:
                        announce(cache, boundary, block, thread)
                    # Read once: the loads of the cache are text that a compiler cannot look into.
                    known = T.sblock_alloc_buffer((1,), "int32", scope="local")
                    known[0] = boundary[0]
                    all_parts(q, cache, known[0], visible, (tops, norms, mixed), block, thread)

    return func


TEMPLATE = Template(
    name="attention_parts_mma",
    tile=SplitTile,
    serves=lambda work, card: serves(work.shapes[0][2]) and work.settings["chain_slots"] == SLOTS,
    choose=choose,
    candidates=candidates,
    make=lambda work, tile, target: _parts(
        work, plan_of(work, tile, work.settings["chains"], SLOTS), overlaps(target)
    ),
)
