"""Tiles of the linear with group scales on cuda's tensor cores: which fit, which the rule takes,
which are worth measuring."""

import math
from collections.abc import Iterator
from dataclasses import astuple, replace
from itertools import product

from schedules.gpu.low_bit_group_gemv import MANY_BLOCKS, warps_for
from schedules.gpu.low_bit_group_mma_warp import (
    MOST_UNROLLED,
    OUTPUTS,
    PARTS,
    ROWS,
    TOKENS,
    WORDS,
    GroupMmaTile,
)
from schedules.gpu.low_bit_mma_tile import RESIDENT_THREADS, limit
from schedules.gpu.packed import GROUP_PACKINGS, Packing
from schedules.gpu.thread import MAX_THREADS, STATIC_SHARED_BYTES, WARP, ceil_div
from schedules.space import Card
from schedules.workload import Workload

# Tiles of 16 rows x 8 tokens of a warp, of the rule and at all: each has 16 sums in a lane.
MOST_TILES = 2
MOST_SUMMED = 4
MOST_AHEAD = 4
# Threads of a multiprocessor of which each has 128 registers.
BUSY_THREADS = 512
# Warps that a multiprocessor should have.
BUSY_WARPS = 12
# Registers of a lane for addresses, the operands of an mma and the results.
OTHER_REGISTERS = 44
# Registers for what an mma gives, before it is added.
EXTRA = 9
# Registers for the activations of eight tokens: of one group, their scales and totals.
TOKEN_REGISTERS = 12
MOST_CANDIDATES = 96


def summed(tile: GroupMmaTile, packing: Packing) -> int:
    """Tiles of 16 rows x 8 tokens that a warp sums."""
    return tile.row_tiles * packing.tile // ROWS * tile.token_tiles


def registers(tile: GroupMmaTile, packing: Packing, groups: int) -> int:
    """About what a lane takes, where K has so many groups."""
    # A scale takes two: as it was loaded, and as a float.
    words = tile.ahead * tile.row_tiles * (WORDS + 2 * packing.rows)
    x_ahead = min(tile.x_ahead, ceil_div(groups, tile.warps))
    x = x_ahead * tile.token_tiles * TOKEN_REGISTERS
    return summed(tile, packing) * (PARTS * OUTPUTS + EXTRA) + words + x + OTHER_REGISTERS


def shared_bytes(tile: GroupMmaTile, packing: Packing) -> int:
    """Of a block: the sums of its warps."""
    sums = OUTPUTS * (WARP + 1)
    return 4 * sums * tile.warps * tile.teams * summed(tile, packing)


def checked(work: Workload, tile: GroupMmaTile) -> None:
    """Raise ValueError for a tile that does not fit the workload."""
    packing = GROUP_PACKINGS[work.settings["format"]]
    groups = work.shapes[3][1]
    if tile.warps != warps_for(groups):
        raise ValueError(f"the sum over {groups} groups takes {warps_for(groups)} warps: {tile}")
    turns, threads = ceil_div(groups, tile.warps), tile.warps * tile.teams * WARP
    if min(astuple(tile)) < 1 or max(tile.ahead, tile.x_ahead) > turns:
        raise ValueError(f"no tile of these numbers, where a warp has {turns} groups: {tile}")
    if threads > MAX_THREADS or threads * tile.resident > RESIDENT_THREADS:
        raise ValueError(f"too many threads: {tile}")
    if (
        summed(tile, packing) > MOST_SUMMED
        or shared_bytes(tile, packing) > STATIC_SHARED_BYTES
        or registers(tile, packing, groups) > limit(threads, tile.resident)
    ):
        raise ValueError(f"too many sums: {tile}")


def choose(work: Workload, card: Card) -> GroupMmaTile:
    """The rule's tile."""
    tiles, groups = work.shapes[3][:2]
    packing = GROUP_PACKINGS[work.settings["format"]]
    return choose_tile(work.width, tiles, groups, packing, card.multiprocessors)


def choose_tile(
    width: int, tiles: int, groups: int, packing: Packing, multiprocessors: int
) -> GroupMmaTile:
    """The tile for `width` activation rows and `tiles` x `groups` tiles of weights."""
    halves, needed = packing.rows // 2, ceil_div(width, TOKENS)
    # Spread evenly over the fewest blocks.
    token_tiles = ceil_div(needed, ceil_div(needed, MOST_TILES // halves))
    many = tiles * ceil_div(needed, token_tiles) >= MANY_BLOCKS
    # More rows share the loads of the activations.
    row_tiles = 2 if many and 2 * halves * token_tiles <= MOST_TILES else 1
    grid = ceil_div(tiles, row_tiles) * ceil_div(needed, token_tiles)
    return _filled(token_tiles, row_tiles, 1, groups, packing, grid / multiprocessors)


def _filled(
    token_tiles: int, row_tiles: int, teams: int, groups: int, packing: Packing, load: float
) -> GroupMmaTile:
    """The tile of this shape with what its registers allow; `load`: blocks a multiprocessor."""
    warps = warps_for(groups)
    threads, turns = warps * teams * WARP, ceil_div(groups, warps)
    most = max(1, min(math.ceil(load), BUSY_THREADS // threads))
    found = [
        GroupMmaTile(token_tiles, row_tiles, warps, teams, ahead, x_ahead, n)
        for n in range(most, 0, -1)
        for ahead in range(min(turns, MOST_AHEAD), 0, -1)
        for x_ahead in (min(2, turns), 1)
    ]
    fits = [t for t in found if registers(t, packing, groups) <= limit(threads, t.resident)]
    # Two loads on their way, then as many blocks as there are, then more loads.
    tile = max(fits or found[-1:], key=lambda t: (min(t.ahead, 2), t.resident, t.ahead, t.x_ahead))
    if turns > MOST_UNROLLED:
        return replace(tile, ahead=ceil_div(turns, ceil_div(turns, tile.ahead)))
    return tile


def candidates(work: Workload, card: Card) -> list[GroupMmaTile]:
    """Tiles worth measuring, those first that keep the device about as busy as it should be."""
    found = sorted(_variants(work, card), key=lambda pair: pair[0])
    fitting = [tile for _, tile in found if _fits(work, tile)]
    return list(dict.fromkeys(fitting))[:MOST_CANDIDATES]


def _fits(work: Workload, tile: GroupMmaTile) -> bool:
    try:
        checked(work, tile)
    except ValueError:
        return False
    return True


def _variants(work: Workload, card: Card) -> Iterator[tuple[float, GroupMmaTile]]:
    """Tiles of every shape, each under how far the warps of a multiprocessor are from enough."""
    tiles, groups = work.shapes[3][:2]
    packing = GROUP_PACKINGS[work.settings["format"]]
    pairs, turns = ceil_div(work.width, TOKENS), ceil_div(groups, warps_for(groups))
    token_tiles = {min(n, pairs) for n in (1, 2, 3, 4)}
    for n, rows, teams in product(sorted(token_tiles), (1, 2, 4), (1, 2, 4)):
        grid = ceil_div(tiles, rows * teams) * ceil_div(pairs, n)
        load = grid / card.multiprocessors
        base = _filled(n, rows, teams, groups, packing, load)
        distance = abs(math.log(load * base.warps * teams / BUSY_WARPS))
        distance += 0.5 * math.log2(ceil_div(pairs, n))
        yield distance, base
        for ahead, x_ahead in product(range(1, min(turns, 2 * MOST_AHEAD) + 1), (1, 2, turns)):
            for resident in {base.resident, max(1, base.resident - 1), base.resident + 1}:
                if turns <= MOST_UNROLLED or x_ahead <= ahead:
                    moved = abs(ahead - base.ahead) + abs(resident - base.resident)
                    moved += x_ahead != base.x_ahead
                    other = replace(base, ahead=ahead, x_ahead=x_ahead, resident=resident)
                    yield distance + 0.25 * moved, other
