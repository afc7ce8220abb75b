"""Ternary linear on cuda: dp4a over 16-byte words of the packed weights, int32 sums.

K is split over the warps of a block (schedules/gpu/low_bit_warp.py) and summed in shared memory; it
is all exact, so the split is free to differ from width to width. The layout is that of
relax_models/formats.py for "cuda".
"""

from dataclasses import dataclass

from tvm import tirx

from schedules.gpu.linear import dp4a_linear
from schedules.gpu.low_bit_warp import TILE, joiner, warp_part
from schedules.gpu.thread import ceil_div, overlaps
from schedules.space import Card, Template
from schedules.workload import Workload

MOST_TOKENS = 8
MOST_WARPS = 16
MOST_AHEAD = 4
# Below this many blocks a device has multiprocessors to spare, and blocks are kept small.
MANY_BLOCKS = 512


@dataclass(frozen=True)
class LinearTile:
    """What one block computes: `row_tiles` tiles of 16 rows for `tokens` activation rows.

    warps: ways K is split; ahead: 16-byte weight loads a lane has in flight for each tile.
    """

    tokens: int
    row_tiles: int
    warps: int
    ahead: int


def choose_tile(width: int, tiles: int, blocks: int) -> LinearTile:
    """The tile for `width` activation rows and `tiles` x `blocks` tiles of 16 rows x 128 codes."""
    groups = ceil_div(width, MOST_TOKENS)
    tokens = ceil_div(width, groups)
    many = tiles * groups >= MANY_BLOCKS
    # More tiles share the loads of the activations; with few rows there is little to share.
    row_tiles = 2 if many and tokens >= 4 else 1
    per_warp = max(4 if many else 2, ceil_div(blocks, MOST_WARPS))
    warps = ceil_div(blocks, per_warp)
    rounds = ceil_div(ceil_div(blocks, warps), MOST_AHEAD)
    return LinearTile(tokens, row_tiles, warps, ceil_div(blocks, warps * rounds))


def serves(work: Workload, card: Card) -> bool:
    """Whether the weights are ternary with one scale a matrix; any width will do."""
    return work.settings["format"] == "bitnet-ternary"


def choose(work: Workload, card: Card) -> LinearTile:
    """The rule's tile."""
    tiles, blocks = work.shapes[3][:2]
    return choose_tile(work.width, tiles, blocks)


def _template(work: Workload, tile: LinearTile, early: bool) -> tirx.PrimFunc:
    tiles, blocks = work.shapes[3][:2]
    part = warp_part(tile, (work.width, tiles, blocks), lambda first, r: first + r)
    stride = tile.row_tiles * tile.tokens * TILE
    join = joiner(tile.warps, stride, work.settings["segments"])
    return dp4a_linear(work, tile, part, join, TILE, early)


TEMPLATE = Template(
    name="low_bit_gemv",
    tile=LinearTile,
    serves=serves,
    choose=choose,
    candidates=lambda work, card: [choose(work, card)],
    make=lambda work, tile, target: _template(work, tile, overlaps(target)),
)
