"""What all linears on cuda share: their buffers, and which block computes what."""

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.thread import (
    WARP,
    add,
    ceil_div,
    let_others_start,
    wait_for_others,
    warp_sum,
)
from schedules.workload import Workload


@dataclass(frozen=True)
class WarpPart:
    """What a warp of a linear by dp4a does, whatever the format.

    rows: of weights that a lane sums for each token; words: uint32 of weights that it holds;
    scales: floats of group scales that it holds; dtype: of its sums.

    The macro `start(weight, weight_scale, words, scales, first_tile, warp, lane)` sends for the
    first weights, which no kernel writes. `finish(q, scale, total, weight, weight_scale, words,
    scales, acc, first_tile, token, warp, lane)` leaves the sum of row r for token i at
    acc[r * tokens + i], a part of it in each of the lanes 4g..4g+3.
    """

    rows: int
    words: int
    scales: int
    dtype: str
    start: Any
    finish: Any


def plus(value, residual, token, n):
    """`value` and the residual's element, where there is one."""
    return value if residual is None else add(value, residual[token, n])


def put_sums(tokens: int, part: WarpPart):
    """A macro that puts a warp's sums side by side into shared memory: eight rows of a token."""
    sums = part.rows * tokens

    @T.macro
    def put(acc, partial, warp, lane):
        for i in T.unroll(sums):
            warp_sum(acc, i, 4)
        if lane % 4 == 0:
            for i in T.unroll(sums):
                partial[(warp * sums + i) * 8 + lane // 4] = acc[i]

    return put


def linear_kernel(
    work: Workload, threads: int, row_tiles: int, tokens: int, one_block
) -> tirx.PrimFunc:
    """`relax_models.ops.low_bit_linear` by blocks of `threads` threads, each for `row_tiles` tiles
    of weight rows and `tokens` activation rows.

    `one_block(q, scale, total, weight, weight_scale, residual, y, first_tile, first_token, thread)`
    is a macro; residual is None where there is none.
    """
    parts = ceil_div(work.width, tokens)
    grid = ceil_div(work.shapes[3][0], row_tiles) * parts
    q_, scale_, total_, weight_, weight_scale_, *residual_, y_ = zip(
        work.shapes, work.dtypes, strict=True
    )

    # Neighbouring blocks share their weights, so that these come from memory once.
    def first_tile_of(block):
        return block // parts * row_tiles

    def first_token_of(block):
        return block % parts * tokens

    @T.macro
    def launch(q, scale, total, weight, weight_scale, residual, y):
        for bx in T.thread_binding(grid, thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("linear"):
                    block = T.axis.spatial(grid, bx)
                    thread = T.axis.spatial(threads, tx)
                    one_block(
                        q,
                        scale,
                        total,
                        weight,
                        weight_scale,
                        residual,
                        y,
                        first_tile_of(block),
                        first_token_of(block),
                        thread,
                    )

    if residual_:

        @T.prim_func(private=True, s_tir=True)
        def added(
            q: T.Buffer(*q_),
            scale: T.Buffer(*scale_),
            total: T.Buffer(*total_),
            weight: T.Buffer(*weight_),
            weight_scale: T.Buffer(*weight_scale_),
            residual: T.Buffer(*residual_[0]),
            y: T.Buffer(*y_),
        ):
            launch(q, scale, total, weight, weight_scale, residual, y)

        return added

    @T.prim_func(private=True, s_tir=True)
    def plain(
        q: T.Buffer(*q_),
        scale: T.Buffer(*scale_),
        total: T.Buffer(*total_),
        weight: T.Buffer(*weight_),
        weight_scale: T.Buffer(*weight_scale_),
        y: T.Buffer(*y_),
    ):
        launch(q, scale, total, weight, weight_scale, None, y)

    return plain


def dp4a_linear(
    work: Workload, tile: Any, part: WarpPart, join, tile_rows: int, early: bool
) -> tirx.PrimFunc:
    """`linear_kernel` by dp4a for a tile (tokens, row_tiles, warps), of `tile_rows` rows each.

    `join(partial, at, scale, total, weight_scale, value, token, n)` is a macro that leaves a result
    in `value` from the warps' sums. With `early`, the first weights are on their way before the
    kernel waits for others.
    """
    width, columns = work.shapes[-1]
    tokens, row_tiles, warps = tile.tokens, tile.row_tiles, tile.warps
    threads = warps * WARP
    outputs = part.rows * tokens * 8
    put = put_sums(tokens, part)

    @T.macro
    def store(partial, at, scale, total, weight_scale, residual, y, token, n):
        value = T.sblock_alloc_buffer((1,), "float32", scope="local")
        if (at < outputs) and (token < width) and (n < columns):
            join(partial, at, scale, total, weight_scale, value, token, n)
            y[token, n] = plus(value[0], residual, token, n)

    @T.macro
    def one_block(q, scale, total, weight, weight_scale, residual, y, first_tile, token, thread):
        words = T.sblock_alloc_buffer((part.words,), "uint32", scope="local")
        scales = T.sblock_alloc_buffer((part.scales,), "float32", scope="local")
        acc = T.sblock_alloc_buffer((part.rows * tokens,), part.dtype, scope="local")
        partial = T.sblock_alloc_buffer((warps * outputs,), part.dtype, scope="shared")
        if early:
            let_others_start()
        part.start(weight, weight_scale, words, scales, first_tile, thread // WARP, thread % WARP)
        if early:
            wait_for_others()
        part.finish(
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
            thread // WARP,
            thread % WARP,
        )
        put(acc, partial, thread // WARP, thread % WARP)
        T.tvm_storage_sync("shared")
        # Sum number at // 8 of a lane: eight rows of one activation row.
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
                first_tile * tile_rows + (turn * threads + thread) // (8 * tokens) * 8 + thread % 8,
            )

    return linear_kernel(work, threads, row_tiles, tokens, one_block)
