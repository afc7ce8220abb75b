"""RMSNorm with and without int8 quantisation on the processor: one row a task, vectors along it."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.cpu.vector import exp, lanes_for, span, splat, tree_sum, vector
from schedules.workload import Workload


def norm_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.norm_quantize`."""
    return _normed(work, _plain)


def gated_norm_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.gated_norm_quantize`."""
    return _normed(work, GATES[work.settings["activation"]])


def quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.quantize`."""
    return _unnormed(work, work.shapes[0][1], _plain)


def gated_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.gated_quantize`."""
    return _unnormed(work, work.shapes[0][1] // 2, _silu)


def _plain(x, row, k, lanes, size):
    return x[row, span(k, lanes)]


def _relu2(gate_up, row, k, lanes, size):
    gate = T.max(gate_up[row, span(k, lanes)], splat(T.float32(0), lanes))
    return gate * gate * gate_up[row, span(size + k, lanes)]


def _silu(gate_up, row, k, lanes, size):
    gate = gate_up[row, span(k, lanes)]
    # The exponential is made for arguments up to 0: e^-g, or e^g over itself.
    small = exp(-T.fabs(gate), lanes)
    one, none = splat(T.float32(1), lanes), splat(T.float32(0), lanes)
    sigmoid = T.Select(gate >= none, one, small) / (one + small)
    return gate * sigmoid * gate_up[row, span(size + k, lanes)]


GATES = {"relu2": _relu2, "silu": _silu}


def _quantizer(work: Workload, size: int):
    """A macro: int8 codes, scale and total of one row of `size` values, by row or by groups."""
    padded = work.shapes[-3][1]
    columns = work.settings.get("group", 0) or size
    by_group = columns != size or len(work.shapes[-1]) == 2
    lanes = lanes_for(columns)
    steps = columns // lanes

    def const(value):
        return splat(T.float32(value), lanes)

    def code(value, bound):
        scaled = T.nearbyint(value * splat(T.float32(127) / bound, lanes))
        return T.Cast(vector("int8", lanes), T.max(T.min(scaled, const(127.0)), const(-128.0)))

    def largest(buffer):
        bound = T.float32(1e-5)
        for i in range(lanes):
            bound = T.max(bound, buffer[i])
        return bound

    @T.macro
    def quantize_row(values, q, scale, total, row):
        bounds = T.sblock_alloc_buffer((lanes,), "float32")
        sums = T.sblock_alloc_buffer((lanes,), "int32")
        codes = T.sblock_alloc_buffer((lanes,), "int8")
        bound = T.sblock_alloc_buffer((1,), "float32")
        for g in range(size // columns):
            bounds[span(0, lanes)] = const(0.0)
            for k in range(steps):
                bounds[span(0, lanes)] = T.max(
                    bounds[span(0, lanes)], T.fabs(values[span(g * columns + k * lanes, lanes)])
                )
            bound[0] = largest(bounds)
            sums[span(0, lanes)] = splat(T.int32(0), lanes)
            for k in range(steps):
                codes[span(0, lanes)] = code(values[span(g * columns + k * lanes, lanes)], bound[0])
                q[row, span(g * columns + k * lanes, lanes)] = codes[span(0, lanes)]
                sums[span(0, lanes)] = sums[span(0, lanes)] + T.Cast(
                    vector("int32", lanes), codes[span(0, lanes)]
                )
            if by_group:
                scale[row, g] = bound[0] / T.float32(127)
                total[row, g] = tree_sum(sums, 0, lanes)
            else:
                scale[row] = bound[0] / T.float32(127)
                total[row] = tree_sum(sums, 0, lanes)
        for k in range(padded - size):
            q[row, size + k] = T.int8(0)

    return quantize_row


def _normed(work: Workload, load) -> tirx.PrimFunc:
    """RMSNorm of what `load` gives, then quantisation."""
    (width, columns), (size,), (_, padded), shape = work.shapes[:4]
    eps, lanes = work.settings["eps"], lanes_for(size)
    steps = size // lanes
    quantize_row = _quantizer(work, size)

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, columns), "float32"),
        weight: T.Buffer((size,), "float32"),
        q: T.Buffer((width, padded), "int8"),
        scale: T.Buffer(shape, "float32"),
        total: T.Buffer(shape, "int32"),
    ):
        for i in range(width):
            with T.sblock("row"):
                row = T.axis.spatial(width, i)
                values = T.sblock_alloc_buffer((size,), "float32")
                squares = T.sblock_alloc_buffer((lanes,), "float32")
                inverse = T.sblock_alloc_buffer((1,), "float32")
                squares[span(0, lanes)] = splat(T.float32(0), lanes)
                for k in range(steps):
                    values[span(k * lanes, lanes)] = load(x, row, k * lanes, lanes, size)
                    squares[span(0, lanes)] = (
                        squares[span(0, lanes)]
                        + values[span(k * lanes, lanes)] * values[span(k * lanes, lanes)]
                    )
                inverse[0] = T.float32(1) / T.sqrt(
                    tree_sum(squares, 0, lanes) / T.float32(size) + T.float32(eps)
                )
                for k in range(steps):
                    values[span(k * lanes, lanes)] = (
                        values[span(k * lanes, lanes)]
                        * weight[span(k * lanes, lanes)]
                        * splat(inverse[0], lanes)
                    )
                quantize_row(values, q, scale, total, row)

    return func


def _unnormed(work: Workload, size: int, load) -> tirx.PrimFunc:
    """Quantisation of what `load` gives."""
    (width, columns), (_, padded), shape = work.shapes[:3]
    lanes = lanes_for(size)
    quantize_row = _quantizer(work, size)

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, columns), "float32"),
        q: T.Buffer((width, padded), "int8"),
        scale: T.Buffer(shape, "float32"),
        total: T.Buffer(shape, "int32"),
    ):
        for i in range(width):
            with T.sblock("row"):
                row = T.axis.spatial(width, i)
                values = T.sblock_alloc_buffer((size,), "float32")
                for k in range(size // lanes):
                    values[span(k * lanes, lanes)] = load(x, row, k * lanes, lanes, size)
                quantize_row(values, q, scale, total, row)

    return func


def qk_norm(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.ops.qk_norm`."""
    width, columns = work.shapes[0]
    heads, kv_heads = work.settings["num_heads"], work.settings["num_kv_heads"]
    size, eps = work.settings["head_dim"], work.settings["eps"]
    lanes, first_v = lanes_for(size), heads + kv_heads
    steps = size // lanes

    def weight_at(q_norm, k_norm, head, k):
        return T.Select(splat(head < heads, lanes), q_norm[span(k, lanes)], k_norm[span(k, lanes)])

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv: T.Buffer((width, columns), "float32"),
        q_norm: T.Buffer((size,), "float32"),
        k_norm: T.Buffer((size,), "float32"),
        normed: T.Buffer((width, columns), "float32"),
    ):
        for task in range(width * (first_v + kv_heads)):
            with T.sblock("head"):
                vt = T.axis.spatial(width * (first_v + kv_heads), task)
                squares = T.sblock_alloc_buffer((lanes,), "float32")
                inverse = T.sblock_alloc_buffer((1,), "float32")
                row = T.meta_var(vt // (first_v + kv_heads))
                head = T.meta_var(vt % (first_v + kv_heads))
                squares[span(0, lanes)] = splat(T.float32(0), lanes)
                for k in range(steps):
                    squares[span(0, lanes)] = (
                        squares[span(0, lanes)]
                        + qkv[row, span(head * size + k * lanes, lanes)]
                        * qkv[row, span(head * size + k * lanes, lanes)]
                    )
                inverse[0] = T.float32(1) / T.sqrt(
                    tree_sum(squares, 0, lanes) / T.float32(size) + T.float32(eps)
                )
                if head < first_v:
                    for k in range(steps):
                        normed[row, span(head * size + k * lanes, lanes)] = (
                            qkv[row, span(head * size + k * lanes, lanes)]
                            * weight_at(q_norm, k_norm, head, k * lanes)
                            * splat(inverse[0], lanes)
                        )
                else:
                    for k in range(steps):
                        normed[row, span(head * size + k * lanes, lanes)] = qkv[
                            row, span(head * size + k * lanes, lanes)
                        ]

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
                squares = T.sblock_alloc_buffer((lanes,), "float32")
                inverse = T.sblock_alloc_buffer((1,), "float32")
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
                            * weight[span(k * lanes, lanes)]
                            * splat(inverse[0], lanes)
                        )

    return func
