"""RMSNorm with and without int8 quantisation on the processor: one row a task, vectors along it."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.cpu.vector import lanes_for, span, splat, tree_sum, vector
from schedules.workload import Workload


def norm_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.norm_quantize`."""
    lanes = lanes_for(work.shapes[1][0])

    def load(x, row, k):
        return x[row, span(k, lanes)]

    return _quantizing(work, lanes, load)


def gated_norm_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.gated_norm_quantize`."""
    size = work.shapes[1][0]
    lanes = lanes_for(size)

    def load(gate_up, row, k):
        gate = T.max(gate_up[row, span(k, lanes)], splat(T.float32(0), lanes))
        return gate * gate * gate_up[row, span(size + k, lanes)]

    return _quantizing(work, lanes, load)


def _quantizing(work: Workload, lanes: int, load) -> tirx.PrimFunc:
    (width, columns), (size,), (_, padded) = work.shapes[:3]
    eps = work.settings["eps"]
    steps = size // lanes

    def const(value):
        return splat(T.float32(value), lanes)

    def code(value, bound):
        scaled = T.nearbyint(value * splat(T.float32(127) / bound, lanes))
        return T.Cast(vector("int8", lanes), T.max(T.min(scaled, const(127.0)), const(-128.0)))

    def largest(buffer):
        values = [buffer[i] for i in range(lanes)]
        bound = T.float32(1e-5)
        for value in values:
            bound = T.max(bound, value)
        return bound

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, columns), "float32"),
        weight: T.Buffer((size,), "float32"),
        q: T.Buffer((width, padded), "int8"),
        scale: T.Buffer((width,), "float32"),
        total: T.Buffer((width,), "int32"),
    ):
        for i in T.parallel(width):
            with T.sblock("row"):
                row = T.axis.spatial(width, i)
                normed = T.sblock_alloc_buffer((size,), "float32")
                squares = T.sblock_alloc_buffer((lanes,), "float32", scope="local")
                bounds = T.sblock_alloc_buffer((lanes,), "float32", scope="local")
                sums = T.sblock_alloc_buffer((lanes,), "int32", scope="local")
                inverse = T.sblock_alloc_buffer((1,), "float32", scope="local")
                squares[span(0, lanes)] = const(0.0)
                for k in range(steps):
                    normed[span(k * lanes, lanes)] = load(x, row, k * lanes)
                    squares[span(0, lanes)] = (
                        squares[span(0, lanes)]
                        + normed[span(k * lanes, lanes)] * normed[span(k * lanes, lanes)]
                    )
                inverse[0] = T.float32(1) / T.sqrt(
                    tree_sum(squares, 0, lanes) / T.float32(size) + T.float32(eps)
                )
                bounds[span(0, lanes)] = const(0.0)
                for k in range(steps):
                    normed[span(k * lanes, lanes)] = (
                        normed[span(k * lanes, lanes)]
                        * splat(inverse[0], lanes)
                        * weight[span(k * lanes, lanes)]
                    )
                    bounds[span(0, lanes)] = T.max(
                        bounds[span(0, lanes)], T.fabs(normed[span(k * lanes, lanes)])
                    )
                inverse[0] = largest(bounds)
                scale[row] = inverse[0] / T.float32(127)
                sums[span(0, lanes)] = splat(T.int32(0), lanes)
                for k in range(steps):
                    q[row, span(k * lanes, lanes)] = code(
                        normed[span(k * lanes, lanes)], inverse[0]
                    )
                    sums[span(0, lanes)] = sums[span(0, lanes)] + T.Cast(
                        vector("int32", lanes), q[row, span(k * lanes, lanes)]
                    )
                for k in range(padded - size):
                    q[row, size + k] = T.int8(0)
                total[row] = tree_sum(sums, 0, lanes)

    return func


def final_norm(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.final_norm`."""
    (width, size), _, (rows,) = work.shapes[:3]
    eps = work.settings["eps"]
    lanes = lanes_for(size)
    steps = size // lanes

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, size), "float32"),
        weight: T.Buffer((size,), "float32"),
        logit_rows: T.Buffer((rows,), "int32"),
        normed: T.Buffer((rows, size), "float32"),
    ):
        for i in range(rows):
            with T.sblock("row"):
                vi = T.axis.spatial(rows, i)
                squares = T.sblock_alloc_buffer((lanes,), "float32", scope="local")
                inverse = T.sblock_alloc_buffer((1,), "float32", scope="local")
                if logit_rows[vi] < 0:
                    for k in range(steps):
                        normed[vi, span(k * lanes, lanes)] = splat(T.float32(0), lanes)
                else:
                    squares[span(0, lanes)] = splat(T.float32(0), lanes)
                    for k in range(steps):
                        squares[span(0, lanes)] = (
                            squares[span(0, lanes)]
                            + x[logit_rows[vi], span(k * lanes, lanes)]
                            * x[logit_rows[vi], span(k * lanes, lanes)]
                        )
                    inverse[0] = T.float32(1) / T.sqrt(
                        tree_sum(squares, 0, lanes) / T.float32(size) + T.float32(eps)
                    )
                    for k in range(steps):
                        normed[vi, span(k * lanes, lanes)] = (
                            x[logit_rows[vi], span(k * lanes, lanes)]
                            * splat(inverse[0], lanes)
                            * weight[span(k * lanes, lanes)]
                        )

    return func
