"""A warp's part of a ternary linear on the tensor cores: its blocks of K, multiplied and added up.

A tile of weights is 16 rows, one of tokens 8 activation rows; mma m16n8k32 multiplies the two over
32 of K. A lane's 16 bytes of packed weights are its A operands of four such steps (word i is
operand i, step s its bits 2s..2s+1), and the 32 bytes of its k = 32t..32t+31 of activation row g
are the B operands of the same steps: no shuffle, no shared memory.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from schedules.gpu.thread import ceil_div, load_weights, rolled, span

K_BLOCK = 128
LANE_K = 32
ROWS = 16
TOKENS = 8
WORDS = 4
STEPS = 4
# 16-byte loads of a lane's part of a block of an activation row.
LOADS = LANE_K // 16
# A lane's sums of a tile: rows g and g + 8, activation rows 2t and 2t + 1.
SUMS = 4
CODES = 0x03030303
# More blocks of K a warp than this are a loop.
MOST_UNROLLED = 8


@dataclass(frozen=True)
class MmaTile:
    """What one block computes: `teams` times `row_tiles` tiles of 16 rows, for `token_tiles` of 8
    tokens.

    warps: ways K is split; teams: sets of as many warps, each with row tiles of its own; ahead:
    16-byte weight loads a lane has in flight for each row tile; x_ahead: 16-byte loads of each
    activation row that a lane issues together, of which a block of K has two; chains: sums that a
    lane keeps apart for each of its results, 1 or 4. One for every step spares the shift that
    brings a code to the lowest bits (the sum of step s is 4**s times too large until the end), and
    costs registers. resident: blocks that a multiprocessor must have registers for.
    """

    warps: int
    teams: int
    row_tiles: int
    token_tiles: int
    ahead: int
    x_ahead: int
    chains: int
    resident: int

    @property
    def sums(self) -> int:
        """Accumulators of a lane."""
        return self.row_tiles * self.token_tiles * self.chains * SUMS

    @property
    def block_tiles(self) -> int:
        """Row tiles of a block."""
        return self.teams * self.row_tiles

    @property
    def tokens(self) -> int:
        """Activation rows of a block."""
        return self.token_tiles * TOKENS


def accumulator(tile: MmaTile, shape: tuple[int, int, int]):
    """Two macros: the first loads what a warp multiplies first, into `words`, the second leaves in
    `acc` a lane's sums over the blocks of its warp, for `lane_sum`; `shape` is (width, tiles,
    blocks)."""
    width, tiles, blocks = shape
    warps, row_tiles, token_tiles, ahead, chains = (
        tile.warps,
        tile.row_tiles,
        tile.token_tiles,
        tile.ahead,
        tile.chains,
    )
    turns = ceil_div(blocks, warps)
    unrolled = turns if turns <= MOST_UNROLLED else ahead
    rounds = ceil_div(turns, unrolled)
    divides = rounds * unrolled * warps == blocks
    x_loads = min(tile.x_ahead, LOADS * unrolled)
    pieces = ceil_div(LOADS * unrolled, x_loads)
    crowded = row_tiles * token_tiles > 8

    def in_range(value, end, always):
        return value if always else T.min(value, end - 1)

    def block_of(warp, turn):
        return warp + turn * warps

    def codes(word, step, block):
        """A code in each byte: of step `step`, or of none behind the last block."""
        mask = (
            T.uint32(CODES) if divides else T.Select(block < blocks, T.uint32(CODES), T.uint32(0))
        )
        shift = T.Cast("uint32", 2 * step)
        if chains == STEPS:
            return T.bitwise_and(word, T.shift_left(mask, shift))
        return T.bitwise_and(T.shift_right(word, shift), mask)

    def activations(q, token, block, lane, half):
        row = in_range(token + lane // 4, width, width % tile.tokens == 0)
        at = in_range(block, blocks, divides) * K_BLOCK + lane % 4 * LANE_K + half * 16
        return T.reinterpret("uint32x4", q[row, span(at, 16)])

    @T.macro
    def load(weight, words, first_tile, block, lane, slot):
        for r in T.unroll(row_tiles):
            load_weights(
                words,
                (slot * row_tiles + r) * WORDS,
                T.address_of(
                    weight[
                        in_range(first_tile + r, tiles, tiles % tile.block_tiles == 0),
                        in_range(block, blocks, divides),
                        lane,
                        0,
                    ]
                ),
            )

    @T.macro
    def product(acc, at, a, x, first):
        T.ptx.mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32(
            acc[at],
            acc[at + 1],
            acc[at + 2],
            acc[at + 3],
            a[0],
            a[1],
            a[2],
            a[3],
            x[first],
            x[first + 1],
            acc[at],
            acc[at + 1],
            acc[at + 2],
            acc[at + 3],
        )

    @T.macro
    def multiply(words, x, acc, block, slot, half, place):
        """The products of half a block, whose activations are load number `place` of `x`."""
        a = T.sblock_alloc_buffer((WORDS,), "uint32", scope="local")
        for r in T.unroll(row_tiles):
            for step in T.unroll(STEPS // LOADS):
                for i in T.unroll(WORDS):
                    a[i] = codes(words[(slot * row_tiles + r) * WORDS + i], half * 2 + step, block)
                for n in T.unroll(token_tiles):
                    product(
                        acc,
                        ((r * token_tiles + n) * chains + (half * 2 + step) % chains) * SUMS,
                        a,
                        x,
                        (place * token_tiles + n) * WORDS + 2 * step,
                    )

    @T.macro
    def load_tokens(q, x, token, warp, lane, first, piece):
        """The activations of a piece of a round: of its loads, `x_loads` one after another."""
        for i in T.unroll(x_loads):
            if piece * x_loads + i < LOADS * unrolled:
                for n in T.unroll(token_tiles):
                    x[span((i * token_tiles + n) * WORDS, WORDS)] = activations(
                        q,
                        token + n * TOKENS,
                        block_of(warp, first + (piece * x_loads + i) // LOADS),
                        lane,
                        (piece * x_loads + i) % LOADS,
                    )

    @T.macro
    def one_turn(weight, words, x, acc, first_tile, warp, lane, first, load_number, place, last):
        multiply(
            words,
            x,
            acc,
            block_of(warp, first + load_number // LOADS),
            load_number // LOADS % ahead,
            load_number % LOADS,
            place,
        )
        # The words just used make room for those that are `ahead` turns away.
        if load_number % LOADS == LOADS - 1:
            if (not last) or (load_number // LOADS + ahead < unrolled):
                load(
                    weight,
                    words,
                    first_tile,
                    block_of(warp, first + load_number // LOADS + ahead),
                    lane,
                    load_number // LOADS % ahead,
                )

    @T.macro
    def one_round(q, weight, words, acc, first_tile, token, warp, lane, first, last):
        x = T.sblock_alloc_buffer((x_loads * token_tiles * WORDS,), "uint32", scope="local")
        for piece in T.unroll(pieces):
            # These activations only now: many sums leave no registers for them.
            if crowded:
                T.cuda.warp_sync()
            load_tokens(q, x, token, warp, lane, first, piece)
            for i in T.unroll(x_loads):
                if piece * x_loads + i < LOADS * unrolled:
                    one_turn(
                        weight,
                        words,
                        x,
                        acc,
                        first_tile,
                        warp,
                        lane,
                        first,
                        piece * x_loads + i,
                        i,
                        last,
                    )

    @T.macro
    def begin(weight, words, first_tile, warp, lane):
        for i in T.unroll(ahead):
            load(weight, words, first_tile, block_of(warp, i), lane, i)

    @T.macro
    def accumulate(q, weight, words, acc, first_tile, token, warp, lane):
        for i in T.unroll(tile.sums):
            acc[i] = T.uint32(0)
        for turn in rolled(rounds - 1):
            one_round(
                q,
                weight,
                words,
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
            weight,
            words,
            acc,
            first_tile,
            token,
            warp,
            lane,
            (rounds - 1) * unrolled,
            True,
        )

    return begin, accumulate


def lane_sum(tile: MmaTile, acc, r, n, e):
    """Result `e` of row tile `r` and token tile `n`: what the lane's chains add up to."""
    first = (r * tile.token_tiles + n) * tile.chains * SUMS
    chains = [
        T.shift_right(T.reinterpret("int32", acc[first + step * SUMS + e]), 2 * step)
        for step in range(tile.chains)
    ]
    return sum(chains[1:], chains[0])
