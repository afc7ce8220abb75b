"""A warp's part of a linear with group scales on cuda: its groups unpacked, multiplied, scaled."""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from schedules.gpu.linear import WarpPart
from schedules.gpu.packed import K_BLOCK, LANE_K, STEPS, WORDS, Packing
from schedules.gpu.thread import add, ceil_div, dp4a, fma, mul, rolled, span

# An integer of up to 22 bits added to these bits of a float is that float plus the integer.
INTEGER_BITS = 0x4B400000
INTEGER_ZERO = 12582912.0


@dataclass(frozen=True)
class GroupTile:
    """What one block computes: `row_tiles` tiles of rows for `tokens` activation rows.

    warps: ways K is split; ahead: 16-byte weight loads a lane has in flight for each tile.
    """

    tokens: int
    row_tiles: int
    warps: int
    ahead: int


def warp_part(packing: Packing, tile: Any, shape: tuple[int, int, int], tile_of) -> WarpPart:
    """The part of a warp in a block of `tile` (tokens, row_tiles, warps, ahead); `shape` is (width,
    tiles, groups), `tile_of(first, r)` the r-th tile of the warp."""
    width, tiles, groups = shape
    tokens, row_tiles, warps, ahead = tile.tokens, tile.row_tiles, tile.warps, tile.ahead
    rows = row_tiles * packing.rows
    rounds = ceil_div(groups, warps * ahead)

    def group_of(warp, turn):
        return warp + turn * warps

    def exists(group):
        return True if rounds * warps * ahead == groups else group < groups

    def activations(q, token, group, lane, half):
        at = group * K_BLOCK + lane % 4 * LANE_K + half * 16
        return T.reinterpret("int32x4", q[T.min(token, width - 1), span(at, 16)])

    def nothing_yet(total, token, group, lane):
        """The bits of the lane's share before its first product."""
        rest = T.Select(lane % 4 == 0, total[T.min(token, width - 1), group], 0)
        return T.int32(INTEGER_BITS) - rest

    def share(bits):
        return add(T.reinterpret("float32", bits), T.float32(-INTEGER_ZERO))

    @T.macro
    def load(weight, weight_scale, words, scales, first_tile, group, lane, i):
        for r in T.unroll(row_tiles):
            words[span((i * row_tiles + r) * WORDS, WORDS)] = weight[
                T.min(tile_of(first_tile, r), tiles - 1),
                T.min(group, groups - 1),
                lane,
                span(0, WORDS),
            ]
            for row in T.unroll(packing.rows):
                scales[i * rows + r * packing.rows + row] = T.Cast(
                    "float32",
                    weight_scale[
                        T.min(tile_of(first_tile, r), tiles - 1),
                        T.min(group, groups - 1),
                        row * 8 + lane // 4,
                    ],
                )

    @T.macro
    def add_token(q, scale, total, codes, scales, acc, i, token, group, lane, first):
        x = T.sblock_alloc_buffer((STEPS,), "int32", scope="local")
        exact = T.sblock_alloc_buffer((rows,), "int32", scope="local")
        for half in T.unroll(2):
            x[span(half * 4, 4)] = activations(q, token, group, lane, half)
        for row in T.unroll(rows):
            exact[row] = nothing_yet(total, token, group, lane)
            for step in T.unroll(STEPS):
                exact[row] = dp4a(codes[row * STEPS + step], x[step], exact[row])
            acc[row * tokens + i] = fma(
                share(exact[row]),
                mul(scale[T.min(token, width - 1), group], scales[first + row]),
                acc[row * tokens + i],
            )

    @T.macro
    def add_group(q, scale, total, words, scales, acc, token, group, lane, i):
        codes = T.sblock_alloc_buffer((rows * STEPS,), "int32", scope="local")
        for r in T.unroll(row_tiles):
            for row in T.unroll(packing.rows):
                for step in T.unroll(STEPS):
                    codes[(r * packing.rows + row) * STEPS + step] = T.reinterpret(
                        "int32",
                        packing.plus_one(
                            words[(i * row_tiles + r) * WORDS + packing.word(row, step)], step
                        ),
                    )
        for j in T.unroll(tokens):
            add_token(q, scale, total, codes, scales, acc, j, token + j, group, lane, i * rows)

    @T.macro
    def load_turn(weight, weight_scale, words, scales, first_tile, warp, lane, turn):
        for i in T.unroll(ahead):
            load(
                weight,
                weight_scale,
                words,
                scales,
                first_tile,
                group_of(warp, turn * ahead + i),
                lane,
                i,
            )

    @T.macro
    def start(weight, weight_scale, words, scales, first_tile, warp, lane):
        load_turn(weight, weight_scale, words, scales, first_tile, warp, lane, 0)

    @T.macro
    def finish(
        q, scale, total, weight, weight_scale, words, scales, acc, first_tile, token, warp, lane
    ):
        for i in T.unroll(rows * tokens):
            acc[i] = T.float32(0)
        for turn in rolled(rounds):
            if turn > 0:
                load_turn(weight, weight_scale, words, scales, first_tile, warp, lane, turn)
            for i in T.unroll(ahead):
                # No activations of the next group yet: with several tokens they cost registers that
                # are not there.
                if tokens > 1:
                    T.cuda.warp_sync()
                if exists(group_of(warp, turn * ahead + i)):
                    add_group(
                        q,
                        scale,
                        total,
                        words,
                        scales,
                        acc,
                        token,
                        group_of(warp, turn * ahead + i),
                        lane,
                        i,
                    )

    return WarpPart(
        rows=rows,
        words=ahead * row_tiles * WORDS,
        scales=ahead * rows,
        dtype="float32",
        start=start,
        finish=finish,
    )


def joiner(warps: int, stride: int):
    """A macro that leaves in `value` a result from the warps' sums, which stand `stride` apart from
    `at` on."""

    @T.macro
    def join(partial, at, scale, total, weight_scale, value, token, n):
        value[0] = partial[at]
        for i in T.unroll(warps - 1):
            value[0] = add(value[0], partial[(i + 1) * stride + at])

    return join
