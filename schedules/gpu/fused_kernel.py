"""The shell of the linears that quantise their own input: their buffers, and what a block does."""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.thread import WARP
from schedules.workload import Workload


def fused_kernel(
    work: Workload, grid: int, threads: int, block_tiles: int, one_block
) -> tirx.PrimFunc:
    """The kernel of `relax_models.fused_ops` by `grid` blocks, each for `block_tiles` tiles.

    `one_block(x, norm, weight, weight_scale, residual, y, first_tile, warp, lane)` is a macro; norm
    and residual are None where there is none.
    """

    @T.macro
    def launch(x, norm, weight, weight_scale, residual, y):
        for bx in T.thread_binding(grid, thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("linear"):
                    block = T.axis.spatial(grid, bx)
                    thread = T.axis.spatial(threads, tx)
                    one_block(
                        x,
                        norm,
                        weight,
                        weight_scale,
                        residual,
                        y,
                        block * block_tiles,
                        thread // WARP,
                        thread % WARP,
                    )

    made = _with_norm if work.op == "norm_low_bit_linear" else _without_norm
    return made(list(zip(work.shapes, work.dtypes, strict=True)), launch)


def _with_norm(buffers: list, launch) -> tirx.PrimFunc:
    x_, norm_, weight_, weight_scale_, *residual_, y_ = buffers
    if residual_:

        @T.prim_func(private=True, s_tir=True)
        def added(
            x: T.Buffer(*x_),
            norm: T.Buffer(*norm_),
            weight: T.Buffer(*weight_),
            weight_scale: T.Buffer(*weight_scale_),
            residual: T.Buffer(*residual_[0]),
            y: T.Buffer(*y_),
        ):
            launch(x, norm, weight, weight_scale, residual, y)

        return added

    @T.prim_func(private=True, s_tir=True)
    def plain(
        x: T.Buffer(*x_),
        norm: T.Buffer(*norm_),
        weight: T.Buffer(*weight_),
        weight_scale: T.Buffer(*weight_scale_),
        y: T.Buffer(*y_),
    ):
        launch(x, norm, weight, weight_scale, None, y)

    return plain


def _without_norm(buffers: list, launch) -> tirx.PrimFunc:
    x_, weight_, weight_scale_, *residual_, y_ = buffers
    if residual_:

        @T.prim_func(private=True, s_tir=True)
        def added(
            x: T.Buffer(*x_),
            weight: T.Buffer(*weight_),
            weight_scale: T.Buffer(*weight_scale_),
            residual: T.Buffer(*residual_[0]),
            y: T.Buffer(*y_),
        ):
            launch(x, None, weight, weight_scale, residual, y)

        return added

    @T.prim_func(private=True, s_tir=True)
    def plain(
        x: T.Buffer(*x_),
        weight: T.Buffer(*weight_),
        weight_scale: T.Buffer(*weight_scale_),
        y: T.Buffer(*y_),
    ):
        launch(x, None, weight, weight_scale, None, y)

    return plain
