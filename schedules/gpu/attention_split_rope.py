"""Attention of a decode step that turns its queries and writes its cache, norms first or not.

The blocks of schedules/gpu/attention_split.py, and one kernel less in front of them. A block first
makes its queries, in shared memory, and those new keys and values that are of its chains, in the
cache, from where it then reads them as others: of several blocks that share a chain each writes
the same bits, and reads what it wrote itself.
"""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu import attention_split
from schedules.gpu.attention_fragments import SLOTS, THREADS, WARPS, WORDS, Sizes
from schedules.gpu.attention_split import Grid, SplitTile, announcer, one_part_of
from schedules.gpu.attention_warp import MASK_WORDS, Plan, plan_of
from schedules.gpu.heads import (
    SIDES,
    Heads,
    key_value_writer,
    loader,
    normalizer,
    rotator,
    weight_loader,
)
from schedules.gpu.thread import WARP, ceil_div, overlaps, span
from schedules.space import Template
from schedules.workload import Workload

# Behind each query in shared memory, so that the lanes of a warp read from different banks.
PAD = WORDS
PARTS = 2


def _attention(work: Workload) -> Workload:
    """The `attention_parts` that is within a workload."""
    cache, visible, tops, norms, mixed = work.shapes[-5:]
    width, heads, _, head_dim = mixed
    shapes = ((width, heads, head_dim), cache, (1,), visible, tops, norms, mixed)
    return Workload("attention_parts", work.settings, shapes, ())


def _own_queries(head_dim: int):
    """How a block's queries lie in shared memory, one behind the other: their stride, and how four
    elements of one are read."""
    stride = head_dim + PAD

    def load(turned, kv, first, pair, element):
        return turned[span(pair * stride + element, WORDS)]

    return stride, load


def _maker(plan: Plan, heads: Heads, splits: int, eps: float | None):
    """A macro that makes a block's queries, and the new keys and values of its chains.

    `source`: qkv, position and table; `weights`: of the norms of queries and of keys. A warp makes
    one head after the other, queries first. The places of a tile behind the last pair stay as they
    are: what comes of them goes nowhere.
    """
    normed, norm = eps is not None, normalizer(heads, eps or 0.0)
    load, rotate = loader(heads), rotator(heads)
    write_key_value, (stride, _) = key_value_writer(heads), _own_queries(heads.size)
    queries = min(plan.tile.pairs, plan.pairs)
    items = queries + PARTS * plan.width

    def row_of(first, item):
        new = T.min(item - queries, PARTS * plan.width - 1) // PARTS
        return T.Select(item < queries, plan.row_of(first, item), new)

    def head_of(kv, first, item):
        """Of the new rows first the key, then the value."""
        new = heads.queries + (item - queries) % PARTS * heads.keys + kv
        return T.Select(item < queries, plan.head_of(kv, first, item), new)

    @T.macro
    def write_query(held, turned, pair, lane):
        for i in T.unroll(heads.turns):
            for side in T.unroll(SIDES):
                if heads.exists(i, lane):
                    turned[
                        span(pair * stride + side * heads.half + heads.low(i, lane), heads.vector)
                    ] = held[span(heads.at(i, side), heads.vector)]

    @T.macro
    def turn(source, weights, held, row, lane):
        if normed:
            norm(held, weights)
        rotate(held, source[1][row], source[2], lane)

    @T.macro
    def write(source, weights, held, cache, turned, item, row, slot, head, mine, lane):
        # All conditions are the same for all lanes of a warp.
        if item < queries:
            turn(source, weights[0], held, row, lane)
            write_query(held, turned, item, lane)
        else:
            if mine:
                if head < heads.first_value:
                    turn(source, weights[1], held, row, lane)
                write_key_value(held, cache, slot, head, lane)

    @T.macro
    def make_head(source, weights, cache, turned, boundary, chain, item, row, head, lane):
        held = T.sblock_alloc_buffer((heads.held,), "float32", scope="local")
        load(source[0], held, row, head, lane)
        write(
            source,
            weights,
            held,
            cache,
            turned,
            item,
            row,
            boundary + row,
            head,
            (item < items) and ((boundary + row) // SLOTS % splits == chain),
            lane,
        )

    @T.macro
    def make(source, weights, cache, turned, boundary, kv, first, chain, warp, lane):
        for i in T.unroll(ceil_div(items, WARPS)):
            make_head(
                source,
                weights,
                cache,
                turned,
                boundary,
                chain,
                i * WARPS + warp,
                row_of(first, i * WARPS + warp),
                head_of(kv, first, i * WARPS + warp),
                lane,
            )

    return make


def _block(work: Workload, tile: SplitTile, early: bool):
    """The grid, and a macro for one block."""
    inner, eps = _attention(work), work.settings.get("eps")
    (width, queries, head_dim), cache_shape = inner.shapes[:2]
    plan = plan_of(inner, tile, work.settings["chains"], SLOTS)
    heads = Heads(width, queries, cache_shape[1], head_dim)
    grid, sizes = Grid.of(plan, cache_shape[1]), Sizes(head_dim, tile.tiles)
    announce, load_weights = announcer(plan, cache_shape[2]), weight_loader(heads)
    stride, load_query = _own_queries(head_dim)
    make = _maker(plan, heads, grid.splits, eps)
    one_part = one_part_of(plan, sizes, load_query)

    @T.macro
    def one_block(
        qkv, norm_weights, position, boundary, table, cache, visible, results, block, thread
    ):
        tops, norms, mixed = results
        turned = T.sblock_alloc_buffer((tile.pairs * stride,), "float32", scope="shared")
        of_queries = T.sblock_alloc_buffer((heads.held,), "float32", scope="local")
        of_keys = T.sblock_alloc_buffer((heads.held,), "float32", scope="local")
        known = T.sblock_alloc_buffer((1,), "int32", scope="local")
        if norm_weights is not None:
            load_weights(norm_weights[0], norm_weights[1], of_queries, 0, thread % WARP)
            load_weights(norm_weights[0], norm_weights[1], of_keys, queries, thread % WARP)
        if early:
            announce(
                cache,
                boundary,
                grid.kv(block),
                grid.first(block),
                grid.chain(block, 0),
                thread,
            )
        # Read once: the loads of the cache are text that a compiler cannot look into.
        known[0] = boundary[0]
        # A block's first chain has the earliest slots.
        if grid.chain(block, 0) * SLOTS < known[0] + width:
            make(
                (qkv, position, table),
                (of_queries, of_keys),
                cache,
                turned,
                known[0],
                grid.kv(block),
                grid.first(block),
                grid.chain(block, 0),
                thread // WARP,
                thread % WARP,
            )
            T.tvm_storage_sync("shared")
            for turn in T.serial(grid.turns):
                one_part(
                    turned,
                    cache,
                    known[0],
                    visible,
                    tops,
                    norms,
                    mixed,
                    grid.kv(block),
                    grid.first(block),
                    grid.chain(block, turn),
                    thread,
                )

    return grid, one_block


def _plain(work: Workload, grid: Grid, one_block) -> tirx.PrimFunc:
    """See `relax_models.fused_attention_ops.rope_attention_parts`."""
    qkv_shape, (width,), _, table_shape, cache_shape, _, tops_shape, _, mixed_shape = work.shapes

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv: T.Buffer(qkv_shape, "float32"),
        position: T.Buffer((width,), "int32"),
        boundary: T.Buffer((1,), "int32"),
        table: T.Buffer(table_shape, "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        visible: T.Buffer((width, MASK_WORDS), "uint32"),
        tops: T.Buffer(tops_shape, "float32"),
        norms: T.Buffer(tops_shape, "float32"),
        mixed: T.Buffer(mixed_shape, "float32"),
    ):
        for bx in T.thread_binding(grid.size, thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("attention"):
                    block = T.axis.spatial(grid.size, bx)
                    thread = T.axis.spatial(THREADS, tx)
                    one_block(
                        qkv,
                        None,
                        position,
                        boundary,
                        table,
                        cache,
                        visible,
                        (tops, norms, mixed),
                        block,
                        thread,
                    )

    return func


def _normed(work: Workload, grid: Grid, one_block) -> tirx.PrimFunc:
    """See `relax_models.fused_attention_ops.norm_rope_attention_parts`."""
    qkv_shape, (size,), _, (width,), _, table_shape, cache_shape, _, tops_shape, _, mixed_shape = (
        work.shapes
    )

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv: T.Buffer(qkv_shape, "float32"),
        q_norm: T.Buffer((size,), "float32"),
        k_norm: T.Buffer((size,), "float32"),
        position: T.Buffer((width,), "int32"),
        boundary: T.Buffer((1,), "int32"),
        table: T.Buffer(table_shape, "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        visible: T.Buffer((width, MASK_WORDS), "uint32"),
        tops: T.Buffer(tops_shape, "float32"),
        norms: T.Buffer(tops_shape, "float32"),
        mixed: T.Buffer(mixed_shape, "float32"),
    ):
        for bx in T.thread_binding(grid.size, thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("attention"):
                    block = T.axis.spatial(grid.size, bx)
                    thread = T.axis.spatial(THREADS, tx)
                    one_block(
                        qkv,
                        (q_norm, k_norm),
                        position,
                        boundary,
                        table,
                        cache,
                        visible,
                        (tops, norms, mixed),
                        block,
                        thread,
                    )

    return func


def _make(work: Workload, tile: SplitTile, target) -> tirx.PrimFunc:
    made = _plain if "eps" not in work.settings else _normed
    return made(work, *_block(work, tile, overlaps(target)))


TEMPLATE = Template(
    name="attention_parts_rope",
    tile=SplitTile,
    serves=lambda work, card: attention_split.TEMPLATE.serves(_attention(work), card),
    choose=lambda work, card: attention_split.choose(_attention(work), card),
    candidates=lambda work, card: attention_split.candidates(_attention(work), card),
    make=_make,
)
