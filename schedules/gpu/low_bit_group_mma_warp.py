"""A warp's part of a linear with group scales on cuda: its groups on tensor cores.

An mma m16n8k32 sums over its four lanes of a row, while the sums of low_bit_group_gemv.py stand
apart by 32 columns, those of one lane. So the four lanes of a row exchange their codes until step u
of each is of the columns 32u..32u+31: lane t then holds 32u + 8t..32u + 8t + 7, and an mma gives
what lane u of the other kernel has.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from schedules.gpu.low_bit_group_warp import INTEGER_BITS, INTEGER_ZERO
from schedules.gpu.packed import K_BLOCK, LANE_K, WORDS, Packing
from schedules.gpu.thread import across, add, ceil_div, fma, mul, rolled, span

# Rows and tokens of an mma; its share of a lane: rows g and g + 8, tokens 2t and 2t + 1.
ROWS = 16
TOKENS = 8
OUTPUTS = 4
# Parts of a group that are summed apart.
PARTS = K_BLOCK // LANE_K


@dataclass(frozen=True)
class GroupMmaTile:
    """What one block computes: `row_tiles` tiles of rows for `token_tiles` times 8 rows of x.

    warps: ways K is split; ahead: 16-byte weight loads a lane has in flight for each tile.
    """

    token_tiles: int
    row_tiles: int
    warps: int
    ahead: int

    @property
    def tokens(self) -> int:
        return TOKENS * self.token_tiles


def chosen(traded, kept, lane, distance: int):
    """The fields that the lane trades from `traded`, those that it keeps from `kept`."""
    low = 0x33333333 if distance == 1 else 0x0F0F0F0F
    mask = T.Select(T.bitwise_and(lane, distance) == 0, T.uint32(low), T.uint32(low ^ 0xFFFFFFFF))
    return T.bitwise_or(T.bitwise_and(kept, mask), T.bitwise_and(traded, T.bitwise_not(mask)))


def turned(direction: str, word, lane, distance: int):
    """`word` rotated so that traded fields come to the place of kept ones ("r"), or back ("l")."""
    amount = T.Select(T.bitwise_and(lane, distance) == 0, 2 * distance, 32 - 2 * distance)
    return T.call_pure_extern("uint32", f"__funnelshift_{direction}", word, word, amount)


@T.macro
def exchange(words, first, lane, distance):
    """Two words swap their two-bit fields with the lane at `distance` (1 or 2).

    The fields number f of a byte with f & distance == lane & distance stay, the others are traded
    for the other lane's: one word carries those of both.
    """
    sent = T.sblock_alloc_buffer((1,), "uint32", scope="local")
    sent[0] = chosen(words[first], turned("r", words[first + 1], lane, distance), lane, distance)
    sent[0] = across(sent[0], distance)
    words[first] = chosen(turned("l", sent[0], lane, distance), words[first], lane, distance)
    words[first + 1] = chosen(sent[0], words[first + 1], lane, distance)


def accumulator(packing: Packing, tile: GroupMmaTile, shape: tuple[int, int, int]):
    """A macro that leaves in `acc` a lane's sums over the groups of its warp, by rows, tokens, part
    of the group and output of the mma; `shape` is (width, tiles, groups)."""
    width, tiles, groups = shape
    row_tiles, token_tiles, warps, ahead = tile.row_tiles, tile.token_tiles, tile.warps, tile.ahead
    rows = row_tiles * packing.rows
    rounds = ceil_div(groups, warps * ahead)

    def group_of(warp, turn):
        return warp + turn * warps

    def exists(group):
        return True if rounds * warps * ahead == groups else group < groups

    def row_of(token):
        return T.min(token, width - 1)

    def operand(words, first, row, half, part):
        """Four bytes of weight + 1 of the lane's row, at its columns of the part."""
        step = part * 2 + half
        word = words[first + row // packing.rows * WORDS + packing.word(row % packing.rows, step)]
        return packing.plus_one(word, step)

    def share(bits):
        return add(T.reinterpret("float32", bits), T.float32(-INTEGER_ZERO))

    @T.macro
    def load(weight, weight_scale, words, scales, first_tile, group, lane, i):
        for r in T.unroll(row_tiles):
            words[span((i * row_tiles + r) * WORDS, WORDS)] = weight[
                T.min(first_tile + r, tiles - 1), T.min(group, groups - 1), lane, span(0, WORDS)
            ]
            for row in T.unroll(packing.rows):
                scales[i * rows + r * packing.rows + row] = T.Cast(
                    "float32",
                    weight_scale[
                        T.min(first_tile + r, tiles - 1),
                        T.min(group, groups - 1),
                        row * 8 + lane // 4,
                    ],
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
        for i in T.unroll(OUTPUTS):
            d[i] = T.Select(part == 0, start[slot * 2 + i % 2], T.uint32(INTEGER_BITS))
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
            d[0],
            d[1],
            d[2],
            d[3],
        )
        for i in T.unroll(OUTPUTS):
            acc[sums + i] = fma(share(d[i]), factors[j * OUTPUTS + i], acc[sums + i])

    @T.macro
    def add_rows(words, scales, x, token_scales, start, acc, m, i):
        """Rows 16m..16m + 15 of the block."""
        codes = T.sblock_alloc_buffer((4,), "uint32", scope="local")
        factors = T.sblock_alloc_buffer((token_tiles * OUTPUTS,), "float32", scope="local")
        for j in T.unroll(token_tiles):
            for k in T.unroll(OUTPUTS):
                factors[j * OUTPUTS + k] = mul(
                    token_scales[(i * token_tiles + j) * 2 + k % 2],
                    scales[i * rows + m * 2 + k // 2],
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
                    i * token_tiles + j,
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
    def accumulate(q, scale, total, weight, weight_scale, acc, first_tile, token, warp, lane):
        words = T.sblock_alloc_buffer((ahead * row_tiles * WORDS,), "uint32", scope="local")
        scales = T.sblock_alloc_buffer((ahead * rows,), "float32", scope="local")
        x = T.sblock_alloc_buffer((ahead * token_tiles * PARTS * 2,), "uint32", scope="local")
        token_scales = T.sblock_alloc_buffer((ahead * token_tiles * 2,), "float32", scope="local")
        start = T.sblock_alloc_buffer((ahead * token_tiles * 2,), "uint32", scope="local")
        for i in T.unroll(rows // 2 * token_tiles * PARTS * OUTPUTS):
            acc[i] = T.float32(0)
        for turn in rolled(rounds):
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
                load_tokens(
                    q,
                    scale,
                    total,
                    x,
                    token_scales,
                    start,
                    token,
                    group_of(warp, turn * ahead + i),
                    lane,
                    i,
                )
            for pair in T.unroll(ahead * row_tiles * WORDS // 2):
                exchange(words, pair * 2, lane, 1)
                exchange(words, pair * 2, lane, 2)
            for i in T.unroll(ahead):
                if exists(group_of(warp, turn * ahead + i)):
                    for m in T.unroll(rows // 2):
                        add_rows(words, scales, x, token_scales, start, acc, m, i)

    return accumulate
