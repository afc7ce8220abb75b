"""Tiles of the ternary linear on cuda's tensor cores: which fit, which the rule takes, which are
worth measuring."""

import math
from collections.abc import Iterator
from dataclasses import astuple, replace
from itertools import product

from schedules.gpu.low_bit_mma_warp import (
    LOADS,
    MOST_UNROLLED,
    ROWS,
    STEPS,
    TOKENS,
    WORDS,
    MmaTile,
)
from schedules.gpu.thread import MAX_THREADS, STATIC_SHARED_BYTES, WARP, ceil_div
from schedules.space import Card
from schedules.workload import Workload

MOST_TOKEN_TILES = 4
MOST_WARPS = 20
LEAST_WARPS = 4
# Warps that a multiprocessor should have, of little and of much work each.
BUSY_WARPS = 16
# Threads that every multiprocessor holds, and the registers of one.
RESIDENT_THREADS = 1536
REGISTERS = 65536
MOST_REGISTERS = 255
# Registers of a lane for addresses, the operands of an mma and the results.
OTHER_REGISTERS = 28
MOST_LOADS = 12
# Results of one pair of tiles, and bytes of the sums of one warp.
RESULTS = ROWS * TOKENS
PART_BYTES = RESULTS * 4
# More pairs of tiles than this leave a lane no registers.
MOST_PAIRS = 16
MOST_CANDIDATES = 96


def summed_at_once(tile: MmaTile) -> int:
    """Token tiles whose partial sums find room in shared memory together; 0 if none does."""
    room = STATIC_SHARED_BYTES // (PART_BYTES * tile.block_tiles * tile.warps)
    return max((n for n in range(1, room + 1) if tile.token_tiles % n == 0), default=0)


def registers(tile: MmaTile, blocks: int) -> int:
    """About what a lane takes, where K has `blocks` blocks."""
    turns, pairs = ceil_div(blocks, tile.warps), tile.row_tiles * tile.token_tiles
    x_loads = min(tile.x_ahead, LOADS * turns)
    words = tile.ahead * tile.row_tiles * WORDS + x_loads * tile.token_tiles * WORDS
    # What ptxas loads early, or computes early for a later turn.
    extra = min(pairs, MOST_PAIRS // 2) * min(turns, 2)
    return tile.sums + words + extra + OTHER_REGISTERS


def limit(threads: int, resident: int) -> int:
    """Registers of a lane, where a multiprocessor has to have `resident` blocks."""
    # Registers are given to four warps at a time.
    warps = ceil_div(threads * resident, 4 * WARP) * 4
    return min(MOST_REGISTERS, REGISTERS // (warps * WARP) // 8 * 8)


def checked(work: Workload, tile: MmaTile) -> None:
    """Raise ValueError for a tile that does not fit the workload."""
    if found := problem(tile, work.shapes[3][1]):
        raise ValueError(f"{found}: {tile}")


def problem(tile: MmaTile, blocks: int) -> str:
    """Why a tile does not fit, where K has `blocks` blocks; "" if it does."""
    if min(astuple(tile)) < 1 or tile.chains not in (1, STEPS):
        return "no tile has these numbers"
    turns, threads = ceil_div(blocks, tile.warps), tile.warps * tile.teams * WARP
    if tile.warps > blocks or tile.ahead > turns:
        return f"K has but {blocks} blocks"
    if tile.x_ahead > 1 and tile.x_ahead % LOADS:
        return "activations are loaded by halves of a block or by blocks"
    if threads > MAX_THREADS or threads * tile.resident > RESIDENT_THREADS:
        return "too many threads"
    if tile.row_tiles * tile.token_tiles > MOST_PAIRS or not summed_at_once(tile):
        return "too many sums"
    if registers(tile, blocks) > limit(threads, tile.resident):
        return "too many registers"
    return ""


def choose(work: Workload, card: Card) -> MmaTile:
    """The rule's tile."""
    tiles, blocks = work.shapes[3][:2]
    return choose_tile(work.width, tiles, blocks, card.multiprocessors)


def choose_tile(width: int, tiles: int, blocks: int, multiprocessors: int) -> MmaTile:
    """The tile for `width` activation rows and `tiles` x `blocks` tiles of 16 rows x 128 codes."""
    pairs = ceil_div(width, TOKENS)
    groups = ceil_div(pairs, MOST_TOKEN_TILES)
    token_tiles = ceil_div(pairs, groups)
    row_tiles = _row_tiles(token_tiles, tiles * groups, multiprocessors)
    grid = ceil_div(tiles, row_tiles) * groups
    for warps in _splits(blocks, grid, row_tiles, multiprocessors):
        tile = _filled(warps, 1, row_tiles, token_tiles, blocks, grid / multiprocessors)
        if not problem(tile, blocks):
            return tile
    raise ValueError(f"no tile for {width} rows and {blocks} blocks of K")


def _row_tiles(token_tiles: int, tiles: int, multiprocessors: int) -> int:
    """More of them share the loads of the activations, as long as there are blocks for all."""
    enough = multiprocessors * (0.9 if token_tiles == 1 else 0.6)
    wide = 2 if token_tiles == 1 else 4
    return next(r for r in (4, 2, 1) if r == 1 or (r <= wide and tiles / r >= enough))


def _splits(blocks: int, grid: int, row_tiles: int, multiprocessors: int) -> list[int]:
    """Ways to split `blocks`: first one that divides them where it keeps the device as busy, then
    fewer, for tiles that leave no registers for as many."""
    share = 2 if row_tiles == 4 else 1
    wanted = BUSY_WARPS * multiprocessors / (grid * share)
    most = MOST_WARPS // share
    wanted = min(most, max(LEAST_WARPS, wanted))
    divisors = [n for n in range(1, min(blocks, most) + 1) if blocks % n == 0]
    best = min(divisors, key=lambda n: abs(math.log(n / wanted)))
    if best * 2 <= wanted and best != blocks:
        best = ceil_div(blocks, ceil_div(blocks, int(wanted)))
    return [best, *(n for n in reversed(divisors) if n < best)]


def _filled(
    warps: int, teams: int, row_tiles: int, token_tiles: int, blocks: int, load: float
) -> MmaTile:
    """The tile of this shape with what its registers allow; `load`: blocks a multiprocessor."""
    turns, threads = ceil_div(blocks, warps), warps * teams * WARP
    few = row_tiles * token_tiles <= (4 if turns == 1 else 2)
    many = row_tiles * token_tiles > MOST_PAIRS // 2
    most = max(1, min(math.ceil(load), RESIDENT_THREADS // threads))
    found = [
        _with_loads(MmaTile(warps, teams, row_tiles, token_tiles, 1, x_ahead, chains, n), blocks)
        for n in range(most, 0, -1)
        for chains, x_ahead in product((STEPS, 1) if few else (1,), (1,) if many else (LOADS, 1))
    ]
    fitting = [t for t in found if registers(t, blocks) <= limit(threads, t.resident)] or found[-1:]
    # As many blocks as there are; then all loads on their way; then no shifts.
    return max(fitting, key=lambda t: (t.resident, t.x_ahead, t.ahead, t.chains))


def _with_loads(tile: MmaTile, blocks: int) -> MmaTile:
    """The tile with as many weights on their way as it has registers for."""
    turns, threads = ceil_div(blocks, tile.warps), tile.warps * tile.teams * WARP
    free = limit(threads, tile.resident) - registers(tile, blocks)
    most = min(turns, max(1, MOST_LOADS // tile.row_tiles))
    ahead = max(1, min(most, 1 + free // (tile.row_tiles * WORDS)))
    if turns > MOST_UNROLLED:
        ahead = ceil_div(turns, ceil_div(turns, ahead))
    return replace(tile, ahead=ahead)


def candidates(work: Workload, card: Card) -> list[MmaTile]:
    """Tiles worth measuring, those first that keep the device about as busy as the rule's."""
    found = sorted(_variants(work, card), key=lambda pair: pair[0])
    fitting = [tile for _, tile in found if not problem(tile, work.shapes[3][1])]
    return list(dict.fromkeys(fitting))[:MOST_CANDIDATES]


def _variants(work: Workload, card: Card) -> Iterator[tuple[float, MmaTile]]:
    """Tiles of every shape, each under how far the warps of a multiprocessor are from enough."""
    tiles, blocks = work.shapes[3][:2]
    pairs = ceil_div(work.width, TOKENS)
    token_tiles = {ceil_div(pairs, parts) for parts in (1, 2, 4) if pairs >= parts}
    token_tiles = {n for n in token_tiles if n <= 2 * MOST_TOKEN_TILES} or {MOST_TOKEN_TILES}
    splits = {ceil_div(blocks, turns) for turns in range(1, 2 * MOST_UNROLLED + 1)}
    for n, rows, warps, teams in product(token_tiles, (1, 2, 4), splits, (1, 2, 4)):
        grid = ceil_div(tiles, rows * teams) * ceil_div(pairs, n)
        busy = grid * warps * teams / card.multiprocessors
        if warps * teams > 28 or (teams > 1 and warps > 10) or not 4 <= busy <= 64:
            continue
        # Blocks that share weights find them in the L2, which takes time all the same.
        distance = abs(math.log(busy / BUSY_WARPS)) + 0.5 * math.log2(ceil_div(pairs, n))
        base = _filled(warps, teams, rows, n, blocks, grid / card.multiprocessors)
        yield distance, base
        yield distance + 0.2, replace(base, x_ahead=LOADS * ceil_div(blocks, warps))
        for fewer in range(1, base.resident):
            other = _filled(warps, teams, rows, n, blocks, fewer)
            if other.ahead > base.ahead:
                yield distance + 0.2, other
                break
        if base.ahead > 2:
            yield distance + 0.4, replace(base, ahead=base.ahead // 2)
        yield distance + 0.4, replace(base, resident=base.resident + 1)
