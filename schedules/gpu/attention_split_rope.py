"""Attention of a decode step that turns its queries and writes its cache.

The blocks of schedules/gpu/attention_split.py, and one kernel less in front of them. A block first
makes its queries, in shared memory, and those new keys and values that are of its chains, in the
cache, from where it then reads them as others: of several blocks that share a chain each writes
the same bits, and reads what it wrote itself.
"""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu import attention_split
from schedules.gpu.attention_fragments import SLOTS, THREADS, WARPS, WORDS, Sizes
from schedules.gpu.attention_split import (
    Grid,
    SplitTile,
    all_parts_of,
    announcer,
    one_part_of,
)
from schedules.gpu.attention_warp import MASK_WORDS, Plan, plan_of
from schedules.gpu.heads import SIDES, Heads, key_value_writer, loader, rotator
from schedules.gpu.thread import WARP, ceil_div, overlaps, span
from schedules.space import Template
from schedules.workload import Workload

# Behind each query in shared memory, so that the lanes of a warp read from different banks.
PAD = WORDS
# A new row has a key and a value.
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


def _maker(plan: Plan, heads: Heads, splits: int):
    """A macro that makes a block's queries, and the new keys and values of its chains, of
    `source`: qkv, position and table.

    A warp makes one head after the other, queries first. The places of a tile behind the last pair
    stay as they are: what comes of them goes nowhere.
    """
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
    def write(source, held, cache, turned, item, row, slot, head, mine, lane):
        # All conditions are the same for all lanes of a warp.
        if item < queries:
            rotate(held, source[1][row], source[2], lane)
            write_query(held, turned, item, lane)
        else:
            if mine:
                if head < heads.first_value:
                    rotate(held, source[1][row], source[2], lane)
                write_key_value(held, cache, slot, head, lane)

    @T.macro
    def make_head(source, cache, turned, boundary, chain, item, row, head, lane):
        held = T.sblock_alloc_buffer((heads.held,), "float32", scope="local")
        load(source[0], held, row, head, lane)
        write(
            source,
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
    def make(source, cache, turned, boundary, kv, first, chain, warp, lane):
        for i in T.unroll(ceil_div(items, WARPS)):
            make_head(
                source,
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
    inner = _attention(work)
    (width, queries, head_dim), cache_shape = inner.shapes[:2]
    plan = plan_of(inner, tile, work.settings["chains"], SLOTS)
    heads = Heads(width, queries, cache_shape[1], head_dim)
    grid, sizes = Grid.of(plan, cache_shape[1]), Sizes(head_dim, tile.tiles)
    announce = announcer(plan, grid, cache_shape[2])
    stride, load_query = _own_queries(head_dim)
    make = _maker(plan, heads, grid.splits)
    all_parts = all_parts_of(grid, one_part_of(plan, sizes, load_query))

    @T.macro
    def one_block(source, boundary, cache, visible, results, block, thread):
        turned = T.sblock_alloc_buffer((tile.pairs * stride,), "float32", scope="shared")
        known = T.sblock_alloc_buffer((1,), "int32", scope="local")
        if early:
            announce(cache, boundary, block, thread)
        # Read once: the loads of the cache are text that a compiler cannot look into.
        known[0] = boundary[0]
        # A block's first chain has the earliest slots.
        if grid.chain(block, 0) * SLOTS < known[0] + width:
            make(
                source,
                cache,
                turned,
                known[0],
                grid.kv(block),
                grid.first(block),
                grid.chain(block, 0),
                thread // WARP,
                thread % WARP,
            )
            # Behind it a block sees what it wrote to the cache, too.
            T.tvm_storage_sync("shared")
            all_parts(turned, cache, known[0], visible, results, block, thread)

    return grid, one_block


def _make(work: Workload, tile: SplitTile, target) -> tirx.PrimFunc:
    """See `relax_models.fused_attention_ops.rope_attention_parts`."""
    qkv_shape, (width,), _, table_shape, cache_shape, _, tops_shape, _, mixed_shape = work.shapes
    grid, one_block = _block(work, tile, overlaps(target))

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
                        (qkv, position, table),
                        boundary,
                        cache,
                        visible,
                        (tops, norms, mixed),
                        block,
                        thread,
                    )

    return func


TEMPLATE = Template(
    name="attention_parts_rope",
    tile=SplitTile,
    serves=lambda work, card: attention_split.TEMPLATE.serves(_attention(work), card),
    choose=lambda work, card: attention_split.choose(_attention(work), card),
    candidates=lambda work, card: attention_split.candidates(_attention(work), card),
    make=_make,
)
