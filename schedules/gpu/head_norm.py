"""The last RMSNorm on cuda, with the 8-bit terms of its rows: one block a row, held in registers.

The tree of both sums of squares depends on the row's size alone (schedules/gpu/norm.py).
"""

import struct

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.int8 import magnitude, packed_bytes
from schedules.gpu.norm import RowTile, choose_tile, normalizer
from schedules.gpu.thread import block_max, block_sum, constant, fma, mul, span
from schedules.workload import Workload


def final_norm_codes(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.head_ops.final_norm_codes`."""
    (width, size), _, (rows,) = work.shapes[:3]
    padded = work.shapes[4][2]
    tile = choose_tile(size, padded)
    vector, elements = tile.vector, tile.turns * tile.vector

    def load(x, row, k):
        return x[row, span(k, vector)]

    normalize = normalizer(tile, size, work.settings["eps"], load)
    measure, encode = _measurer(tile, work.settings), _encoder(tile, padded, work.settings)

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
            for tx in T.thread_binding(tile.threads, thread="threadIdx.x"):
                with T.sblock("row"):
                    row = T.axis.spatial(rows, bx)
                    thread = T.axis.spatial(tile.threads, tx)
                    held = T.sblock_alloc_buffer((elements,), "float32", scope="local")
                    largest = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    # A row that asks for nothing goes through row 0, so that all threads meet.
                    normalize(held, x, T.max(logit_rows[row], 0), weight, thread)
                    for turn in T.unroll(tile.turns):
                        if tile.first(turn, thread) < size:
                            normed[row, span(tile.first(turn, thread), vector)] = held[
                                span(turn * vector, vector)
                            ]
                    measure(held, largest, spread, floor, row, thread)
                    encode(held, largest, q, row, thread)

    return func


def _measurer(tile: RowTile, settings: dict):
    """A macro that writes a row's scale, the bounds of its lengths and its floor, and leaves the
    largest magnitude in `largest`."""
    elements = tile.turns * tile.vector
    (least,) = struct.unpack("<i", struct.pack("<f", settings["least_absmax"]))

    @T.macro
    def measure(held, largest, spread, floor, row, thread):
        bits = T.sblock_alloc_buffer((1,), "int32", scope="local")
        square = T.sblock_alloc_buffer((1,), "float32", scope="local")
        maxima = T.sblock_alloc_buffer((tile.warps,), "int32", scope="shared")
        sums = T.sblock_alloc_buffer((tile.warps,), "float32", scope="shared")
        bits[0] = least
        square[0] = T.float32(0)
        for i in T.unroll(elements):
            # Bits of positive floats order as the floats do, with NaN above all.
            bits[0] = T.max(bits[0], magnitude(held[i]))
            square[0] = fma(held[i], held[i], square[0])
        block_max(bits, maxima, tile.warps, thread)
        block_sum(square, sums, tile.warps, thread)
        largest[0] = T.reinterpret("float32", bits[0])
        if thread == 0:
            square[0] = fma(
                T.sqrt(square[0]), constant(settings["up"]), constant(settings["least_length"])
            )
            spread[row, 0] = largest[0] / T.float32(settings["most_code"])
            spread[row, 1] = square[0]
            spread[row, 2] = fma(
                constant(settings["code_error"]),
                largest[0] / T.float32(settings["most_code"]),
                mul(constant(settings["slack"]), square[0]),
            )
            floor[row] = settings["least_floor"]

    return measure


def _encoder(tile: RowTile, padded: int, settings: dict):
    """A macro that writes the two terms of a row's codes."""
    vector, elements, step = tile.vector, tile.turns * tile.vector, settings["low_codes"]

    @T.macro
    def encode(held, largest, q, row, thread):
        factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
        high = T.sblock_alloc_buffer((elements,), "int32", scope="local")
        low = T.sblock_alloc_buffer((elements,), "int32", scope="local")
        factor[0] = T.float32(settings["most_code"]) / largest[0]
        for i in T.unroll(elements):
            high[i] = T.Cast("int32", T.nearbyint(mul(held[i], factor[0])))
            low[i] = T.bitwise_and(high[i] + step // 2, step - 1) - step // 2
            high[i] = T.shift_right(high[i] - low[i], step.bit_length() - 1)
        for turn in T.unroll(tile.turns):
            if tile.first(turn, thread) < padded:
                q[row, 0, span(tile.first(turn, thread), vector)] = packed_bytes(
                    high, turn * vector, vector
                )
                q[row, 1, span(tile.first(turn, thread), vector)] = packed_bytes(
                    low, turn * vector, vector
                )

    return encode
