"""Linear whose weights and activations carry a scale for every 128 columns, on cuda.

The float sum over the groups is part of the result, so its tree is fixed by K alone, and the same
at every width:

- a lane's share of a group is its exact integer sum of (weight + 1) · q over its 32 columns, less
  the group's total in lane t = 0;
- warp w goes through the groups w, w + warps, w + 2 · warps, …; each lane adds
  share · (scale · weight_scale), the product of the scales rounded, the rest fused;
- the four lanes of a row are added as (0 + 2) + (1 + 3), then the warps in their order, then the
  residual.

Rows and tokens of a block and the loads in flight are free to differ from width to width.
"""

from tvm import tirx

from schedules.gpu.linear import dp4a_linear
from schedules.gpu.low_bit_group_warp import GroupTile, joiner, warp_part
from schedules.gpu.packed import GROUP_PACKINGS, Packing
from schedules.gpu.thread import ceil_div, overlaps
from schedules.space import Card, Template
from schedules.workload import Workload

MOST_TOKENS = 8
MOST_WARPS = 16
LEAST_GROUPS = 4
# Below this many blocks a device has multiprocessors to spare, and blocks are kept small.
MANY_BLOCKS = 512


def warps_for(groups: int) -> int:
    """Ways that K is split: a shape of the sum, so nothing but the number of groups may enter."""
    return ceil_div(groups, max(LEAST_GROUPS, ceil_div(groups, MOST_WARPS)))


def choose_tile(width: int, tiles: int, groups: int, packing: Packing) -> GroupTile:
    """The tile for `width` activation rows and `tiles` x `groups` tiles of weights."""
    warps, tokens = warps_for(groups), _share(width, MOST_TOKENS)
    # More rows share the loads of the activations; with few rows there is little to share.
    many = tiles * ceil_div(width, tokens) >= MANY_BLOCKS and tokens >= 4
    row_tiles = 2 if many and packing.bits == 2 else 1
    rows = row_tiles * packing.rows
    if rows == 4:
        tokens = _share(width, MOST_TOKENS // 2)
    # Sums of many rows leave no registers to load ahead, and there is work to do meanwhile.
    most_ahead = 4 if rows * tokens <= 2 else 2 if rows == 2 or tokens <= 2 else 1
    rounds = ceil_div(ceil_div(groups, warps), most_ahead)
    return GroupTile(tokens, row_tiles, warps, ceil_div(groups, warps * rounds))


def _share(width: int, most: int) -> int:
    """Activation rows of a block: spread evenly over the fewest blocks of up to `most`."""
    return ceil_div(width, ceil_div(width, most))


def serves(work: Workload, card: Card) -> bool:
    """Whether the weights have groups; any width will do."""
    return work.settings["format"] in GROUP_PACKINGS


def choose(work: Workload, card: Card) -> GroupTile:
    """The rule's tile."""
    tiles, groups = work.shapes[3][:2]
    return choose_tile(work.width, tiles, groups, GROUP_PACKINGS[work.settings["format"]])


def _template(work: Workload, tile: GroupTile, early: bool) -> tirx.PrimFunc:
    packing = GROUP_PACKINGS[work.settings["format"]]
    tiles, groups = work.shapes[3][:2]
    shape = (work.width, tiles, groups)
    part = warp_part(packing, tile, shape, lambda first, r: first + r)
    join = joiner(tile.warps, part.rows * tile.tokens * 8)
    return dp4a_linear(work, tile, part, join, packing.tile, early)


TEMPLATE = Template(
    name="low_bit_group_gemv",
    tile=GroupTile,
    serves=serves,
    choose=choose,
    candidates=lambda work, card: [choose(work, card)],
    make=lambda work, tile, target: _template(work, tile, overlaps(target)),
)
