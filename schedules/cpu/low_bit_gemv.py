"""Low-bit linear on the processor: codes unpacked in registers, 8-bit dot products, int32 sums.

One task is a tile of 8 weight rows against up to four activation rows; the words of a tile stay in
the first-level cache while groups of activation rows pass over them. The layout is that of
relax_models/formats.py for "llvm": a 32-byte word holds 8 rows x 4 codes as often as a byte holds a
code. With one scale a matrix all sums are exact until the end; with a scale for every 128 columns
the sums of a block are scaled and added up in ascending order, the same whatever the width.
"""

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.cpu.vector import DotProduct, dot_product, group_for, span
from schedules.workload import Workload, segment_scale

TILE = 8
WORD_BYTES = 32
K_BLOCK = 128


@dataclass(frozen=True)
class Form:
    """What the template must know of a format; `grouped`: a scale for every block of columns."""

    bits: int
    grouped: bool


FORMS = {
    "bitnet-ternary": Form(2, False),
    "ternary-g128": Form(2, True),
    "binary-g128": Form(1, True),
}


def low_bit_linear(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.low_bit_linear`."""
    form = FORMS.get(work.settings["format"])
    return form and _template(work, dot_product(target), group_for(work.width), form)


def _template(work: Workload, dot: DotProduct, group: int, form: Form) -> tirx.PrimFunc:
    width, columns = work.shapes[-1]
    padded, row_shape = work.shapes[0][1], work.shapes[1]
    weight_shape, scale_shape, scale_dtype = work.shapes[3], work.shapes[4], work.dtypes[4]
    tiles, blocks, words = weight_shape[:3]
    segments, steps = work.settings["segments"], 8 // form.bits
    parts = WORD_BYTES // dot.codes
    num_sums, num_partials = group * TILE, group * parts * dot.lanes
    sum_dtype = "float32" if form.grouped else "int32"

    def codes(weight, tile, block, word, part, step):
        loaded = weight[tile, block, word, span(part * dot.codes, dot.codes)]
        shifted = T.shift_right(loaded, T.Broadcast(T.Cast("uint8", form.bits * step), dot.codes))
        return T.bitwise_and(shifted, T.Broadcast(T.uint8((1 << form.bits) - 1), dot.codes))

    def four(q, row, block, word, step):
        at = block * K_BLOCK + word * (4 * steps) + step * 4
        return T.reinterpret("int32", q[row, span(at, 4)])

    def partial_of(row, part):
        return span((row * parts + part) * dot.lanes, dot.lanes)

    def sums_of(row, part):
        return span(row * TILE + part * dot.rows, dot.rows)

    def term(partial, scale, total, weight_scale, row, r, part, tile, block):
        """What a block adds to the rows of one register: its exact sums, scaled if grouped."""
        exact = dot.widened(partial[partial_of(r, part)])
        if not form.grouped:
            return exact
        doubled = exact + exact if form.bits == 1 else exact
        exact = T.Cast(f"float32x{dot.rows}", doubled - T.Broadcast(total[row, block], dot.rows))
        own = weight_scale[tile, block, span(part * dot.rows, dot.rows)]
        factor = T.Broadcast(scale[row, block], dot.rows) * T.Cast(f"float32x{dot.rows}", own)
        return exact * factor

    def result(sums, r, lane, scale, total, weight_scale, residual, row, n):
        value = sums[r * TILE + lane]
        if not form.grouped:
            factor = scale[row] * segment_scale(weight_scale, n, segments)
            value = T.Cast("float32", value - total[row]) * factor
        return value if residual is None else value + residual[row, n]

    @T.macro
    def accumulate(q, scale, total, weight, weight_scale, sums, tile, first):
        partial = T.sblock_alloc_buffer((num_partials,), dot.dtype)
        unpacked = T.sblock_alloc_buffer((dot.codes,), "uint8")
        for i in T.unroll(group):
            sums[span(i * TILE, TILE)] = T.Broadcast(T.Cast(sum_dtype, 0), TILE)
        for block in range(blocks):
            for i in T.unroll(group * parts):
                partial[span(i * dot.lanes, dot.lanes)] = T.Broadcast(
                    T.Cast(dot.dtype, 0), dot.lanes
                )
            for word, step, part in T.grid(words, steps, parts):
                unpacked[span(0, dot.codes)] = codes(weight, tile, block, word, part, step)
                for r in T.unroll(group):
                    partial[partial_of(r, part)] = dot.step(
                        partial[partial_of(r, part)],
                        unpacked[span(0, dot.codes)],
                        four(q, first + r, block, word, step),
                    )
            for r in T.unroll(group):
                for part in T.unroll(parts):
                    sums[sums_of(r, part)] = sums[sums_of(r, part)] + term(
                        partial, scale, total, weight_scale, first + r, r, part, tile, block
                    )

    @T.macro
    def one_tile(q, scale, total, weight, weight_scale, residual, y, tile, rows):
        sums = T.sblock_alloc_buffer((num_sums,), sum_dtype)
        accumulate(q, scale, total, weight, weight_scale, sums, tile, rows * group)
        for r, lane in T.grid(group, TILE):
            if tile * TILE + lane < columns:
                y[rows * group + r, tile * TILE + lane] = result(
                    sums,
                    r,
                    lane,
                    scale,
                    total,
                    weight_scale,
                    residual,
                    rows * group + r,
                    tile * TILE + lane,
                )

    @T.prim_func(private=True, s_tir=True)
    def plain(
        q: T.Buffer((width, padded), "int8"),
        scale: T.Buffer(row_shape, "float32"),
        total: T.Buffer(row_shape, "int32"),
        weight: T.Buffer(weight_shape, "uint8"),
        weight_scale: T.Buffer(scale_shape, scale_dtype),
        y: T.Buffer((width, columns), "float32"),
    ):
        for tile, rows in T.grid(tiles, width // group):
            with T.sblock("tile"):
                vt, vr = T.axis.remap("SS", [tile, rows])
                one_tile(q, scale, total, weight, weight_scale, None, y, vt, vr)

    @T.prim_func(private=True, s_tir=True)
    def added(
        q: T.Buffer((width, padded), "int8"),
        scale: T.Buffer(row_shape, "float32"),
        total: T.Buffer(row_shape, "int32"),
        weight: T.Buffer(weight_shape, "uint8"),
        weight_scale: T.Buffer(scale_shape, scale_dtype),
        residual: T.Buffer((width, columns), "float32"),
        y: T.Buffer((width, columns), "float32"),
    ):
        for tile, rows in T.grid(tiles, width // group):
            with T.sblock("tile"):
                vt, vr = T.axis.remap("SS", [tile, rows])
                one_tile(q, scale, total, weight, weight_scale, residual, y, vt, vr)

    return added if work.settings["residual"] else plain
