"""A warp's products in a linear with group scales for many activation rows on cuda: a group of K
out of shared memory.

The weights stand there as they are packed: lane 4g + u has row g at the columns 32u..32u + 31. For
part u of a group a lane 4g + t reads what lane 4g + u has, and takes its columns 8t..8t + 7: so an
mma sums over one part, as those of low_bit_group_mma_warp.py do, and nothing is exchanged.
"""

from tvm.script import tirx as T

from schedules.gpu.low_bit_group_mma_warp import OUTPUTS, PARTS, TOKENS
from schedules.gpu.low_bit_group_mma_wide_tile import SUMS, GroupWideTile, halves
from schedules.gpu.low_bit_group_warp import INTEGER_BITS, INTEGER_ZERO
from schedules.gpu.packed import K_BLOCK, WORDS, Packing
from schedules.gpu.thread import WARP, add, fma, mul, span

# 16-byte pieces of an activation row in a group of K, and words of one.
PIECES = K_BLOCK // 16
PIECE = 4


def token_words(tile: GroupWideTile) -> int:
    """Of a stage: 32-bit words of activations."""
    return tile.tokens * PIECES * PIECE


def tile_words(tile: GroupWideTile) -> int:
    """Of a stage: 32-bit words of weights."""
    return tile.block_tiles * WARP * WORDS


def piece_place(row, piece):
    """Where a piece of an activation row stands: of four neighbouring rows the same part stands in
    different banks."""
    turned = T.bitwise_xor(piece, T.bitwise_and(row, 3) * 2)
    return (row * PIECES + turned) * PIECE


def codes_of(packing: Packing, words, row, half, lane):
    """Four bytes of weight + 1: of row `row` of the lane's, at step 2t + half of 32 columns, whose
    `words` are given."""
    step = T.Cast("uint32", lane % 4 * 2)
    if packing.bits == 2:
        # Steps of one parity share a word, two bits each.
        word = words[half * 2 + row]
        return T.bitwise_and(T.shift_right(word, step), T.uint32(0x03030303))
    # Bit 2t + half of every byte goes to bit 1, which doubles the code.
    right = T.shift_right(words[row], step)
    moved = T.Select(half == 0, T.shift_left(right, T.uint32(1)), right)
    return T.bitwise_and(moved, T.uint32(0x02020202))


def multiplier(packing: Packing, tile: GroupWideTile):
    """Two macros: `add_group` adds a group's products to the parts' sums, `join` adds these to
    those of the splits before, and clears them.

    A lane's sums stand by tiles of rows, of tokens, then four parts and the splits' sum, then
    output of the mma.
    """
    own, pairs = halves(tile, packing), tile.token_tiles

    def sums_of(m, j, part):
        return ((m * pairs + j) * SUMS + part) * OUTPUTS

    def nothing_yet(totals, part, token):
        """What the integers of two tokens are added to: bits of a float, and in part 0 less the
        group's total."""
        first = T.uint32(INTEGER_BITS) - totals[token]
        return T.Select(part == 0, first, T.uint32(INTEGER_BITS))

    def share(bits):
        return add(T.reinterpret("float32", bits), T.float32(-INTEGER_ZERO))

    def scale_of(scales, row):
        return T.Cast("float32", T.reinterpret("float16", scales[row]))

    def own_row(slot, first_tile, row, lane):
        """Where the scale of the lane's row number `row` stands."""
        tiles = slot * tile.block_tiles + first_tile
        return tiles * packing.tile + row * 8 + lane // 4

    def token_pair(slot, token, j, lane):
        """Where the scales and totals of the lane's two activation rows of tile j stand."""
        return slot * tile.tokens + token + j * TOKENS + lane % 4 * 2

    def operand_place(slot, token, j, part, lane):
        """Where the lane's eight bytes of an activation row stand."""
        place = piece_place(token + j * TOKENS + lane // 4, part * 2 + lane % 4 // 2)
        return slot * token_words(tile) + place + lane % 2 * 2

    @T.macro
    def add_part(codes, x, totals, factors, acc, m, j, part):
        d = T.sblock_alloc_buffer((OUTPUTS,), "uint32", scope="local")
        T.ptx.mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32(
            d[0],
            d[1],
            d[2],
            d[3],
            codes[m * 4],
            codes[m * 4 + 1],
            codes[m * 4 + 2],
            codes[m * 4 + 3],
            x[0],
            x[1],
            nothing_yet(totals, part, 0),
            nothing_yet(totals, part, 1),
            nothing_yet(totals, part, 0),
            nothing_yet(totals, part, 1),
        )
        for i in T.unroll(OUTPUTS):
            acc[sums_of(m, j, part) + i] = fma(
                share(d[i]), factors[(m * pairs + j) * OUTPUTS + i], acc[sums_of(m, j, part) + i]
            )

    @T.macro
    def unpack(weights, codes, slot, first_tile, part, lane):
        words = T.sblock_alloc_buffer((WORDS,), "uint32", scope="local")
        for r in T.unroll(tile.row_tiles):
            words[span(0, WORDS)] = weights[
                span(
                    slot * tile_words(tile)
                    + ((first_tile + r) * WARP + lane // 4 * 4 + part) * WORDS,
                    WORDS,
                )
            ]
            for k in T.unroll(packing.rows * 2):
                codes[r * packing.rows * 2 + k] = codes_of(
                    packing, words, k // 4 * 2 + k % 2, k // 2 % 2, lane
                )

    @T.macro
    def load_factors(row_scales, token_scales, factors, slot, first_tile, token, lane):
        """What the shares of a group are multiplied by."""
        of_tokens = T.sblock_alloc_buffer((pairs * 2,), "float32", scope="local")
        of_row = T.sblock_alloc_buffer((1,), "float32", scope="local")
        for j in T.unroll(pairs):
            of_tokens[span(j * 2, 2)] = token_scales[span(token_pair(slot, token, j, lane), 2)]
        for row in T.unroll(own * 2):
            of_row[0] = scale_of(row_scales, own_row(slot, first_tile, row, lane))
            for j in T.unroll(pairs * 2):
                factors[(row // 2 * pairs + j // 2) * OUTPUTS + row % 2 * 2 + j % 2] = mul(
                    of_tokens[j], of_row[0]
                )

    @T.macro
    def add_group(x, weights, row_scales, token_scales, totals, acc, slot, first_tile, token, lane):
        """The group of stage `slot`; first_tile, token: the warp's, within the block."""
        factors = T.sblock_alloc_buffer((own * pairs * OUTPUTS,), "float32", scope="local")
        of_pair = T.sblock_alloc_buffer((2,), "uint32", scope="local")
        codes = T.sblock_alloc_buffer((own * 4,), "uint32", scope="local")
        held = T.sblock_alloc_buffer((2,), "uint32", scope="local")
        load_factors(row_scales, token_scales, factors, slot, first_tile, token, lane)
        for part in T.unroll(PARTS):
            # Codes of the next part only then: there are no registers for both.
            T.cuda.warp_sync()
            unpack(weights, codes, slot, first_tile, part, lane)
            for j in T.unroll(pairs):
                held[span(0, 2)] = x[span(operand_place(slot, token, j, part, lane), 2)]
                if part == 0:
                    of_pair[span(0, 2)] = totals[span(token_pair(slot, token, j, lane), 2)]
                for m in T.unroll(own):
                    add_part(codes, held, of_pair, factors, acc, m, j, part)

    @T.macro
    def join(acc):
        """As a butterfly of four lanes adds the parts, then the splits in their order."""
        for at in T.unroll(own * pairs):
            for i in T.unroll(OUTPUTS):
                acc[(at * SUMS + PARTS) * OUTPUTS + i] = add(
                    acc[(at * SUMS + PARTS) * OUTPUTS + i],
                    add(
                        add(acc[at * SUMS * OUTPUTS + i], acc[(at * SUMS + 2) * OUTPUTS + i]),
                        add(acc[(at * SUMS + 1) * OUTPUTS + i], acc[(at * SUMS + 3) * OUTPUTS + i]),
                    ),
                )
            for i in T.unroll(PARTS * OUTPUTS):
                acc[at * SUMS * OUTPUTS + i] = T.float32(0)

    return add_group, join
