"""Linears that quantise their own input on cuda, for a few rows: one kernel where there were two.

Every block norms and quantises all rows anew, into shared memory, and goes on as the linear by dp4a
would. Rows and sums have the trees of schedules/gpu/row.py and of the linear's own file, so that
the results are those of the two kernels, bit for bit. What no kernel writes, the first weights and
the norm's, is on its way before the kernel waits for the one before.

With an activation a block computes a tile of the gate and the same tile of up, and writes
activation(gate) · up alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu import low_bit_group_gemv, low_bit_group_warp, low_bit_warp
from schedules.gpu.fused_kernel import fused_kernel
from schedules.gpu.linear import WarpPart, plus, put_sums
from schedules.gpu.low_bit_gemv import LinearTile
from schedules.gpu.norm import activated
from schedules.gpu.packed import GROUP_PACKINGS, WORDS
from schedules.gpu.row import HELD, RowTile, encoder, group_encoder, loader, normalizer
from schedules.gpu.thread import (
    MAX_THREADS,
    STATIC_SHARED_BYTES,
    WARP,
    ceil_div,
    let_others_start,
    overlaps,
    span,
    wait_for_others,
)
from schedules.space import Card, Template
from schedules.workload import Workload

MOST_WARPS = 20
MOST_AHEAD = 4
# Sums of a lane that leave too few registers to a block of that many warps.
MANY_SUMS = 8
# Registers of a lane that words, group scales and sums may take.
HELD_REGISTERS = 56
# Share of the multiprocessors that should get a block: more rows a block repeat less of the norm.
BUSY = 0.8


@dataclass(frozen=True)
class FusedTile:
    """What one block computes: for all rows, teams * row_tiles tiles of weight rows, or of a gate
    and of up.

    warps: ways K is split, each by one warp of every team; row_tiles: tiles of a team; ahead:
    16-byte weight loads a lane has in flight for each tile.
    """

    warps: int
    teams: int
    row_tiles: int
    ahead: int


@dataclass(frozen=True)
class _Shape:
    """What the template reads off a workload: `parts` is 2 where gate and up go together."""

    work: Workload

    @property
    def settings(self) -> dict:
        return self.work.settings

    @property
    def normed(self) -> bool:
        return self.work.op == "norm_low_bit_linear"

    @property
    def parts(self) -> int:
        return 2 if self.settings["activation"] else 1

    @property
    def grouped(self) -> bool:
        return self.settings["format"] in GROUP_PACKINGS

    @property
    def tile_rows(self) -> int:
        if self.grouped:
            return GROUP_PACKINGS[self.settings["format"]].tile
        return low_bit_warp.TILE

    @property
    def weight(self) -> tuple[int, ...]:
        return self.work.shapes[2 if self.normed else 1]

    @property
    def tiles(self) -> int:
        """Tiles of rows of the result."""
        return self.weight[0] // self.parts

    @property
    def blocks(self) -> int:
        """Blocks of 128 columns of the weights."""
        return self.weight[1]


def serves(work: Workload, card: Card) -> bool:
    """Whether this makes the kernel; `bitmtp_tvm/fuse.py` asks for no others."""
    return True


def choose(work: Workload, card: Card) -> FusedTile:
    """The rule's tile."""
    shape = _Shape(work)
    least = card.multiprocessors * BUSY
    warps = _ways(shape, per_warp=4 if shape.tiles >= 2 * card.multiprocessors else 2)
    many = shape.parts * shape.tile_rows // 8 * work.width > MANY_SUMS
    most = max(1, MOST_WARPS // (2 if many else 1) // warps)
    teams = next((t for t in range(most, 1, -1) if shape.tiles / t >= least), 1)
    return FusedTile(warps, teams, 1, _ahead(shape, warps, 1))


def _ways(shape: _Shape, per_warp: int) -> int:
    """Ways to split K: with group scales they are part of the sum's tree, and not free."""
    if shape.grouped:
        return low_bit_group_gemv.warps_for(shape.blocks)
    return ceil_div(shape.blocks, max(per_warp, ceil_div(shape.blocks, MOST_WARPS)))


def _ahead(shape: _Shape, warps: int, row_tiles: int) -> int:
    """Loads in flight, even over the rounds: as many as the registers beside the sums allow."""
    tiles = row_tiles * shape.parts
    rows = tiles * shape.tile_rows // 8
    load = tiles * WORDS + (rows if shape.grouped else 0)
    most = max(1, min(MOST_AHEAD, (HELD_REGISTERS - rows * shape.work.width) // load))
    # Words of one-bit codes unpack to twice as many registers.
    most = min(most, 2) if shape.tile_rows == 32 and shape.work.width > 1 else most
    turns = ceil_div(shape.blocks, warps)
    return ceil_div(turns, ceil_div(turns, most))


def candidates(work: Workload, card: Card) -> Iterable[FusedTile]:
    """Other splits of K where it is free to be split, other teams, and two tiles a team."""
    shape = _Shape(work)
    for warps in sorted({_ways(shape, per_warp) for per_warp in (1, 2, 3, 4, 5)}):
        for teams in (1, 2, 3, 4):
            for row_tiles in (1, 2):
                tile = FusedTile(warps, teams, row_tiles, _ahead(shape, warps, row_tiles))
                if warps * teams <= 2 * MOST_WARPS and teams * row_tiles <= shape.tiles:
                    if _fits(shape, tile):
                        yield tile


def _fits(shape: _Shape, tile: FusedTile) -> bool:
    threads = tile.warps * tile.teams * WARP
    return threads <= MAX_THREADS and _shared_bytes(shape, tile) <= STATIC_SHARED_BYTES


def _shared_bytes(shape: _Shape, tile: FusedTile) -> int:
    """Of a block, and a little more: codes, scales and totals of the rows, sums of the warps."""
    width, columns = shape.work.width, shape.blocks * 128
    results = tile.teams * tile.row_tiles * shape.parts * shape.tile_rows * width
    return width * (columns + shape.blocks * 16) + tile.warps * results * 4


def _part(shape: _Shape, tile: FusedTile) -> WarpPart:
    row_tiles, tiles = tile.row_tiles, shape.tiles
    warp_tile = LinearTile(shape.work.width, row_tiles * shape.parts, tile.warps, tile.ahead)
    sizes = (shape.work.width, *shape.weight[:2])

    # A gate's tiles come first, and those of up behind all of them.
    def tile_of(first, r):
        if shape.parts == 1:
            return first + r
        return T.min(first + r % row_tiles, tiles - 1) + r // row_tiles * tiles

    if shape.grouped:
        packing = GROUP_PACKINGS[shape.settings["format"]]
        return low_bit_group_warp.warp_part(packing, warp_tile, sizes, tile_of)
    return low_bit_warp.warp_part(warp_tile, sizes, tile_of)


def _joiner(shape: _Shape, tile: FusedTile, stride: int):
    if shape.grouped:
        return low_bit_group_warp.joiner(tile.warps, stride)
    return low_bit_warp.joiner(tile.warps, stride, shape.settings["segments"])


def _quantizer(shape: _Shape, tile: FusedTile):
    """Two macros: one asks for the norm's weight, one leaves q, scale and total of all rows in
    shared memory, for threads that meet after it."""
    rows = RowTile(
        shape.settings["size"], shape.blocks * 128, shape.work.width, tile.warps * tile.teams
    )
    load_rows = loader(rows, lambda x, row, k: x[row, span(k, rows.vector)], rows=True)
    load_norm = loader(rows, lambda norm, row, k: norm[span(k, rows.vector)], rows=False)
    normalize = normalizer(rows, shape.settings["eps"]) if shape.normed else None
    encode = group_encoder(rows) if shape.grouped else encoder(rows)
    factors = rows.rows

    @T.macro
    def ask(norm, weights, warp, lane):
        if shape.normed:
            load_norm(norm, weights, 0, warp, lane)

    @T.macro
    def by_group(held, inverse, q, scale, total, warp, lane):
        if shape.normed:
            encode(held, inverse, q, scale, total, 0, warp, lane)
        else:
            encode(held, None, q, scale, total, 0, warp, lane)

    @T.macro
    def by_row(held, inverse, largest, q, scale, total, warp, lane):
        own = T.sblock_alloc_buffer((factors,), "float32", scope="local")
        encode(held, inverse, largest, q, own, total, 0, warp, lane)
        if warp * WARP + lane == 0:
            for r in T.unroll(factors):
                scale[r] = own[r]

    @T.macro
    def quantize(x, weights, q, scale, total, warp, lane):
        held = T.sblock_alloc_buffer((rows.held,), "float32", scope="local")
        inverse = T.sblock_alloc_buffer((factors,), "float32", scope="local")
        largest = T.sblock_alloc_buffer((factors,), "int32", scope="local")
        load_rows(x, held, 0, warp, lane)
        if shape.grouped:
            if shape.normed:
                normalize(held, weights, inverse, largest, None, warp, lane)
            by_group(held, inverse, q, scale, total, warp, lane)
        else:
            normalize(held, weights, inverse, largest, total, warp, lane)
            by_row(held, inverse, largest, q, scale, total, warp, lane)

    return rows.turns * HELD, ask, quantize


def _storer(shape: _Shape, tile: FusedTile, part: WarpPart):
    """A macro that joins the sums of all warps into result number `at` of the block."""
    width, columns = shape.work.shapes[-1]
    activation = shape.settings["activation"]
    sums = part.rows * width * 8
    results = sums // shape.parts
    join = _joiner(shape, tile, sums)

    @T.macro
    def join_parts(partial, at, scale, total, weight_scale, residual, y, token, n):
        value = T.sblock_alloc_buffer((1,), "float32", scope="local")
        up = T.sblock_alloc_buffer((1,), "float32", scope="local")
        join(partial, at, scale, total, weight_scale, value, token, n)
        if shape.parts == 2:
            join(partial, at + results, scale, total, weight_scale, up, token, n + columns)
            y[token, n] = activated(value[0], activation) * up[0]
        else:
            y[token, n] = plus(value[0], residual, token, n)

    @T.macro
    def store(partial, at, scale, total, weight_scale, residual, y, token, n):
        if (at < tile.teams * results) and (n < columns):
            join_parts(
                partial,
                at // results * (tile.warps * sums) + at % results,
                scale,
                total,
                weight_scale,
                residual,
                y,
                token,
                n,
            )

    return results, store


def _template(work: Workload, tile: FusedTile, early: bool) -> tirx.PrimFunc:
    shape = _Shape(work)
    if not _fits(shape, tile):
        raise ValueError(f"{tile} does not fit a block for {work.op} of {work.shapes}")
    width, warps, teams, row_tiles = work.width, tile.warps, tile.teams, tile.row_tiles
    threads, block_tiles = warps * teams * WARP, teams * row_tiles
    part, put = _part(shape, tile), put_sums(width, _part(shape, tile))
    norms, ask, quantize = _quantizer(shape, tile)
    results, store = _storer(shape, tile, part)
    scales = (width, shape.blocks) if shape.grouped else (width,)

    def tile_of(first, at):
        """The first tile of a team."""
        return first + at * row_tiles

    @T.macro
    def one_block(x, norm, weight, weight_scale, residual, y, first, warp, lane):
        words = T.sblock_alloc_buffer((part.words,), "uint32", scope="local")
        factors = T.sblock_alloc_buffer((part.scales,), "float32", scope="local")
        weights = T.sblock_alloc_buffer((norms,), "float32", scope="local")
        acc = T.sblock_alloc_buffer((part.rows * width,), part.dtype, scope="local")
        q = T.sblock_alloc_buffer((width, shape.blocks * 128), "int8", scope="shared")
        scale = T.sblock_alloc_buffer(scales, "float32", scope="shared")
        total = T.sblock_alloc_buffer(scales, "int32", scope="shared")
        partial = T.sblock_alloc_buffer(
            (teams * warps * part.rows * width * 8,), part.dtype, scope="shared"
        )
        if early:
            let_others_start()
        part.start(
            weight, weight_scale, words, factors, tile_of(first, warp // warps), warp % warps, lane
        )
        ask(norm, weights, warp, lane)
        if early:
            wait_for_others()
        quantize(x, weights, q, scale, total, warp, lane)
        T.tvm_storage_sync("shared")
        part.finish(
            q,
            scale,
            total,
            weight,
            weight_scale,
            words,
            factors,
            acc,
            tile_of(first, warp // warps),
            0,
            warp % warps,
            lane,
        )
        put(acc, partial, warp, lane)
        T.tvm_storage_sync("shared")
        for turn in T.unroll(ceil_div(teams * results, threads)):
            store(
                partial,
                turn * threads + warp * WARP + lane,
                scale,
                total,
                weight_scale,
                residual,
                y,
                (turn * threads + warp * WARP + lane) // 8 % width,
                tile_of(first, (turn * threads + warp * WARP + lane) // results) * shape.tile_rows
                + (turn * threads + warp * WARP + lane) % results // (8 * width) * 8
                + lane % 8,
            )

    return fused_kernel(work, ceil_div(shape.tiles, block_tiles), threads, block_tiles, one_block)


TEMPLATE = Template(
    name="fused_linear",
    tile=FusedTile,
    serves=serves,
    choose=choose,
    candidates=candidates,
    make=lambda work, tile, target: _template(work, tile, overlaps(target)),
)
