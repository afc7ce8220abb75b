"""int8 quantisation by groups of 128 columns on cuda, plain or of a SwiGLU: one warp a group."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.int8 import GROUP, LANE_COLUMNS, quantize_group
from schedules.gpu.thread import WARP, ceil_div, silu, span, splat
from schedules.workload import Workload

WARPS = 4


def quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.quantize`."""

    def load(x, row, k):
        return x[row, span(k, LANE_COLUMNS)]

    return _template(work, work.shapes[0][1], load)


def gated_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.gated_quantize`."""
    size = work.shapes[0][1] // 2

    def load(gate_up, row, k):
        gate = gate_up[row, span(k, LANE_COLUMNS)]
        return silu(gate, LANE_COLUMNS) * gate_up[row, span(size + k, LANE_COLUMNS)]

    return _template(work, size, load)


def _template(work: Workload, size: int, load) -> tirx.PrimFunc:
    (width, columns), (_, padded), (_, groups) = work.shapes[:3]
    if size % LANE_COLUMNS:
        raise ValueError(f"groups of a row of {size} elements: no multiple of {LANE_COLUMNS}")
    items, threads = width * groups, WARPS * WARP
    zeros = splat(T.float32(0), LANE_COLUMNS)

    def values(x, row, k):
        value = load(x, row, k)
        return value if size == padded else T.if_then_else(k < size, value, zeros)

    @T.macro
    def one_group(x, q, scale, total, row, group, lane):
        held = T.sblock_alloc_buffer((LANE_COLUMNS,), "float32", scope="local")
        held[span(0, LANE_COLUMNS)] = values(x, row, group * GROUP + lane * LANE_COLUMNS)
        quantize_group(held, 0, q, scale, total, row, group, lane)

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, columns), "float32"),
        q: T.Buffer((width, padded), "int8"),
        scale: T.Buffer((width, groups), "float32"),
        total: T.Buffer((width, groups), "int32"),
    ):
        for bx in T.thread_binding(ceil_div(items, WARPS), thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("group"):
                    block = T.axis.spatial(ceil_div(items, WARPS), bx)
                    thread = T.axis.spatial(threads, tx)
                    # The same for all lanes of a warp.
                    if block * WARPS + thread // WARP < items:
                        one_group(
                            x,
                            q,
                            scale,
                            total,
                            (block * WARPS + thread // WARP) // groups,
                            (block * WARPS + thread // WARP) % groups,
                            thread % WARP,
                        )

    return func
