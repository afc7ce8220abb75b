"""Tiles of the head over the 8-bit table on cuda: which fit, and which the rule takes."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import product

from schedules.gpu.low_bit_mma_tile import limit
from schedules.gpu.thread import STATIC_SHARED_BYTES, WARP, ceil_div

K_BLOCK = 128
ROWS = 16
TOKENS = 8
WORDS = 4
STEPS = 4
# A lane's sums of a pair of tiles: rows g and g + 8, activation rows 2t and 2t + 1.
SUMS = 4
# An activation is two int8.
TERMS = 2
MOST_TOKEN_TILES = 8
MOST_WARPS = 16
# Registers of a lane for addresses and the operands of one pair of tiles.
OTHER_REGISTERS = 40


@dataclass(frozen=True)
class CodeTile:
    """What a block computes: `warps` times `row_tiles` tiles of 16 rows of the table, for
    `token_tiles` of 8 activation rows.

    ahead: steps of 32 columns whose 16 bytes a lane has under way for each row tile: 2, 4 or 8;
    stages: blocks of 128 columns whose activations have room in shared memory, 0 where each warp
    loads its own. With stages ahead is 2 or 4.
    """

    warps: int
    row_tiles: int
    token_tiles: int
    ahead: int
    stages: int

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def tokens(self) -> int:
        """Activation rows of a block."""
        return self.token_tiles * TOKENS

    @property
    def sums(self) -> int:
        """Accumulators of a lane."""
        return self.row_tiles * self.token_tiles * SUMS

    @property
    def shared_bytes(self) -> int:
        """Of the activations of a block."""
        return self.stages * TERMS * self.tokens * K_BLOCK


def registers(tile: CodeTile) -> int:
    """About what a lane takes."""
    return tile.sums + tile.ahead * tile.row_tiles * WORDS + OTHER_REGISTERS


def problem(tile: CodeTile) -> str:
    """Why a tile fits nowhere; "" if it does."""
    whole = min(astuple(tile)[:-1]) >= 1 and tile.stages >= 0 and tile.stages != 1
    if not whole or tile.ahead not in ((2, STEPS) if tile.stages else (2, STEPS, 2 * STEPS)):
        return "no tile has these numbers"
    if tile.warps > MOST_WARPS or tile.token_tiles > MOST_TOKEN_TILES:
        return "too many threads or tokens"
    if tile.shared_bytes > STATIC_SHARED_BYTES:
        return "too many activations"
    if registers(tile) > limit(tile.threads, 1):
        return "too many registers"
    return ""


def choose_tile(width: int) -> CodeTile:
    """The tile for `width` activation rows; up to 64 of them see the table together."""
    pairs = ceil_div(width, TOKENS)
    token_tiles = ceil_div(pairs, ceil_div(pairs, MOST_TOKEN_TILES))
    # Tiles of the table share the loads of activations. What was fastest on an H200, where with two
    # tiles of tokens more loads under way were worth more than sharing.
    if token_tiles == 2:
        return CodeTile(4, 2, token_tiles, 8, 0)
    if token_tiles <= 4:
        return CodeTile(4, 4, token_tiles, 4, 0)
    # Four tiles of the table would share more, but leave no registers for loads under way.
    return CodeTile(12, 2, token_tiles, 4, 3)


def candidates(width: int) -> list[CodeTile]:
    """Tiles worth measuring for `width` activation rows: no share of them has an idle tile."""
    return [tile for tile in _variants(width) if not problem(tile)]


def _variants(width: int) -> Iterator[CodeTile]:
    pairs = ceil_div(width, TOKENS)
    least = ceil_div(pairs, MOST_TOKEN_TILES)
    # The table once, or from the cache again for the other half of the rows.
    shares = sorted({ceil_div(pairs, n) for n in (least, 2 * least)}, reverse=True)
    shapes = product((4, 8, 12, 16), (1, 2, 3, 4), shares)
    for (warps, row_tiles, token_tiles), ahead in product(shapes, (2, 4, 8)):
        yield CodeTile(warps, row_tiles, token_tiles, ahead, 0)
        # What a block shares must be worth its barriers.
        if token_tiles > 1 and warps > STEPS:
            yield CodeTile(warps, row_tiles, token_tiles, ahead, 3)
