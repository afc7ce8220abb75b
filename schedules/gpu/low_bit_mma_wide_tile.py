"""Tiles of the ternary linear for many activation rows: which fit, which the rule takes, which are
worth measuring."""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import TypeVar

from schedules.gpu.low_bit_mma_tile import RESIDENT_THREADS, limit
from schedules.gpu.low_bit_mma_warp import K_BLOCK, LOADS, STEPS, SUMS, TOKENS, WORDS
from schedules.gpu.thread import MAX_THREADS, STATIC_SHARED_BYTES, WARP, ceil_div
from schedules.space import Card
from schedules.workload import Workload

# Fewer rows are left to kernels that split K, and so are those of the rule.
LEAST_ROWS = 65
LEAST_RULED_ROWS = 256
OTHER_REGISTERS = 40
MOST_SUMS = 128
MOST_CANDIDATES = 80
# Of the rule: warps and tiles of a warp, by rows and by tokens.
SHAPES = ((4, 2, 2, 8), (2, 4, 5, 2), (2, 2, 4, 4), (2, 2, 2, 8), (2, 2, 2, 4), (2, 2, 1, 4))
# Of one scheduler: cycles of an mma. Of a warp: instructions of a turn besides products, unpacking
# and loads, and cycles in which it waits for others and for shared memory. Of a multiprocessor:
# bytes that the L2 gives it in a cycle while all ask.
PRODUCT_CYCLES = 8
TURN_INSTRUCTIONS = 60
TURN_LATENCY = 300
L2_BYTES_A_CYCLE = 24


@dataclass(frozen=True)
class BlockTile:
    """What one block computes: `row_warps` x `token_warps` warps have `row_tiles` tiles of 16 rows
    and `token_tiles` of 8 tokens each.

    stages: blocks of K whose activations have room in shared memory; resident: blocks that a
    multiprocessor must have registers for.
    """

    row_warps: int
    token_warps: int
    row_tiles: int
    token_tiles: int
    stages: int
    resident: int

    @property
    def threads(self) -> int:
        return self.row_warps * self.token_warps * WARP

    @property
    def block_tiles(self) -> int:
        """Row tiles of a block."""
        return self.row_warps * self.row_tiles

    @property
    def tokens(self) -> int:
        """Activation rows of a block."""
        return self.token_warps * self.token_tiles * TOKENS


Tile = TypeVar("Tile", bound=BlockTile)


@dataclass(frozen=True)
class WideTile(BlockTile):
    """As `BlockTile`, of exact sums."""

    @property
    def sums(self) -> int:
        """Accumulators of a lane."""
        return self.row_tiles * self.token_tiles * SUMS


def problem(tile: WideTile) -> str:
    """Why a tile fits nowhere; "" if it does."""
    if min(astuple(tile)) < 1 or tile.stages < 2:
        return "no tile has these numbers"
    if tile.threads > MAX_THREADS or tile.threads * tile.resident > RESIDENT_THREADS:
        return "too many threads"
    shared = tile.stages * tile.tokens * K_BLOCK
    if shared > STATIC_SHARED_BYTES or tile.sums > MOST_SUMS:
        return "too many activations"
    words = (2 * tile.row_tiles + tile.token_tiles) * WORDS
    if tile.sums + words + OTHER_REGISTERS > limit(tile.threads, tile.resident):
        return "too many registers"
    return ""


def choose(work: Workload, card: Card) -> WideTile:
    """The rule's tile: that which promises to be done first."""
    tiles = [WideTile(*shape, 3, resident) for shape in SHAPES for resident in (1, 2, 3)]
    return min(
        (tile for tile in tiles if not problem(tile)), key=lambda tile: _cycles(work, tile, card)
    )


def _cycles(work: Workload, tile: WideTile, card: Card) -> float:
    """About how long the busiest multiprocessor takes for a block of K of all its blocks.

    What bounds a block's turn is the tensor cores, the four issue slots of a cycle, or what comes
    from the L2; and while a block waits, only others work.
    """
    grid = ceil_div(work.shapes[3][0], tile.block_tiles) * ceil_div(work.width, tile.tokens)
    busiest = ceil_div(grid, card.multiprocessors)
    warps = tile.threads // WARP
    together = warps * min(tile.resident, busiest)
    products = tile.block_tiles * tile.tokens // TOKENS * STEPS
    unpacking = 2 * WORDS * STEPS * tile.row_tiles
    issued = products + warps * (unpacking + LOADS * tile.token_tiles + TURN_INSTRUCTIONS)
    loaded = tile.tokens * K_BLOCK + tile.block_tiles * WARP * WORDS * 4
    # Four schedulers, and warps that they may not be able to share evenly.
    uneven = ceil_div(together, 4) / together
    turn = max(products * PRODUCT_CYCLES * uneven, issued * uneven, loaded / L2_BYTES_A_CYCLE)
    return busiest * (turn + TURN_LATENCY * 4 / together)


def candidates(work: Workload, card: Card) -> list[WideTile]:
    """Tiles worth measuring, those first that promise the most."""
    found = [tile for tile in _variants() if not problem(tile) and tile.tokens < work.width + 64]
    return likeliest(found, lambda tile: _cycles(work, tile, card))


def likeliest(tiles: list[Tile], cycles: Callable[[Tile], float]) -> list[Tile]:
    """Those that promise the most, by the cycles that they are expected to take; those of no use by
    what is known come behind."""

    def rank(tile: Tile) -> float:
        expected = cycles(tile)
        fewer = replace(tile, resident=max(1, tile.resident - 1))
        useful = tile.resident == 1 or expected < cycles(fewer)
        return expected * (1 if useful and tile.stages == 3 else 1.06)

    return sorted(tiles, key=rank)[:MOST_CANDIDATES]


def _variants() -> Iterator[WideTile]:
    shapes = product((1, 2, 4, 5, 8), (1, 2, 4), (1, 2, 3, 4, 5, 7), (2, 4, 8))
    for shape, stages, resident in product(shapes, (3, 2, 4), (1, 2, 3)):
        tile = WideTile(*shape, stages, resident)
        if 4 <= tile.threads // WARP <= 16:
            yield tile


def serves(work: Workload) -> bool:
    return work.settings["format"] == "bitnet-ternary" and work.width >= LEAST_ROWS


def fills(work: Workload, card: Card) -> bool:
    """Whether rows are many, and there are blocks for most multiprocessors without splitting K."""
    many = work.shapes[3][0] / 4 * work.width / 128 >= 0.75 * card.multiprocessors
    return many and work.width >= LEAST_RULED_ROWS
