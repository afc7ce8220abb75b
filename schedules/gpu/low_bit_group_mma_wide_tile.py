"""Tiles of the linear with group scales for many activation rows: which fit, which the rule takes,
which are worth measuring, and where the rule takes one at all."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import product

from schedules.gpu.low_bit_group_gemv import warps_for
from schedules.gpu.low_bit_group_mma_warp import OUTPUTS, PARTS, TOKENS
from schedules.gpu.low_bit_mma_tile import RESIDENT_THREADS, limit
from schedules.gpu.low_bit_mma_wide_tile import (
    L2_BYTES_A_CYCLE,
    LEAST_ROWS,
    PRODUCT_CYCLES,
    TURN_LATENCY,
    BlockTile,
    likeliest,
)
from schedules.gpu.packed import GROUP_PACKINGS, K_BLOCK, WORDS, Packing
from schedules.gpu.thread import MAX_THREADS, STATIC_SHARED_BYTES, WARP, ceil_div
from schedules.space import Card
from schedules.workload import Workload

# Of the rule: fewer rows are left to the kernel that splits K.
LEAST_RULED_ROWS = 128
# Sums of a result in a lane: of the parts of a group, and that of the splits of K behind them.
SUMS = PARTS + 1
# Tiles of 16 x 8 of a warp: eight would take 160 sums, and some registers more than there are.
MOST_PAIRS = 6
OTHER_REGISTERS = 56
# Of the rule, of 16 x 8 tiles: warps by rows and by tokens, tiles of a warp by rows and by tokens.
SHAPES = ((4, 2, 2, 3), (2, 4, 2, 3), (2, 2, 2, 3), (4, 2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 1))
# Instructions of a product of four results a lane: itself, four exact shares, four sums, a factor.
PRODUCT_INSTRUCTIONS = 10
# Of one scheduler, for a product: cycles of the kernel that splits K, by what a step of 64 rows
# takes longer than one of 32.
SPLIT_CYCLES = 40
# Of a warp: instructions of a turn besides products, unpacking and loads.
TURN_INSTRUCTIONS = 80


@dataclass(frozen=True)
class GroupWideTile(BlockTile):
    """As `BlockTile`, of packed rows: `stages` are groups of K, codes of both sides."""


def halves(tile: GroupWideTile, packing: Packing) -> int:
    """Tiles of 16 rows that a warp has."""
    return tile.row_tiles * packing.rows // 2


def stage_bytes(tile: GroupWideTile, packing: Packing) -> int:
    """Of a group of K in shared memory: codes of both sides, scales, totals."""
    rows = tile.block_tiles * (WARP * WORDS * 4 + packing.tile * 2)
    return rows + tile.tokens * (K_BLOCK + 8)


def registers(tile: GroupWideTile, packing: Packing) -> int:
    """About what a lane takes."""
    pairs = halves(tile, packing) * tile.token_tiles
    operands = WORDS * halves(tile, packing) + 2 * tile.token_tiles
    return pairs * OUTPUTS * (SUMS + 1) + operands + OTHER_REGISTERS


def problem(tile: GroupWideTile, packing: Packing) -> str:
    """Why a tile fits nowhere; "" if it does."""
    if min(astuple(tile)) < 1 or not 2 <= tile.stages <= 4:
        return "no tile has these numbers"
    if tile.threads > MAX_THREADS or tile.threads * tile.resident > RESIDENT_THREADS:
        return "too many threads"
    if tile.stages * stage_bytes(tile, packing) > STATIC_SHARED_BYTES:
        return "too much for shared memory"
    if halves(tile, packing) * tile.token_tiles > MOST_PAIRS:
        return "too many sums"
    if registers(tile, packing) > limit(tile.threads, tile.resident):
        return "too many registers"
    return ""


def packing_of(work: Workload) -> Packing:
    return GROUP_PACKINGS[work.settings["format"]]


def of_the_rule(packing: Packing) -> list[GroupWideTile]:
    """The tiles that the rule chooses from."""
    tiles = (
        GroupWideTile(rows, tokens, own * 2 // packing.rows, pairs, 3, resident)
        for (rows, tokens, own, pairs), resident in product(SHAPES, (1, 2, 3, 4))
    )
    return [tile for tile in tiles if not problem(tile, packing)]


def choose(work: Workload, card: Card) -> GroupWideTile:
    """The rule's tile: that which promises to be done first."""
    return min(of_the_rule(packing_of(work)), key=lambda tile: _cycles(work, tile, card))


def _cycles(work: Workload, tile: GroupWideTile, card: Card) -> float:
    """About how long the busiest multiprocessor takes for a group of K of all its blocks.

    What bounds a block's turn is the tensor cores, the four issue slots of a cycle, shared memory
    or what comes from the L2; and while a block waits, only others work.
    """
    packing = packing_of(work)
    grid = ceil_div(work.shapes[3][0], tile.block_tiles) * ceil_div(work.width, tile.tokens)
    busiest = ceil_div(grid, card.multiprocessors)
    warps, own = tile.threads // WARP, halves(tile, packing)
    together = warps * min(tile.resident, busiest)
    products = warps * own * tile.token_tiles * PARTS
    unpacking = 2 * WORDS * PARTS * own
    # Loads of a lane: its rows' codes of every part, which 16 bytes hold; of its tokens' 8 bytes.
    loads = PARTS * (tile.row_tiles + tile.token_tiles)
    issued = products * PRODUCT_INSTRUCTIONS + warps * (unpacking + loads + TURN_INSTRUCTIONS)
    read = warps * PARTS * (4 * tile.row_tiles + 2 * tile.token_tiles)
    # Four schedulers, and warps that they may not be able to share evenly.
    uneven = ceil_div(together, 4) / together
    loaded = stage_bytes(tile, packing) / L2_BYTES_A_CYCLE
    turn = max(products * PRODUCT_CYCLES * uneven, issued * uneven, read, loaded)
    return busiest * (turn + TURN_LATENCY * 4 / together)


def candidates(work: Workload, card: Card) -> list[GroupWideTile]:
    """Tiles worth measuring, those first that promise the most."""
    packing = packing_of(work)
    fitting = (tile for tile in _variants() if not problem(tile, packing))
    found = [tile for tile in fitting if tile.tokens < work.width + 64]
    return likeliest(found, lambda tile: _cycles(work, tile, card))


def _variants() -> Iterator[GroupWideTile]:
    shapes = product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 3, 4, 8))
    for shape, stages, resident in product(shapes, (3, 2, 4), (1, 2, 3, 4)):
        tile = GroupWideTile(*shape, stages, resident)
        if 4 <= tile.threads // WARP <= 12:
            yield tile


def serves(work: Workload) -> bool:
    return work.settings["format"] in GROUP_PACKINGS and work.width >= LEAST_ROWS


def pays(work: Workload, card: Card) -> bool:
    """Whether rows are many, and promise to be done sooner than where K is split."""
    if work.width < LEAST_RULED_ROWS:
        return False
    tiles, groups = work.shapes[3][:2]
    products = tiles * packing_of(work).rows // 2 * ceil_div(work.width, TOKENS) * PARTS
    split = products / (4 * card.multiprocessors) * SPLIT_CYCLES
    empty = warps_for(groups) * ceil_div(groups, warps_for(groups)) / groups
    return _cycles(work, choose(work, card), card) * empty < split
