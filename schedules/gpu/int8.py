"""int8 activations on cuda: codes from floats, and their scale for every 128 columns of a row.

A group's largest magnitude and its sum of codes are exact in any order.
"""

import struct

from tvm.script import tirx as T

from schedules.gpu.thread import WARP, add, dp4a, integer_max, integer_sum, mul, span

GROUP = 128
LANE_COLUMNS = GROUP // WARP

LEAST_ABSMAX = struct.unpack("<i", struct.pack("<f", 1e-5))[0]
"""Bits of the least absmax. Bits of positive floats order as the floats do, with NaN above all."""
INFINITY = 0x7F800000

# 1.5 * 2^23: floats around it are whole numbers, and their last byte that of the whole number less
# this one.
ROUNDING = 12582912.0


def magnitude(value):
    """The bits of |value| as int32."""
    return T.bitwise_and(T.reinterpret("int32", value), T.int32(0x7FFFFFFF))


def code_factor(largest):
    """What takes a value to its code, for the bits `largest` of the absmax.

    The scale tells of a NaN, whatever the codes are; the zeros behind a row stay zeros.
    """
    bound = T.reinterpret("float32", largest)
    return T.Select(largest > INFINITY, T.float32(0), T.float32(127) / bound)


def code_scale(largest):
    """What one unit of a code stands for, for the bits `largest` of the absmax."""
    return T.reinterpret("float32", largest) / T.float32(127)


def code_word(values, first, factor):
    """The int8 codes of four values from `first` on as the bytes of an int32.

    The sum rounds to whole numbers, half to even, and ends in the bits of the code: no value times
    its factor is beyond 127 by more than rounding.
    """
    a, b, c, d = (
        T.reinterpret("uint32", add(mul(values[first + i], factor), T.float32(ROUNDING)))
        for i in range(LANE_COLUMNS)
    )
    return _bytes("int32", _bytes("uint32", a, b, 0x0040), _bytes("uint32", c, d, 0x0040), 0x5410)


def _bytes(dtype: str, a, b, selector: int):
    """Four bytes of a and b, by the digits of the selector."""
    return T.call_pure_extern(dtype, "__byte_perm", a, b, T.uint32(selector))


def code_sum(word, start):
    """`start` plus the four codes of a word."""
    return dp4a(word, 0x01010101, start)


@T.macro
def quantize_group(held, first, q, scale, total, row, group, lane):
    """One warp writes a group: lane l has its columns 4l..4l+3 in `held` from `first` on."""
    largest = T.sblock_alloc_buffer((1,), "int32", scope="local")
    factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
    word = T.sblock_alloc_buffer((1,), "int32", scope="local")
    count = T.sblock_alloc_buffer((1,), "int32", scope="local")
    largest[0] = LEAST_ABSMAX
    for j in T.unroll(LANE_COLUMNS):
        largest[0] = T.max(largest[0], magnitude(held[first + j]))
    largest[0] = integer_max(largest[0])
    factor[0] = code_factor(largest[0])
    word[0] = code_word(held, first, factor[0])
    q[row, span(group * GROUP + lane * LANE_COLUMNS, LANE_COLUMNS)] = T.reinterpret(
        "int8x4", word[0]
    )
    count[0] = integer_sum(code_sum(word[0], 0))
    if lane == 0:
        scale[row, group] = code_scale(largest[0])
        total[row, group] = count[0]
