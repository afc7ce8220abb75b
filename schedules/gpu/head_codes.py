"""Logits over the 8-bit table on cuda: mma m16n8k32 of int8, exact sums in int32.

Of `relax_models.head_ops.head_codes`.

A warp has tiles of 16 rows of the table for all of K, and tiles of 8 activation rows; the layout
(relax_models.bounded_head.pack_codes) gives a lane its 16 bytes of a step as the mma takes them. An
activation is two int8: a step multiplies both, and the sum of the first ones is shifted to its
place every two steps. No warp shares a sum with another, and all sums are exact, so that tiles are
free to differ from width to width.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.head_bound import ERROR, LENGTH, SCALE, Penalty, bound, is_finite, penalizer
from schedules.gpu.head_codes_tile import (
    ROWS,
    STEPS,
    SUMS,
    TOKENS,
    CodeTile,
    candidates,
    choose_tile,
    problem,
)
from schedules.gpu.head_codes_warp import WORDS, products
from schedules.gpu.thread import (
    WARP,
    across,
    add,
    ceil_div,
    let_others_start,
    mul,
    overlaps,
    wait_for_others,
)
from schedules.sampling import key_of
from schedules.space import Template
from schedules.workload import Workload

NO_KEY = -(2**31)


def code_head(work: Workload, tile: CodeTile, waits: bool) -> tirx.PrimFunc:
    """The kernel of a tile; waits: whether it is launched early and waits behind its loads."""
    (width, vocab_size), (tiles, blocks) = work.shapes[-1], work.shapes[2][:2]
    if found := problem(tile):
        raise ValueError(f"{found}: {tile}")
    warps, row_tiles, token_tiles = tile.warps, tile.row_tiles, tile.token_tiles
    tokens = tile.tokens
    shares = ceil_div(width, tokens)
    grid = ceil_div(tiles, row_tiles * warps) * shares
    shift = work.settings["low_codes"].bit_length() - 1
    penalise = penalizer(work)
    # Nothing reads it where the tile has no stages.
    room, scope = (tile.shared_bytes // 4, "shared") if tile.stages else (1, "local")
    begin, accumulate = products(tile, width, tiles, blocks * STEPS, shift)

    def any_asks(logit_rows, first_token, lane):
        """Whether a row of the tile asks for logits: every lane looks at some."""
        mine = logit_rows[T.min(first_token + lane, width - 1)] >= 0
        for i in range(1, ceil_div(min(tokens, width), WARP)):
            other = logit_rows[T.min(first_token + i * WARP + lane, width - 1)] >= 0
            mine = T.Or(mine, other)
        return T.call_pure_extern("int32", "__any_sync", T.uint32(0xFFFFFFFF), mine) != 0

    @T.macro
    def finish(acc, keys, of_rows, of_tokens, asked, given, logits, at, r, e, row, token):
        """One logit, and its part in the row's floor."""
        value = T.sblock_alloc_buffer((1,), "float32", scope="local")
        value[0] = mul(
            T.Cast("float32", T.reinterpret("int32", acc[at])),
            mul(of_rows[(r * 2 + e // 2) * 3 + SCALE], of_tokens[e % 2, 0]),
        )
        if (row < vocab_size) and (token < width) and (asked[e % 2] >= 0):
            logits[token, row] = value[0]
            value[0] = add(
                value[0],
                -bound(
                    of_rows[(r * 2 + e // 2) * 3 + ERROR],
                    of_rows[(r * 2 + e // 2) * 3 + LENGTH],
                    of_tokens,
                    e % 2,
                    work.settings["least_error"],
                ),
            )
            penalise(value, 0, row, token, given)
            if is_finite(value[0]):
                keys[e % 2] = T.max(keys[e % 2], key_of(value[0]))

    @T.macro
    def know_rows(of_rows, bounds, first_row):
        """Scale and lengths of a lane's rows of the table."""
        for r in T.unroll(row_tiles * 2):
            for i in T.unroll(3):
                of_rows[r * 3 + i] = bounds[i, T.min(first_row + r * 8, tiles * ROWS - 1)]

    @T.macro
    def know_tokens(of_tokens, asked, spread, logit_rows, token):
        """What a lane has to know of its two activation rows."""
        for i in T.unroll(2):
            asked[i] = logit_rows[T.min(token + i, width - 1)]
            for j in T.unroll(3):
                of_tokens[i, j] = spread[T.min(token + i, width - 1), j]

    @T.macro
    def raise_floor(keys, floor, i, token, lane):
        """The largest of a warp's keys of a token, which eight lanes have."""
        for level in T.unroll(3):
            keys[i] = T.max(keys[i], across(keys[i], T.shift_right(16, level)))
        if (lane < 4) and (token < width) and (keys[i] > NO_KEY):
            T.ptx["red.relaxed.gpu.global.max.s32"](T.address_of(floor[token]), keys[i])

    @T.macro
    def store(acc, spread, bounds, logit_rows, given, floor, logits, first_tile, token, lane):
        # Loaded together, in front of all conditions.
        of_rows = T.sblock_alloc_buffer((row_tiles * 2 * 3,), "float32", scope="local")
        of_tokens = T.sblock_alloc_buffer((2, 3), "float32", scope="local")
        asked = T.sblock_alloc_buffer((2,), "int32", scope="local")
        keys = T.sblock_alloc_buffer((2,), "int32", scope="local")
        know_rows(of_rows, bounds, first_tile * ROWS + lane // 4)
        for n in T.unroll(token_tiles):
            know_tokens(of_tokens, asked, spread, logit_rows, token + n * TOKENS + lane % 4 * 2)
            for i in T.unroll(2):
                keys[i] = NO_KEY
            for r in T.unroll(row_tiles):
                for e in T.unroll(SUMS):
                    finish(
                        acc,
                        keys,
                        of_rows,
                        of_tokens,
                        asked,
                        given,
                        logits,
                        (r * token_tiles + n) * SUMS + e,
                        r,
                        e,
                        (first_tile + r) * ROWS + e // 2 * 8 + lane // 4,
                        token + n * TOKENS + lane % 4 * 2 + e % 2,
                    )
            for i in T.unroll(2):
                raise_floor(keys, floor, i, token + n * TOKENS + lane % 4 * 2 + i, lane)

    @T.macro
    def one_warp(
        q, spread, codes, bounds, logit_rows, given, floor, logits, first_tile, token, thread
    ):
        shared = T.sblock_alloc_buffer((room,), "uint32", scope=scope)
        words = T.sblock_alloc_buffer((tile.ahead * row_tiles * WORDS,), "uint32", scope="local")
        acc = T.sblock_alloc_buffer((tile.sums,), "uint32", scope="local")
        if waits:
            let_others_start()
        begin(codes, words, first_tile, thread % WARP)
        if waits:
            wait_for_others()
        # Of a block's rows: all its warps know the same, and wait for one another.
        if any_asks(logit_rows, token, thread % WARP):
            accumulate(q, shared, codes, words, acc, first_tile, token, thread)
            store(
                acc,
                spread,
                bounds,
                logit_rows,
                given,
                floor,
                logits,
                first_tile,
                token,
                thread % WARP,
            )

    @T.macro
    def one_thread(q, spread, codes, bounds, logit_rows, given, floor, logits, block, thread):
        # Neighbouring blocks share their part of the table.
        one_warp(
            q,
            spread,
            codes,
            bounds,
            logit_rows,
            given,
            floor,
            logits,
            (block // shares * warps + thread // WARP) * row_tiles,
            block % shares * tokens,
            thread,
        )

    make = _penalised_shell if work.settings["with_penalty"] else _shell
    return make(work, grid, tile.threads, one_thread)


def _shell(work: Workload, grid: int, threads: int, one_thread) -> tirx.PrimFunc:
    """The kernel around what one thread does."""
    q_shape, spread_shape, codes_shape, bounds_shape, (width,) = work.shapes[:5]
    vocab_size = work.shapes[-1][1]

    @T.prim_func(private=True, s_tir=True)
    def func(
        q: T.Buffer(q_shape, "int8"),
        spread: T.Buffer(spread_shape, "float32"),
        codes: T.Buffer(codes_shape, "uint32"),
        bounds: T.Buffer(bounds_shape, "float32"),
        logit_rows: T.Buffer((width,), "int32"),
        floor: T.Buffer((width,), "int32"),
        logits: T.Buffer((width, vocab_size), "float32"),
    ):
        for bx in T.thread_binding(grid, thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("head_codes"):
                    block = T.axis.spatial(grid, bx)
                    thread = T.axis.spatial(threads, tx)
                    one_thread(
                        q, spread, codes, bounds, logit_rows, None, floor, logits, block, thread
                    )

    return func


def _penalised_shell(work: Workload, grid: int, threads: int, one_thread) -> tirx.PrimFunc:
    """As `_shell`, with what a penalty needs."""
    q_shape, spread_shape, codes_shape, bounds_shape, (width,) = work.shapes[:5]
    vocab_size = work.shapes[-1][1]
    state_words = work.shapes[6][0]

    @T.prim_func(private=True, s_tir=True)
    def func(
        q: T.Buffer(q_shape, "int8"),
        spread: T.Buffer(spread_shape, "float32"),
        codes: T.Buffer(codes_shape, "uint32"),
        bounds: T.Buffer(bounds_shape, "float32"),
        logit_rows: T.Buffer((width,), "int32"),
        horizon: T.Buffer((width,), "int32"),
        state: T.Buffer((state_words,), "int32"),
        seen: T.Buffer((vocab_size,), "int32"),
        floor: T.Buffer((width,), "int32"),
        logits: T.Buffer((width, vocab_size), "float32"),
    ):
        for bx in T.thread_binding(grid, thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("head_codes"):
                    block = T.axis.spatial(grid, bx)
                    thread = T.axis.spatial(threads, tx)
                    one_thread(
                        q,
                        spread,
                        codes,
                        bounds,
                        logit_rows,
                        Penalty(horizon, state, seen),
                        floor,
                        logits,
                        block,
                        thread,
                    )

    return func


def _make(work: Workload, tile: CodeTile, target: tvm.target.Target) -> tirx.PrimFunc:
    return code_head(work, tile, overlaps(target))


TEMPLATE = Template(
    name="head_codes",
    tile=CodeTile,
    serves=lambda work, card: True,
    choose=lambda work, card: choose_tile(work.width),
    candidates=lambda work, card: candidates(work.width),
    make=_make,
)
