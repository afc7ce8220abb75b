"""The last RMSNorm on cuda, with the 8-bit terms of its rows: one block a row, held in registers.

The tree of both sums of squares depends on the row's size alone: the norm's is that of
schedules/gpu/row.py, and the length's goes over the warps of a block that the size decides.
"""

import struct

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.int8 import magnitude
from schedules.gpu.norm import asking, choose_tile, normed_rows
from schedules.gpu.row import HALVES, LANE_COLUMNS, RowTile
from schedules.gpu.thread import (
    WARP,
    add,
    constant,
    fma,
    let_others_start,
    mul,
    overlaps,
    span,
    warp_sum,
)
from schedules.workload import Workload


def final_norm_codes(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.head_ops.final_norm_codes`."""
    (width, size), _, (rows,) = work.shapes[:3]
    padded = work.shapes[4][2]
    tile, early = choose_tile(size, padded), overlaps(target)
    threads = tile.warps * WARP
    normed_row = normed_rows(tile, work.settings["eps"], asking(tile), early)
    measure, write = _measurer(tile, work.settings), _writer(tile, work.settings)

    @T.macro
    def one_row(x, weight, logit_rows, normed, q, spread, floor, row, thread):
        held = T.sblock_alloc_buffer((tile.held,), "float32", scope="local")
        inverse = T.sblock_alloc_buffer((1,), "float32", scope="local")
        largest = T.sblock_alloc_buffer((1,), "int32", scope="local")
        factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
        if early:
            let_others_start()
        normed_row(
            (x, logit_rows),
            weight,
            held,
            inverse,
            largest,
            None,
            row,
            thread // WARP,
            thread % WARP,
        )
        for i in T.unroll(tile.held):
            held[i] = mul(held[i], inverse[0])
        measure(held, inverse, largest, factor, spread, floor, row, thread)
        for turn in T.unroll(tile.turns):
            for half in T.unroll(HALVES):
                write(held, factor, normed, q, row, turn, half, thread // WARP, thread % WARP)

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, size), "float32"),
        weight: T.Buffer((size,), "float32"),
        logit_rows: T.Buffer((rows,), "int32"),
        normed: T.Buffer((rows, size), "float32"),
        q: T.Buffer((rows, 2, padded), "int8"),
        spread: T.Buffer((rows, 3), "float32"),
        floor: T.Buffer((rows,), "int32"),
    ):
        for bx in T.thread_binding(rows, thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("row"):
                    row = T.axis.spatial(rows, bx)
                    thread = T.axis.spatial(threads, tx)
                    one_row(x, weight, logit_rows, normed, q, spread, floor, row, thread)

    return func


def _measurer(tile: RowTile, settings: dict):
    """A macro that writes a row's scale, the bounds of its lengths and its floor, and leaves in
    `factor` what takes a value to its code; `largest` and `inverse` are a `normalizer`'s."""
    (least,) = struct.unpack("<i", struct.pack("<f", settings["least_absmax"]))

    @T.macro
    def measure(held, inverse, largest, factor, spread, floor, row, thread):
        square = T.sblock_alloc_buffer((1,), "float32", scope="local")
        bound = T.sblock_alloc_buffer((1,), "float32", scope="local")
        sums = T.sblock_alloc_buffer((tile.warps,), "float32", scope="shared")
        square[0] = T.float32(0)
        for i in T.unroll(tile.held):
            square[0] = fma(held[i], held[i], square[0])
        warp_sum(square, 0, WARP)
        if thread % WARP == 0:
            sums[thread // WARP] = square[0]
        T.tvm_storage_sync("shared")
        # Bits of positive floats order as the floats do, with NaN above all.
        bound[0] = T.reinterpret(
            "float32",
            T.max(magnitude(mul(T.reinterpret("float32", largest[0]), inverse[0])), least),
        )
        factor[0] = T.float32(settings["most_code"]) / bound[0]
        if thread == 0:
            square[0] = sums[0]
            for i in T.unroll(tile.warps - 1):
                square[0] = add(square[0], sums[i + 1])
            square[0] = fma(
                T.sqrt(square[0]), constant(settings["up"]), constant(settings["least_length"])
            )
            spread[row, 0] = bound[0] / T.float32(settings["most_code"])
            spread[row, 1] = square[0]
            spread[row, 2] = fma(
                constant(settings["code_error"]),
                bound[0] / T.float32(settings["most_code"]),
                mul(constant(settings["slack"]), square[0]),
            )
            floor[row] = settings["least_floor"]

    return measure


def _writer(tile: RowTile, settings: dict):
    """A macro that writes a lane's columns of half a span: the floats, and both terms of their
    codes."""
    vector, step = tile.vector, settings["low_codes"]

    def packed(codes):
        """Four codes as the bytes of an int8 vector."""
        word = T.bitwise_and(codes[0], 255)
        for j in range(1, LANE_COLUMNS):
            byte = T.bitwise_and(codes[j], 255)
            word = T.bitwise_or(word, T.shift_left(byte, 8 * j))
        return T.reinterpret("int8x4", word)

    @T.macro
    def write(held, factor, normed, q, row, turn, half, warp, lane):
        high = T.sblock_alloc_buffer((LANE_COLUMNS,), "int32", scope="local")
        low = T.sblock_alloc_buffer((LANE_COLUMNS,), "int32", scope="local")
        for v in T.unroll(LANE_COLUMNS // vector):
            if tile.within(tile.column(turn, half, warp, lane) + v * vector, tile.size):
                normed[row, span(tile.column(turn, half, warp, lane) + v * vector, vector)] = held[
                    span(tile.at(0, turn) + half * LANE_COLUMNS + v * vector, vector)
                ]
        for i in T.unroll(LANE_COLUMNS):
            high[i] = T.Cast(
                "int32",
                T.nearbyint(mul(held[tile.at(0, turn) + half * LANE_COLUMNS + i], factor[0])),
            )
            low[i] = T.bitwise_and(high[i] + step // 2, step - 1) - step // 2
            high[i] = T.shift_right(high[i] - low[i], step.bit_length() - 1)
        if tile.within(tile.column(turn, half, warp, lane), tile.padded):
            q[row, 0, span(tile.column(turn, half, warp, lane), LANE_COLUMNS)] = packed(high)
            q[row, 1, span(tile.column(turn, half, warp, lane), LANE_COLUMNS)] = packed(low)

    return write
