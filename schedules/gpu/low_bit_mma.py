"""Ternary linear on cuda for three rows and more: tensor cores, int32 sums.

A warp holds tiles of 16 rows and of 8 tokens (schedules/gpu/low_bit_mma_warp.py). K is split over
the warps of a block and summed in shared memory; all of it is exact, so the split is free to differ
from width to width, and a row's result is that of schedules/gpu/low_bit_gemv.py, bit for bit.
"""

import math

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.linear import linear_kernel
from schedules.gpu.low_bit_mma_warp import (
    MOST_UNROLLED,
    ROWS,
    STEPS,
    SUMS,
    TOKENS,
    WORDS,
    MmaTile,
    accumulator,
    lane_sum,
)
from schedules.gpu.thread import STATIC_SHARED_BYTES, WARP, add, ceil_div, mul
from schedules.space import Card, Template
from schedules.workload import Workload, segment_scale

# From so many rows on: below, dp4a computes no rows that nobody asked for.
LEAST_ROWS = 3
MOST_TOKEN_TILES = 4
MOST_WARPS = 20
LEAST_WARPS = 4
# Warps that a multiprocessor should have, of little and of much work each.
BUSY_WARPS = 16
# Registers of a lane that words and sums may take: the rest is for activations and addresses.
HELD_REGISTERS = 84
MOST_LOADS = 12
# Results of one pair of tiles, and bytes of the sums of one warp.
RESULTS = ROWS * TOKENS
PART_BYTES = RESULTS * 4


def choose_tile(width: int, tiles: int, blocks: int, multiprocessors: int) -> MmaTile:
    """The tile for `width` activation rows and `tiles` x `blocks` tiles of 16 rows x 128 codes."""
    pairs = ceil_div(width, TOKENS)
    groups = ceil_div(pairs, MOST_TOKEN_TILES)
    token_tiles = ceil_div(pairs, groups)
    row_tiles = _row_tiles(token_tiles, tiles * groups, multiprocessors)
    warps = _warps(blocks, ceil_div(tiles, row_tiles) * groups, row_tiles, multiprocessors)
    turns = ceil_div(blocks, warps)
    results = row_tiles * token_tiles
    chains = STEPS if results <= (4 if turns == 1 else 2) else 1
    free = HELD_REGISTERS - results * chains * SUMS
    ahead = max(1, min(MOST_LOADS, free // WORDS) // row_tiles)
    if turns > MOST_UNROLLED:
        ahead = ceil_div(turns, ceil_div(turns, ahead))
    return MmaTile(warps, row_tiles, token_tiles, min(ahead, turns), chains)


def _row_tiles(token_tiles: int, tiles: int, multiprocessors: int) -> int:
    """More of them share the loads of the activations, as long as there are blocks for all."""
    enough = multiprocessors * (0.9 if token_tiles == 1 else 0.6)
    wide = 2 if token_tiles == 1 else 4
    return next(r for r in (4, 2, 1) if r == 1 or (r <= wide and tiles / r >= enough))


def _warps(blocks: int, grid: int, row_tiles: int, multiprocessors: int) -> int:
    """Ways to split `blocks`: one that divides them where it keeps the device as busy."""
    share = 2 if row_tiles == 4 else 1
    wanted = BUSY_WARPS * multiprocessors / (grid * share)
    most = MOST_WARPS // share
    wanted = min(most, max(LEAST_WARPS, wanted))
    divisors = [n for n in range(1, min(blocks, most) + 1) if blocks % n == 0]
    best = min(divisors, key=lambda n: abs(math.log(n / wanted)))
    if best * 2 > wanted or best == blocks:
        return best
    return ceil_div(blocks, ceil_div(blocks, int(wanted)))


def serves(work: Workload, card: Card) -> bool:
    """Whether the tensor cores pay: ternary weights and a few rows."""
    return work.settings["format"] == "bitnet-ternary" and work.width >= LEAST_ROWS


def choose(work: Workload, card: Card) -> MmaTile:
    """The rule's tile."""
    tiles, blocks = work.shapes[3][:2]
    return choose_tile(work.width, tiles, blocks, card.multiprocessors)


def _summed_at_once(tile: MmaTile) -> int:
    """Token tiles whose partial sums find room in shared memory together."""
    room = STATIC_SHARED_BYTES // (PART_BYTES * tile.row_tiles * tile.warps)
    return max(n for n in range(1, max(room, 1) + 1) if tile.token_tiles % n == 0)


def _template(work: Workload, tile: MmaTile) -> tirx.PrimFunc:
    width, columns = work.shapes[-1]
    tiles, blocks = work.shapes[3][:2]
    segments = work.settings["segments"]
    warps, row_tiles, token_tiles = tile.warps, tile.row_tiles, tile.token_tiles
    threads = warps * WARP
    at_once = _summed_at_once(tile)
    outputs = row_tiles * at_once * RESULTS
    accumulate = accumulator(tile, (width, tiles, blocks))

    # Sum number at: tile by tile (rows outside, tokens inside), result by result, lane by lane.
    def token_of(at):
        return at // RESULTS % at_once * TOKENS + at % 4 * 2 + at // WARP % 2

    def row_of(at):
        return at // (RESULTS * at_once) * ROWS + at % WARP // 4 + at // (2 * WARP) % 2 * 8

    def result(exact, scale, weight_scale, residual, token, n):
        factor = mul(scale[token], segment_scale(weight_scale, n, segments))
        value = mul(T.Cast("float32", exact), factor)
        return value if residual is None else add(value, residual[token, n])

    @T.macro
    def share(partial, acc, first, warp, lane):
        """A warp's sums of `at_once` token tiles, where `store` reads them."""
        for r in T.unroll(row_tiles):
            for n in T.unroll(at_once):
                for e in T.unroll(SUMS):
                    partial[(((r * at_once + n) * warps + warp) * SUMS + e) * WARP + lane] = (
                        lane_sum(tile, acc, r, first + n, e)
                    )

    @T.macro
    def store(partial, at, scale, total, weight_scale, residual, y, token, n):
        dot = T.sblock_alloc_buffer((1,), "int32", scope="local")
        if (at < outputs) and (token < width) and (n < columns):
            dot[0] = -total[token]
            for i in T.unroll(warps):
                dot[0] = dot[0] + partial[(at // RESULTS * warps + i) * RESULTS + at % RESULTS]
            y[token, n] = result(dot[0], scale, weight_scale, residual, token, n)

    @T.macro
    def one_block(q, scale, total, weight, weight_scale, residual, y, first_tile, token, thread):
        partial = T.sblock_alloc_buffer((warps * outputs,), "int32", scope="shared")
        acc = T.sblock_alloc_buffer((tile.sums,), "uint32", scope="local")
        accumulate(q, weight, acc, first_tile, token, thread // WARP, thread % WARP)
        for part in T.unroll(token_tiles // at_once):
            if part > 0:
                T.tvm_storage_sync("shared")
            share(partial, acc, part * at_once, thread // WARP, thread % WARP)
            T.tvm_storage_sync("shared")
            for turn in T.unroll(ceil_div(outputs, threads)):
                store(
                    partial,
                    turn * threads + thread,
                    scale,
                    total,
                    weight_scale,
                    residual,
                    y,
                    token + part * at_once * TOKENS + token_of(turn * threads + thread),
                    first_tile * ROWS + row_of(turn * threads + thread),
                )

    return linear_kernel(work, threads, row_tiles, token_tiles * TOKENS, one_block)


TEMPLATE = Template(
    name="low_bit_mma",
    tile=MmaTile,
    serves=serves,
    choose=choose,
    candidates=lambda work, card: [choose(work, card)],
    make=lambda work, tile, target: _template(work, tile),
)
