"""Ternary linear on the processor: codes unpacked in registers, 8-bit dot products, int32 sums.

One task is a tile of 8 weight rows: its words stay in the first-level cache while groups of up to
four activation rows pass over them. The layout is that of relax_models/formats.py for "llvm": a
32-byte word holds 8 rows x 4 codes four times over, two bits each.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.cpu.vector import DotProduct, dot_product, group_for, span
from schedules.workload import Workload, segment_scale

TILE = 8
WORDS = 8
WORD_BYTES = 32
K_BLOCK = 128


def low_bit_linear(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.low_bit_linear`."""
    if work.settings["format"] != "bitnet-ternary":
        return None
    return _template(work, dot_product(target), group_for(work.width))


def _template(work: Workload, dot: DotProduct, group: int) -> tirx.PrimFunc:
    width, columns = work.shapes[-1]
    padded = work.shapes[0][1]
    weight_shape = work.shapes[3]
    tiles, blocks = weight_shape[:2]
    segments = work.settings["segments"]
    parts = WORD_BYTES // dot.codes
    num_sums, num_partials = group * TILE, group * parts * dot.lanes

    def codes(weight, tile, block, word, part, step):
        loaded = weight[tile, block, word, span(part * dot.codes, dot.codes)]
        shifted = T.shift_right(loaded, T.Broadcast(T.Cast("uint8", 2 * step), dot.codes))
        return T.bitwise_and(shifted, T.Broadcast(T.uint8(3), dot.codes))

    def four(q, row, block, word, step):
        return T.reinterpret("int32", q[row, span(block * K_BLOCK + word * 16 + step * 4, 4)])

    def partial_of(row, part):
        return span((row * parts + part) * dot.lanes, dot.lanes)

    def sums_of(row, part):
        return span(row * TILE + part * dot.rows, dot.rows)

    @T.macro
    def accumulate(q, weight, sums, tile, first):
        partial = T.sblock_alloc_buffer((num_partials,), dot.dtype, scope="local")
        unpacked = T.sblock_alloc_buffer((dot.codes,), "uint8", scope="local")
        for i in T.unroll(num_sums // TILE):
            sums[span(i * TILE, TILE)] = T.Broadcast(0, TILE)
        for block in range(blocks):
            for i in T.unroll(num_partials // dot.lanes):
                partial[span(i * dot.lanes, dot.lanes)] = T.Broadcast(
                    T.Cast(dot.dtype, 0), dot.lanes
                )
            for word, step, part in T.grid(WORDS, 4, parts):
                unpacked[span(0, dot.codes)] = codes(weight, tile, block, word, part, step)
                for r in T.unroll(group):
                    partial[partial_of(r, part)] = dot.step(
                        partial[partial_of(r, part)],
                        unpacked[span(0, dot.codes)],
                        four(q, first + r, block, word, step),
                    )
            for r in T.unroll(group):
                for part in T.unroll(parts):
                    sums[sums_of(r, part)] = sums[sums_of(r, part)] + dot.widened(
                        partial[partial_of(r, part)]
                    )

    def result(sums, r, lane, scale, total, weight_scale, residual, row, n):
        exact = T.Cast("float32", sums[r * TILE + lane] - total[row])
        value = exact * (scale[row] * segment_scale(weight_scale, n, segments))
        return value if residual is None else value + residual[row, n]

    @T.macro
    def one_tile(q, scale, total, weight, weight_scale, residual, y, tile):
        sums = T.sblock_alloc_buffer((num_sums,), "int32", scope="local")
        for rows in range(width // group):
            accumulate(q, weight, sums, tile, rows * group)
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
        scale: T.Buffer((width,), "float32"),
        total: T.Buffer((width,), "int32"),
        weight: T.Buffer(weight_shape, "uint8"),
        weight_scale: T.Buffer((len(segments),), "float32"),
        y: T.Buffer((width, columns), "float32"),
    ):
        for tile in T.parallel(tiles):
            with T.sblock("tile"):
                vt = T.axis.spatial(tiles, tile)
                one_tile(q, scale, total, weight, weight_scale, None, y, vt)

    @T.prim_func(private=True, s_tir=True)
    def added(
        q: T.Buffer((width, padded), "int8"),
        scale: T.Buffer((width,), "float32"),
        total: T.Buffer((width,), "int32"),
        weight: T.Buffer(weight_shape, "uint8"),
        weight_scale: T.Buffer((len(segments),), "float32"),
        residual: T.Buffer((width, columns), "float32"),
        y: T.Buffer((width, columns), "float32"),
    ):
        for tile in T.parallel(tiles):
            with T.sblock("tile"):
                vt = T.axis.spatial(tiles, tile)
                one_tile(q, scale, total, weight, weight_scale, residual, y, vt)

    return added if work.settings["residual"] else plain
