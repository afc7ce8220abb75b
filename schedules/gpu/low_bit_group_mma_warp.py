"""A warp's part of a linear with group scales on cuda: its groups on tensor cores.

An mma m16n8k32 sums over its four lanes of a row, while the sums of low_bit_group_gemv.py stand
apart by 32 columns, those of one lane. So the four lanes of a row exchange their codes until step u
of each is of the columns 32u..32u+31: lane t then holds 32u + 8t..32u + 8t + 7, and an mma gives
what lane u of the other kernel has.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from schedules.gpu.exchange import exchange
from schedules.gpu.low_bit_group_warp import INTEGER_BITS, INTEGER_ZERO
from schedules.gpu.packed import K_BLOCK, LANE_K, WORDS, Packing
from schedules.gpu.thread import add, ceil_div, fma, load_weights, mul, rolled, span

# Rows and tokens of an mma; its share of a lane: rows g and g + 8, tokens 2t and 2t + 1.
ROWS = 16
TOKENS = 8
OUTPUTS = 4
# Parts of a group that are summed apart.
PARTS = K_BLOCK // LANE_K
# More groups a warp than this are a loop.
MOST_UNROLLED = 8


@dataclass(frozen=True)
class GroupMmaTile:
    """What one block computes: `teams` times `row_tiles` tiles of rows for `token_tiles` times 8
    rows of x.

    warps: ways K is split, which K alone decides; teams: sets of as many warps, each with row tiles
    of its own; ahead: 16-byte weight loads a lane has in flight for each tile; x_ahead: groups
    whose activations are loaded together; resident: blocks that a multiprocessor must have
    registers for.
    """

    token_tiles: int
    row_tiles: int
    warps: int
    teams: int
    ahead: int
    x_ahead: int
    resident: int

    @property
    def tokens(self) -> int:
        return TOKENS * self.token_tiles

    @property
    def block_tiles(self) -> int:
        """Row tiles of a block."""
        return self.teams * self.row_tiles


def accumulator(packing: Packing, tile: GroupMmaTile, shape: tuple[int, int, int]):
    """Two macros: the first loads what a warp multiplies first, into `words` and `scales`, the
    second leaves in `acc` a lane's sums over the groups of its warp, by rows, tokens, part of the
    group and output of the mma; `shape` is (width, tiles, groups)."""
    width, tiles, groups = shape
    row_tiles, token_tiles, warps, ahead = tile.row_tiles, tile.token_tiles, tile.warps, tile.ahead
    rows = row_tiles * packing.rows
    turns = ceil_div(groups, warps)
    # Of many sums a turn that is a loop's takes fewer registers.
    crowded = rows // 2 * token_tiles > 1
    unrolled = ahead if crowded or turns > MOST_UNROLLED else turns
    rounds = ceil_div(turns, unrolled)
    x_ahead = min(tile.x_ahead, unrolled)

    def group_of(warp, turn):
        return warp + turn * warps

    def exists(group):
        return True if rounds * warps * unrolled == groups else group < groups

    def row_of(token):
        return T.min(token, width - 1)

    def scale_of(scales, i):
        return T.Cast("float32", T.reinterpret("float16", scales[i]))

    def operand(words, first, row, half, part):
        """Four bytes of weight + 1 of the lane's row, at its columns of the part."""
        step = part * 2 + half
        word = words[first + row // packing.rows * WORDS + packing.word(row % packing.rows, step)]
        return packing.plus_one(word, step)

    def nothing_yet(start, slot, part, token):
        return T.Select(part == 0, start[slot * 2 + token], T.uint32(INTEGER_BITS))

    def share(bits):
        return add(T.reinterpret("float32", bits), T.float32(-INTEGER_ZERO))

    @T.macro
    def load(weight, weight_scale, words, scales, first_tile, group, lane, i):
        for r in T.unroll(row_tiles):
            load_weights(
                words,
                (i * row_tiles + r) * WORDS,
                T.address_of(
                    weight[T.min(first_tile + r, tiles - 1), T.min(group, groups - 1), lane, 0]
                ),
            )
            for row in T.unroll(packing.rows):
                T.ptx["ld.weak.global.u16"](
                    scales[i * rows + r * packing.rows + row],
                    T.address_of(
                        weight_scale[
                            T.min(first_tile + r, tiles - 1),
                            T.min(group, groups - 1),
                            row * 8 + lane // 4,
                        ]
                    ),
                )

    @T.macro
    def load_token(q, scale, total, x, factors, start, token, group, lane, j):
        for part in T.unroll(PARTS):
            x[span((j * PARTS + part) * 2, 2)] = T.reinterpret(
                "uint32x2",
                q[
                    row_of(token + lane // 4),
                    span(group * K_BLOCK + part * LANE_K + lane % 4 * 8, 8),
                ],
            )
        for i in T.unroll(2):
            factors[j * 2 + i] = scale[row_of(token + lane % 4 * 2 + i), group]
            start[j * 2 + i] = T.reinterpret(
                "uint32", T.int32(INTEGER_BITS) - total[row_of(token + lane % 4 * 2 + i), group]
            )

    @T.macro
    def add_part(codes, x, start, factors, acc, sums, slot, j, part):
        d = T.sblock_alloc_buffer((OUTPUTS,), "uint32", scope="local")
        # The integers are summed on top of the bits of a float, less the group's total in part 0.
        T.ptx.mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32(
            d[0],
            d[1],
            d[2],
            d[3],
            codes[0],
            codes[1],
            codes[2],
            codes[3],
            x[(slot * PARTS + part) * 2],
            x[(slot * PARTS + part) * 2 + 1],
            nothing_yet(start, slot, part, 0),
            nothing_yet(start, slot, part, 1),
            nothing_yet(start, slot, part, 0),
            nothing_yet(start, slot, part, 1),
        )
        for i in T.unroll(OUTPUTS):
            acc[sums + i] = fma(share(d[i]), factors[j * OUTPUTS + i], acc[sums + i])

    @T.macro
    def add_rows(words, scales, x, token_scales, start, acc, m, i, slot):
        """Rows 16m..16m + 15 of the warp; its weights are number i, its activations number slot."""
        codes = T.sblock_alloc_buffer((4,), "uint32", scope="local")
        factors = T.sblock_alloc_buffer((token_tiles * OUTPUTS,), "float32", scope="local")
        for j in T.unroll(token_tiles):
            for k in T.unroll(OUTPUTS):
                factors[j * OUTPUTS + k] = mul(
                    token_scales[(slot * token_tiles + j) * 2 + k % 2],
                    scale_of(scales, i * rows + m * 2 + k // 2),
                )
        for part in T.unroll(PARTS):
            for k in T.unroll(4):
                codes[k] = operand(words, i * row_tiles * WORDS, m * 2 + k % 2, k // 2, part)
            for j in T.unroll(token_tiles):
                add_part(
                    codes,
                    x,
                    start,
                    factors,
                    acc,
                    ((m * token_tiles + j) * PARTS + part) * OUTPUTS,
                    slot * token_tiles + j,
                    j,
                    part,
                )

    @T.macro
    def load_tokens(q, scale, total, x, token_scales, start, token, group, lane, slot):
        for j in T.unroll(token_tiles):
            load_token(
                q,
                scale,
                total,
                x,
                token_scales,
                start,
                token + j * TOKENS,
                T.min(group, groups - 1),
                lane,
                slot * token_tiles + j,
            )

    @T.macro
    def one_group(words, scales, x, factors, start, acc, group, lane, i, slot):
        for pair in T.unroll(row_tiles * WORDS // 2):
            exchange(words, i * row_tiles * WORDS + pair * 2, lane, 1)
            exchange(words, i * row_tiles * WORDS + pair * 2, lane, 2)
        if exists(group):
            for m in T.unroll(rows // 2):
                add_rows(words, scales, x, factors, start, acc, m, i, slot)

    @T.macro
    def one_round(
        q,
        scale,
        total,
        weight,
        weight_scale,
        words,
        scales,
        acc,
        first_tile,
        token,
        warp,
        lane,
        first,
        last,
    ):
        x = T.sblock_alloc_buffer((x_ahead * token_tiles * PARTS * 2,), "uint32", scope="local")
        factors = T.sblock_alloc_buffer((x_ahead * token_tiles * 2,), "float32", scope="local")
        start = T.sblock_alloc_buffer((x_ahead * token_tiles * 2,), "uint32", scope="local")
        for i in T.unroll(unrolled):
            if i % x_ahead == 0:
                # These activations only now: many sums leave no registers for them.
                if crowded:
                    T.cuda.warp_sync()
                for slot in T.unroll(x_ahead):
                    if i + slot < unrolled:
                        load_tokens(
                            q,
                            scale,
                            total,
                            x,
                            factors,
                            start,
                            token,
                            group_of(warp, first + i + slot),
                            lane,
                            slot,
                        )
            one_group(
                words,
                scales,
                x,
                factors,
                start,
                acc,
                group_of(warp, first + i),
                lane,
                i % ahead,
                i % x_ahead,
            )
            # What was just used makes room for what is `ahead` turns away.
            if (not last) or (i + ahead < unrolled):
                load(
                    weight,
                    weight_scale,
                    words,
                    scales,
                    first_tile,
                    group_of(warp, first + i + ahead),
                    lane,
                    i % ahead,
                )

    @T.macro
    def begin(weight, weight_scale, words, scales, first_tile, warp, lane):
        for i in T.unroll(ahead):
            load(weight, weight_scale, words, scales, first_tile, group_of(warp, i), lane, i)

    @T.macro
    def accumulate(
        q, scale, total, weight, weight_scale, words, scales, acc, first_tile, token, warp, lane
    ):
        for i in T.unroll(rows // 2 * token_tiles * PARTS * OUTPUTS):
            acc[i] = T.float32(0)
        for turn in rolled(rounds - 1):
            one_round(
                q,
                scale,
                total,
                weight,
                weight_scale,
                words,
                scales,
                acc,
                first_tile,
                token,
                warp,
                lane,
                turn * unrolled,
                False,
            )
        one_round(
            q,
            scale,
            total,
            weight,
            weight_scale,
            words,
            scales,
            acc,
            first_tile,
            token,
            warp,
            lane,
            (rounds - 1) * unrolled,
            True,
        )

    return begin, accumulate
