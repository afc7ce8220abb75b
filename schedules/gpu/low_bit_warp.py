"""A warp's part of a ternary linear on cuda: its blocks of K unpacked and multiplied by dp4a.

A lane holds, of a tile of 16 rows and a block of 128 codes, rows g and g + 8 at k = 32t..32t+31
(lane = 4g + t): one 16-byte load, read against two 16-byte loads of each activation row. Warp w of
the ways that K is split goes through the blocks w, w + ways, …
"""

from typing import Any

from tvm.script import tirx as T

from schedules.gpu.linear import WarpPart
from schedules.gpu.thread import ceil_div, dp4a, mul, span
from schedules.workload import segment_scale

TILE = 16
TILE_ROWS = 2
K_BLOCK = 128
LANE_K = 32
WORDS = 4


def warp_part(tile: Any, shape: tuple[int, int, int], tile_of) -> WarpPart:
    """The part of a warp in a block of `tile` (tokens, row_tiles, warps, ahead); `shape` is (width,
    tiles, blocks), `tile_of(first, r)` the r-th tile of the warp."""
    width, tiles, blocks = shape
    tokens, row_tiles, warps, ahead = tile.tokens, tile.row_tiles, tile.warps, tile.ahead
    rounds = ceil_div(blocks, warps * ahead)

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
                words[span((i * row_tiles + r) * WORDS, WORDS)] = weight[
                    T.min(tile_of(first_tile, r), tiles - 1),
                    T.min(block_of(warp, turn * ahead + i), blocks - 1),
                    lane,
                    span(0, WORDS),
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
    def start(weight, weight_scale, words, scales, first_tile, warp, lane):
        load(weight, words, first_tile, warp, lane, 0)

    @T.macro
    def finish(
        q, scale, total, weight, weight_scale, words, scales, acc, first_tile, token, warp, lane
    ):
        for i in T.unroll(row_tiles * 2 * tokens):
            acc[i] = 0
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

    return WarpPart(
        rows=row_tiles * TILE_ROWS,
        words=ahead * row_tiles * WORDS,
        scales=1,
        dtype="int32",
        start=start,
        finish=finish,
    )


def joiner(warps: int, stride: int, segments: list[int]):
    """A macro that leaves in `value` the result of row n for a token from the warps' sums, which
    stand `stride` apart from `at` on."""

    def scaled(exact, scale, weight_scale, token, n):
        factor = mul(scale[token], segment_scale(weight_scale, n, segments))
        return mul(T.Cast("float32", exact), factor)

    @T.macro
    def join(partial, at, scale, total, weight_scale, value, token, n):
        dot = T.sblock_alloc_buffer((1,), "int32", scope="local")
        dot[0] = -total[token]
        for i in T.unroll(warps):
            dot[0] = dot[0] + partial[i * stride + at]
        value[0] = scaled(dot[0], scale, weight_scale, token, n)

    return join
