"""Tiles of the linears on cuda that multiply by dp4a: which fit, and which are worth measuring."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from schedules.gpu import low_bit_gemv, low_bit_group_gemv
from schedules.gpu.low_bit_gemv import TILE, LinearTile
from schedules.gpu.low_bit_group_gemv import warps_for
from schedules.gpu.low_bit_group_warp import GroupTile
from schedules.gpu.low_bit_mma_tile import limit
from schedules.gpu.packed import GROUP_PACKINGS, STEPS, WORDS
from schedules.gpu.thread import MAX_THREADS, STATIC_SHARED_BYTES, WARP, ceil_div
from schedules.space import Card, Template
from schedules.workload import Workload

# From more rows on dp4a has long run out of issue slots, and nothing but the rule's tile is tried.
MOST_ROWS = 4
MOST_AHEAD = 8
MOST_WARPS = 27
# Warps that a multiprocessor should have.
BUSY_WARPS = 16
# Registers of a lane for addresses, activations and results.
OTHER_REGISTERS = 36
MOST_CANDIDATES = 64


def checked_linear(work: Workload, tile: LinearTile) -> None:
    """Raise ValueError for a tile that does not fit a workload of ternary weights."""
    _check(work, tile, rows=2)


def checked_group(work: Workload, tile: GroupTile) -> None:
    """Raise ValueError for a tile that does not fit a workload of weights with groups."""
    groups = work.shapes[3][1]
    if tile.warps != warps_for(groups):
        raise ValueError(f"the sum over {groups} groups takes {warps_for(groups)} warps: {tile}")
    _check(work, tile, GROUP_PACKINGS[work.settings["format"]].rows)


def _check(work: Workload, tile: LinearTile | GroupTile, rows: int) -> None:
    """`rows`: of a row tile, those that a lane holds."""
    blocks, threads = work.shapes[3][1], tile.warps * WARP
    least = min(tile.tokens, tile.row_tiles, tile.warps, tile.ahead)
    if least < 1 or tile.warps > blocks:
        raise ValueError(f"no tile of these numbers, where K has {blocks} blocks: {tile}")
    if tile.ahead > ceil_div(blocks, tile.warps) or threads > MAX_THREADS:
        raise ValueError(f"more loads or threads than there are: {tile}")
    sums = tile.row_tiles * rows * tile.tokens
    held = tile.row_tiles * (rows * STEPS + tile.ahead * (WORDS + rows))
    if sums * 8 * tile.warps * 4 > STATIC_SHARED_BYTES:
        raise ValueError(f"too many sums: {tile}")
    if sums + held + OTHER_REGISTERS > limit(threads, 1):
        raise ValueError(f"too many registers: {tile}")


def linear_candidates(work: Workload, card: Card) -> list[LinearTile]:
    """Tiles of ternary weights worth measuring, the rule's first."""
    blocks, found = work.shapes[3][1], [low_bit_gemv.choose(work, card)]
    splits = sorted({ceil_div(blocks, turns) for turns in range(1, blocks + 1)})
    shapes = product(_token_counts(work), (1, 2), splits)
    for distance, tokens, row_tiles, warps in sorted(_busy(shapes, work, card, TILE)):
        if distance < 1.5:
            for ahead in _loads(ceil_div(blocks, warps)):
                found.append(
                    replace(found[0], tokens=tokens, row_tiles=row_tiles, warps=warps, ahead=ahead)
                )
    return _kept(found, lambda tile: checked_linear(work, tile))


def group_candidates(work: Workload, card: Card) -> list[GroupTile]:
    """Tiles of weights with groups worth measuring, the rule's first."""
    groups, found = work.shapes[3][1], [low_bit_group_gemv.choose(work, card)]
    warps = warps_for(groups)
    for tokens, row_tiles in product(_token_counts(work), (1, 2, 4)):
        for ahead in range(1, min(ceil_div(groups, warps), MOST_AHEAD) + 1):
            found.append(replace(found[0], tokens=tokens, row_tiles=row_tiles, ahead=ahead))
    return _kept(found, lambda tile: checked_group(work, tile))


def _token_counts(work: Workload) -> list[int]:
    """Activation rows of a block: an even share of all."""
    width = work.width
    if width > MOST_ROWS:
        return []
    return sorted({ceil_div(width, parts) for parts in range(1, width + 1)}, reverse=True)


def _busy(
    shapes: Iterable[tuple[int, int, int]], work: Workload, card: Card, rows: int
) -> Iterator[tuple[float, int, int, int]]:
    """Shapes behind how far the warps of a multiprocessor are from enough."""
    tiles = work.shapes[3][0]
    for tokens, row_tiles, warps in shapes:
        grid = ceil_div(tiles, row_tiles) * ceil_div(work.width, tokens)
        distance = abs(math.log(grid * warps / (card.multiprocessors * BUSY_WARPS)))
        if warps <= MOST_WARPS:
            yield distance, tokens, row_tiles, warps


def _loads(turns: int) -> list[int]:
    """Loads ahead of a warp with `turns` blocks: all, or parts of about the same size."""
    return sorted({ceil_div(turns, rounds) for rounds in (1, 2, 3)} & set(range(1, MOST_AHEAD + 1)))


def _kept(found: list[Any], check: Callable[[Any], None]) -> list[Any]:
    """Those that fit, each once."""
    kept = []
    for tile in dict.fromkeys(found):
        try:
            check(tile)
        except ValueError:
            continue
        kept.append(tile)
    return kept[:MOST_CANDIDATES]


def _with_candidates(template: Template, candidates, check) -> Template:
    def make(work: Workload, tile: Any, target: Any) -> Any:
        check(work, tile)
        return template.make(work, tile, target)

    return replace(template, candidates=candidates, make=make)


TEMPLATE = _with_candidates(low_bit_gemv.TEMPLATE, linear_candidates, checked_linear)
GROUP_TEMPLATE = _with_candidates(low_bit_group_gemv.TEMPLATE, group_candidates, checked_group)
