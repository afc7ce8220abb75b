"""int8 activations on cuda: codes from floats, and their scale for every 128 columns of a row.

A group's largest magnitude and its sum of codes are exact in any order, so they come from a warp's
butterflies.
"""

import struct

from tvm.script import tirx as T

from schedules.gpu.thread import WARP, span, warp_max, warp_sum

GROUP = 128
LANE_COLUMNS = GROUP // WARP

LEAST_ABSMAX = struct.unpack("<i", struct.pack("<f", 1e-5))[0]
"""Bits of the least absmax. Bits of positive floats order as the floats do, with NaN above all."""
INFINITY = 0x7F800000


def magnitude(value):
    """The bits of |value| as int32."""
    return T.bitwise_and(T.reinterpret("int32", value), T.int32(0x7FFFFFFF))


def code_factor(largest):
    """What takes a value to its code, for the bits `largest` of the absmax.

    The scale tells of a NaN, whatever the codes are; the zeros behind a row stay zeros.
    """
    bound = T.reinterpret("float32", largest)
    return T.Select(largest > INFINITY, T.float32(0), T.float32(127) / bound)


def code(value, factor):
    """The int8 code of a value as int32."""
    rounded = T.nearbyint(value * factor)
    return T.Cast("int32", T.max(T.min(rounded, T.float32(127)), T.float32(-128)))


def code_scale(largest):
    """What one unit of a code stands for, for the bits `largest` of the absmax."""
    return T.reinterpret("float32", largest) / T.float32(127)


def packed_bytes(codes, first, lanes: int):
    """`lanes` codes from `first` on as the bytes of an int8 vector."""
    if lanes == 1:
        return T.Cast("int8", codes[first])
    word = T.bitwise_and(codes[first], 255)
    for j in range(1, lanes):
        byte = T.bitwise_and(codes[first + j], 255)
        word = T.bitwise_or(word, T.shift_left(byte, 8 * j))
    return T.reinterpret(f"int8x{lanes}", T.Cast(f"int{8 * lanes}", word))


@T.macro
def quantize_group(held, first, q, scale, total, row, group, lane):
    """One warp writes a group: lane l has its columns 4l..4l+3 in `held` from `first` on."""
    largest = T.sblock_alloc_buffer((1,), "int32", scope="local")
    factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
    codes = T.sblock_alloc_buffer((LANE_COLUMNS,), "int32", scope="local")
    count = T.sblock_alloc_buffer((1,), "int32", scope="local")
    largest[0] = LEAST_ABSMAX
    for j in T.unroll(LANE_COLUMNS):
        largest[0] = T.max(largest[0], magnitude(held[first + j]))
    warp_max(largest, 0)
    factor[0] = code_factor(largest[0])
    count[0] = 0
    for j in T.unroll(LANE_COLUMNS):
        codes[j] = code(held[first + j], factor[0])
        count[0] = count[0] + codes[j]
    q[row, span(group * GROUP + lane * LANE_COLUMNS, LANE_COLUMNS)] = packed_bytes(
        codes, 0, LANE_COLUMNS
    )
    warp_sum(count, 0, WARP)
    if lane == 0:
        scale[row, group] = code_scale(largest[0])
        total[row, group] = count[0]
