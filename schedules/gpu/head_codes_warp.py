"""A warp's part of the head over the 8-bit table on cuda: its sums over all of K.

Activations come from global memory to every warp by itself, which serves a few of them best, or,
where the tile has stages, into shared memory for a whole block, some blocks of K before they are
needed.
"""

from tvm.script import tirx as T

from schedules.gpu.head_codes_tile import (
    K_BLOCK,
    STEPS,
    SUMS,
    TERMS,
    TOKENS,
    WORDS,
    CodeTile,
)
from schedules.gpu.thread import ceil_div, rolled, span

LANE_K = 32
# The table is read once, so that it need not push the activations out of the nearest cache.
LOAD = "ld.weak.global.L1::no_allocate.L2::128B.v4.u32"
# 16-byte pieces of an activation row in a block of K, and words of one.
PIECES = K_BLOCK // 16
PIECE = 4
ROW_WORDS = PIECES * PIECE


def products(tile: CodeTile, width: int, tiles: int, steps: int, shift: int):
    """Macros that load a step's codes, that load the first, and that leave a lane's sums in `acc`.

    The sum of an activation's first terms is `shift` bits too small.
    """
    row_tiles, token_tiles, ahead, stages = (
        tile.row_tiles,
        tile.token_tiles,
        tile.ahead,
        tile.stages,
    )
    blocks = ceil_div(steps, STEPS)
    # Steps of one turn of the loop, whose places in `words` are fixed.
    unrolled = STEPS if stages else max(STEPS, ahead)
    turns = ceil_div(steps, unrolled)
    pieces = TERMS * tile.tokens * PIECES

    def place(block, term, row, piece):
        """Where a piece of an activation row stands: neighbouring rows have theirs in turned pairs,
        so that the lanes of an mma find them in different banks."""
        turned = T.bitwise_xor(piece, T.bitwise_and(row, 1))
        return ((block % stages * TERMS + term) * tile.tokens + row) * ROW_WORDS + turned * PIECE

    @T.macro
    def copy_piece(q, x, first_token, block, at):
        if at < pieces:
            T.ptx["cp.async.cg.shared.global.L2::128B"](
                T.address_of(
                    x[
                        place(
                            block,
                            at // (tile.tokens * PIECES),
                            at // PIECES % tile.tokens,
                            at % PIECES,
                        )
                    ]
                ),
                T.address_of(
                    q[
                        T.min(first_token + at // PIECES % tile.tokens, width - 1),
                        at // (tile.tokens * PIECES),
                        block * K_BLOCK + at % PIECES * 16,
                    ]
                ),
                16,
            )

    @T.macro
    def copy(q, x, first_token, block, thread):
        """A block's activations, on their way to shared memory."""
        if block < blocks:
            for i in T.unroll(ceil_div(pieces, tile.threads)):
                copy_piece(q, x, first_token, block, i * tile.threads + thread)
        T.ptx["cp.async.commit_group"]()

    @T.macro
    def load(codes, words, first_tile, step, slot, lane):
        for r in T.unroll(row_tiles):
            T.ptx[LOAD](
                words[(slot * row_tiles + r) * WORDS],
                words[(slot * row_tiles + r) * WORDS + 1],
                words[(slot * row_tiles + r) * WORDS + 2],
                words[(slot * row_tiles + r) * WORDS + 3],
                T.address_of(
                    codes[T.min(first_tile + r, tiles - 1), step // STEPS, step % STEPS, lane, 0]
                ),
            )

    @T.macro
    def begin(codes, words, first_tile, lane):
        for s in T.unroll(ahead):
            if s < steps:
                load(codes, words, first_tile, s, s, lane)

    @T.macro
    def product(sums, at, words, slot, r, x, first):
        T.ptx.mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32(
            sums[at],
            sums[at + 1],
            sums[at + 2],
            sums[at + 3],
            words[(slot * row_tiles + r) * WORDS],
            words[(slot * row_tiles + r) * WORDS + 1],
            words[(slot * row_tiles + r) * WORDS + 2],
            words[(slot * row_tiles + r) * WORDS + 3],
            x[first],
            x[first + 1],
            sums[at],
            sums[at + 1],
            sums[at + 2],
            sums[at + 3],
        )

    def activations(q, shared, first_token, n, term, step, lane):
        """16 bytes of an activation row: B operands of two steps."""
        if stages:
            row = n * TOKENS + lane // 4
            piece = lane % 4 * (LANE_K // 16) + step % STEPS // 2
            return shared[span(place(step // STEPS, term, row, piece), WORDS)]
        at = step // STEPS * K_BLOCK + lane % 4 * LANE_K + step % STEPS * (LANE_K // STEPS)
        row = T.min(first_token + n * TOKENS + lane // 4, width - 1)
        return T.reinterpret("uint32x4", q[row, term, span(at, 16)])

    @T.macro
    def two_steps(q, shared, words, acc, token, step, slot, lane):
        x = T.sblock_alloc_buffer((TERMS * WORDS,), "uint32", scope="local")
        first = T.sblock_alloc_buffer((SUMS,), "uint32", scope="local")
        for n in T.unroll(token_tiles):
            for term in T.unroll(TERMS):
                x[span(term * WORDS, WORDS)] = activations(q, shared, token, n, term, step, lane)
            for r in T.unroll(row_tiles):
                for e in T.unroll(SUMS):
                    first[e] = T.uint32(0)
                for s in T.unroll(2):
                    product(first, 0, words, slot + s, r, x, 2 * s)
                    product(acc, (r * token_tiles + n) * SUMS, words, slot + s, r, x, WORDS + 2 * s)
                for e in T.unroll(SUMS):
                    acc[(r * token_tiles + n) * SUMS + e] = acc[
                        (r * token_tiles + n) * SUMS + e
                    ] + T.shift_left(first[e], T.uint32(shift))

    @T.macro
    def later(codes, words, first_tile, step, slot, lane):
        for s in T.unroll(2):
            if step + s + ahead < steps:
                load(codes, words, first_tile, step + s + ahead, (slot + s) % ahead, lane)

    @T.macro
    def one_turn(q, shared, codes, words, acc, first_tile, token, turn, thread):
        if stages > 0:
            T.ptx["cp.async.wait_group"](stages - 2)
            T.tvm_storage_sync("shared")
            copy(q, shared, token, turn + stages - 1, thread)
        for i in T.unroll(unrolled // 2):
            if turn * unrolled + 2 * i < steps:
                two_steps(
                    q,
                    shared,
                    words,
                    acc,
                    token,
                    turn * unrolled + 2 * i,
                    2 * i % ahead,
                    thread % 32,
                )
                later(codes, words, first_tile, turn * unrolled + 2 * i, 2 * i, thread % 32)

    @T.macro
    def accumulate(q, shared, codes, words, acc, first_tile, token, thread):
        if stages > 0:
            for block in T.unroll(stages - 1):
                copy(q, shared, token, block, thread)
        for i in T.unroll(tile.sums):
            acc[i] = T.uint32(0)
        for turn in rolled(turns):
            one_turn(q, shared, codes, words, acc, first_tile, token, turn, thread)

    return begin, accumulate
