"""Ternary linear on cuda: dp4a over 16-byte words of the packed weights, int32 sums.

A lane holds, of a tile of 16 rows and a block of 128 codes, rows g and g + 8 at k = 32t..32t+31
(lane = 4g + t): one 16-byte load, read against two 16-byte loads of each activation row. K is split
over the warps of a block and summed in shared memory; all of it is exact, so the split is free to
differ from width to width. The layout is that of relax_models/formats.py for "cuda".
"""

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.linear import linear_kernel
from schedules.gpu.thread import (
    WARP,
    ceil_div,
    dp4a,
    let_others_start,
    mul,
    overlaps,
    span,
    wait_for_others,
    warp_sum,
)
from schedules.gpu.thread import add as rounded_sum
from schedules.space import Card, Template
from schedules.workload import Workload, segment_scale

TILE = 16
K_BLOCK = 128
LANE_K = 32
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
    """With `early`, the first weights are on their way before the kernel waits for others."""
    width, columns = work.shapes[-1]
    tiles, blocks = work.shapes[3][:2]
    segments = work.settings["segments"]
    tokens, row_tiles, warps, ahead = tile.tokens, tile.row_tiles, tile.warps, tile.ahead
    threads = warps * WARP
    rounds = ceil_div(blocks, warps * ahead)
    sums = row_tiles * tokens * 2
    outputs = row_tiles * tokens * TILE

    def block_of(warp, turn):
        return warp + turn * warps

    def code_mask(block):
        """Selects a code of every byte, and nothing at all behind the last block."""
        codes = T.uint32(0x03030303)
        if rounds * warps * ahead == blocks:
            return codes
        return T.Select(block < blocks, codes, T.uint32(0))

    def four_codes(words, i, step, mask):
        return T.reinterpret(
            "int32", T.bitwise_and(T.shift_right(words[i], T.Cast("uint32", 2 * step)), mask)
        )

    def activations(q, token, block, lane, half):
        row, k = T.min(token, width - 1), T.min(block, blocks - 1) * K_BLOCK
        at = k + lane % 4 * LANE_K + half * 16
        return T.reinterpret("int32x4", q[row, span(at, 16)])

    @T.macro
    def load(weight, words, first_tile, warp, lane, turn):
        for i in T.unroll(ahead):
            for r in T.unroll(row_tiles):
                words[span((i * row_tiles + r) * 4, 4)] = weight[
                    T.min(first_tile + r, tiles - 1),
                    T.min(block_of(warp, turn * ahead + i), blocks - 1),
                    lane,
                    span(0, 4),
                ]

    @T.macro
    def multiply(q, words, acc, token, block, lane, first):
        codes = T.sblock_alloc_buffer((row_tiles * 16,), "int32", scope="local")
        x = T.sblock_alloc_buffer((8,), "int32", scope="local")
        # Word 2 * khalf + rowhalf, step s: four codes of row 8 * rowhalf + g, k = 8s + 4 * khalf.
        for r in T.unroll(row_tiles):
            for word in T.unroll(4):
                for step in T.unroll(4):
                    codes[(r * 2 + word % 2) * 8 + step * 2 + word // 2] = four_codes(
                        words, first + r * 4 + word, step, code_mask(block)
                    )
        for i in T.unroll(tokens):
            for half in T.unroll(2):
                x[span(half * 4, 4)] = activations(q, token + i, block, lane, half)
            for row in T.unroll(row_tiles * 2):
                for k in T.unroll(8):
                    acc[row * tokens + i] = dp4a(codes[row * 8 + k], x[k], acc[row * tokens + i])

    @T.macro
    def accumulate(q, weight, partial, first_tile, token, warp, lane):
        words = T.sblock_alloc_buffer((ahead * row_tiles * 4,), "uint32", scope="local")
        acc = T.sblock_alloc_buffer((sums,), "int32", scope="local")
        for i in T.unroll(sums):
            acc[i] = 0
        load(weight, words, first_tile, warp, lane, 0)
        if early:
            wait_for_others()
        for turn in range(rounds):
            if turn > 0:
                load(weight, words, first_tile, warp, lane, turn)
            for i in T.unroll(ahead):
                multiply(
                    q,
                    words,
                    acc,
                    token,
                    block_of(warp, turn * ahead + i),
                    lane,
                    i * row_tiles * 4,
                )
        for i in T.unroll(sums):
            warp_sum(acc, i, 4)
        if lane % 4 == 0:
            for i in T.unroll(sums):
                partial[warp * outputs + i * 8 + lane // 4] = acc[i]

    def result(exact, scale, weight_scale, residual, token, n):
        factor = mul(scale[token], segment_scale(weight_scale, n, segments))
        value = mul(T.Cast("float32", exact), factor)
        return value if residual is None else rounded_sum(value, residual[token, n])

    @T.macro
    def store(partial, at, scale, total, weight_scale, residual, y, token, n):
        dot = T.sblock_alloc_buffer((1,), "int32", scope="local")
        if (at < outputs) and (token < width) and (n < columns):
            dot[0] = -total[token]
            for i in T.unroll(warps):
                dot[0] = dot[0] + partial[i * outputs + at]
            y[token, n] = result(dot[0], scale, weight_scale, residual, token, n)

    @T.macro
    def one_block(q, scale, total, weight, weight_scale, residual, y, first_tile, token, thread):
        partial = T.sblock_alloc_buffer((warps * outputs,), "int32", scope="shared")
        if early:
            let_others_start()
        accumulate(q, weight, partial, first_tile, token, thread // WARP, thread % WARP)
        T.tvm_storage_sync("shared")
        # Sum number at // 8 is that of `accumulate`: eight rows of one activation row.
        for turn in T.unroll(ceil_div(outputs, threads)):
            store(
                partial,
                turn * threads + thread,
                scale,
                total,
                weight_scale,
                residual,
                y,
                token + (turn * threads + thread) // 8 % tokens,
                first_tile * TILE + (turn * threads + thread) // (8 * tokens) * 8 + thread % 8,
            )

    return linear_kernel(work, threads, row_tiles, tokens, one_block)


TEMPLATE = Template(
    name="low_bit_gemv",
    tile=LinearTile,
    serves=serves,
    choose=choose,
    candidates=lambda work, card: [choose(work, card)],
    make=lambda work, tile, target: _template(work, tile, overlaps(target)),
)
