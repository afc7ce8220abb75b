"""What all linears on cuda share: their buffers, and which block computes what."""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.thread import ceil_div
from schedules.workload import Workload


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
