"""Ternary linear on cuda's tensor cores for many activation rows, those of a prompt.

Here every product is made at full speed or not at all: a block's warps go through all of K
together. The activations of a block of K come into shared memory some turns before they are needed,
and serve all row tiles; weights go from the L2 to registers, and serve all token tiles of a warp.
Memory takes longer to answer than a turn, so that the L2 asks it for them several turns before.
The sums are exact, so that a row's result is that of schedules/gpu/low_bit_mma.py, bit for bit.
"""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.linear import linear_kernel
from schedules.gpu.low_bit_mma_warp import CODES, K_BLOCK, LOADS, ROWS, STEPS, SUMS, TOKENS, WORDS
from schedules.gpu.low_bit_mma_wide_tile import WideTile, candidates, choose, fills, problem, serves
from schedules.gpu.thread import (
    WARP,
    add,
    ceil_div,
    let_others_start,
    mul,
    overlaps,
    rolled,
    span,
    wait_for_others,
)
from schedules.space import Template
from schedules.workload import Workload, segment_scale

# Turns between asking for weights and their use.
WEIGHTS_AHEAD = 6
# Warps with the same row tiles ask for the same weights: the nearest cache answers all but one.
SHARED_WEIGHTS = "ld.weak.global.L2::128B.v4.u32"
# 16-byte pieces of an activation row in a block of K, and words of one.
PIECES = K_BLOCK // 16
PIECE = 4
ROW_WORDS = PIECES * PIECE
# Of 32 bytes: of a tile of weights.
SECTORS = WARP * 4 * WORDS // 32


def _template(work: Workload, tile: WideTile, early: bool) -> tirx.PrimFunc:
    """With `early`, the first weights are on their way before the kernel waits for others."""
    if found := problem(tile):
        raise ValueError(f"{found}: {tile}")
    width, columns = work.shapes[-1]
    tiles, blocks = work.shapes[3][:2]
    segments = work.settings["segments"]
    row_tiles, token_tiles, stages = tile.row_tiles, tile.token_tiles, tile.stages
    copies = ceil_div(tile.tokens * PIECES, tile.threads)

    def present(value, end):
        return T.min(value, end - 1)

    def own_tile(first_tile, thread):
        return first_tile + thread // WARP % tile.row_warps * row_tiles

    def own_token(thread):
        """The first activation row of a thread's warp, within the block."""
        return thread // (WARP * tile.row_warps) * (token_tiles * TOKENS)

    def place(block, row, piece):
        """Where a piece of an activation row stands: neighbouring rows have theirs in turned pairs,
        so that the lanes of an mma find them in different banks."""
        turned = T.bitwise_xor(piece, T.bitwise_and(row, 1))
        return (block % stages * tile.tokens + row) * ROW_WORDS + turned * PIECE

    @T.macro
    def copy_piece(q, x, first_token, block, at):
        if at < tile.tokens * PIECES:
            T.ptx["cp.async.cg.shared.global.L2::128B"](
                T.address_of(x[place(block, at // PIECES, at % PIECES)]),
                T.address_of(
                    q[
                        present(first_token + at // PIECES, width),
                        block * K_BLOCK + at % PIECES * 16,
                    ]
                ),
                16,
            )

    @T.macro
    def copy(q, x, first_token, block, thread):
        """A block's activations, on their way to shared memory."""
        if block < blocks:
            for i in T.unroll(copies):
                copy_piece(q, x, first_token, block, i * tile.threads + thread)
        T.ptx["cp.async.commit_group"]()

    @T.macro
    def load(weight, words, first_tile, block, lane):
        for r in T.unroll(row_tiles):
            T.ptx[SHARED_WEIGHTS](
                words[r * WORDS],
                words[r * WORDS + 1],
                words[r * WORDS + 2],
                words[r * WORDS + 3],
                T.address_of(
                    weight[present(first_tile + r, tiles), present(block, blocks), lane, 0]
                ),
            )

    @T.macro
    def announce(weight, first_tile, block, thread):
        """Have the L2 fetch what the block's `load` will ask for, a sector a thread."""
        for i in T.unroll(ceil_div(tile.block_tiles * SECTORS, tile.threads)):
            if (block < blocks) and (i * tile.threads + thread < tile.block_tiles * SECTORS):
                T.ptx["prefetch.global.L2"](
                    T.address_of(
                        weight[
                            present(first_tile + (i * tile.threads + thread) // SECTORS, tiles),
                            present(block, blocks),
                            thread % SECTORS * (WARP // SECTORS),
                            0,
                        ]
                    )
                )

    @T.macro
    def product_into(acc, at, a, held, first):
        T.ptx.mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32(
            acc[at],
            acc[at + 1],
            acc[at + 2],
            acc[at + 3],
            a[0],
            a[1],
            a[2],
            a[3],
            held[first],
            held[first + 1],
            acc[at],
            acc[at + 1],
            acc[at + 2],
            acc[at + 3],
        )

    @T.macro
    def step_products(words, held, acc, r, half, step):
        a = T.sblock_alloc_buffer((WORDS,), "uint32", scope="local")
        for i in T.unroll(WORDS):
            a[i] = T.bitwise_and(
                T.shift_right(words[r * WORDS + i], T.Cast("uint32", 2 * (half * 2 + step))),
                T.uint32(CODES),
            )
        for n in T.unroll(token_tiles):
            product_into(acc, (r * token_tiles + n) * SUMS, a, held, n * WORDS + 2 * step)

    @T.macro
    def multiply(x, words, acc, block, row, lane):
        held = T.sblock_alloc_buffer((token_tiles * WORDS,), "uint32", scope="local")
        for half in T.unroll(LOADS):
            for n in T.unroll(token_tiles):
                held[span(n * WORDS, WORDS)] = x[
                    span(place(block, row + n * TOKENS + lane // 4, lane % 4 * LOADS + half), WORDS)
                ]
            for r in T.unroll(row_tiles):
                for step in T.unroll(STEPS // LOADS):
                    step_products(words, held, acc, r, half, step)

    @T.macro
    def one_turn(q, weight, x, words, later, acc, first_tile, first_token, block, thread):
        T.ptx["cp.async.wait_group"](stages - 2)
        T.tvm_storage_sync("shared")
        announce(weight, first_tile, block + WEIGHTS_AHEAD, thread)
        copy(q, x, first_token, block + stages - 1, thread)
        load(weight, later, own_tile(first_tile, thread), block + 1, thread % WARP)
        multiply(x, words, acc, block, own_token(thread), thread % WARP)
        for i in T.unroll(row_tiles * WORDS):
            words[i] = later[i]

    def token_of(first_token, thread, n, e):
        return first_token + own_token(thread) + n * TOKENS + thread % 4 * 2 + e % 2

    def row_of(first_tile, thread, r, e):
        return (own_tile(first_tile, thread) + r) * ROWS + thread % WARP // 4 + e // 2 * 8

    def result(exact, factor, residual, addend):
        value = mul(T.Cast("float32", exact), factor)
        return value if residual is None else add(value, addend)

    @T.macro
    def store_rows(acc, totals, scales, weight_scale, residual, y, first_tile, token, thread, r):
        """A row tile's results; what they take besides the products is loaded together."""
        addend = T.sblock_alloc_buffer((token_tiles * SUMS,), "float32", scope="local")
        row_scales = T.sblock_alloc_buffer((2,), "float32", scope="local")
        for half in T.unroll(2):
            row_scales[half] = segment_scale(
                weight_scale, present(row_of(first_tile, thread, r, half * 2), columns), segments
            )
        if residual is not None:
            for i in T.unroll(token_tiles * SUMS):
                addend[i] = residual[
                    present(token_of(token, thread, i // SUMS, i % SUMS), width),
                    present(row_of(first_tile, thread, r, i % SUMS), columns),
                ]
        for i in T.unroll(token_tiles * SUMS):
            if (token_of(token, thread, i // SUMS, i % SUMS) < width) and (
                row_of(first_tile, thread, r, i % SUMS) < columns
            ):
                y[
                    token_of(token, thread, i // SUMS, i % SUMS),
                    row_of(first_tile, thread, r, i % SUMS),
                ] = result(
                    T.reinterpret("int32", acc[r * token_tiles * SUMS + i])
                    - totals[i // SUMS * 2 + i % 2],
                    mul(scales[i // SUMS * 2 + i % 2], row_scales[i % SUMS // 2]),
                    residual,
                    addend[i],
                )

    @T.macro
    def store(acc, scale, total, weight_scale, residual, y, first_tile, token, thread):
        totals = T.sblock_alloc_buffer((token_tiles * 2,), "int32", scope="local")
        scales = T.sblock_alloc_buffer((token_tiles * 2,), "float32", scope="local")
        for i in T.unroll(token_tiles * 2):
            totals[i] = total[present(token_of(token, thread, i // 2, i), width)]
            scales[i] = scale[present(token_of(token, thread, i // 2, i), width)]
        for r in T.unroll(row_tiles):
            store_rows(acc, totals, scales, weight_scale, residual, y, first_tile, token, thread, r)

    @T.macro
    def one_block(q, scale, total, weight, weight_scale, residual, y, first_tile, token, thread):
        x = T.sblock_alloc_buffer((stages * tile.tokens * ROW_WORDS,), "uint32", scope="shared")
        words = T.sblock_alloc_buffer((row_tiles * WORDS,), "uint32", scope="local")
        later = T.sblock_alloc_buffer((row_tiles * WORDS,), "uint32", scope="local")
        acc = T.sblock_alloc_buffer((tile.sums,), "uint32", scope="local")
        with T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", tile.resident):
            if early:
                let_others_start()
            load(weight, words, own_tile(first_tile, thread), 0, thread % WARP)
            for block in T.unroll(WEIGHTS_AHEAD - 1):
                announce(weight, first_tile, block + 1, thread)
            if early:
                wait_for_others()
            for i in T.unroll(tile.sums):
                acc[i] = T.uint32(0)
            for block in T.unroll(stages - 1):
                copy(q, x, token, block, thread)
            for block in rolled(blocks):
                one_turn(q, weight, x, words, later, acc, first_tile, token, block, thread)
            store(acc, scale, total, weight_scale, residual, y, first_tile, token, thread)

    return linear_kernel(work, tile.threads, tile.block_tiles, tile.tokens, one_block)


def _serving(name: str, serves) -> Template:
    return Template(
        name=name,
        tile=WideTile,
        serves=serves,
        choose=choose,
        candidates=candidates,
        make=lambda work, tile, target: _template(work, tile, overlaps(target)),
    )


TEMPLATE = _serving("low_bit_mma_wide", lambda work, card: serves(work) and fills(work, card))
# Behind the template that splits K, whose tile is the rule's.
SOME_ROWS = _serving(
    "low_bit_mma_wide_some", lambda work, card: serves(work) and not fills(work, card)
)
