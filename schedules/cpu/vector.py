"""Vectors in llvm templates: loads, fixed-tree sums, the exponential, and the 8-bit dot product.

The helpers run while a template is parsed: each takes and returns expressions.
"""

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script import tirx as T

LANES = 8
"""float32 lanes of one register on AVX2; two registers on NEON."""


def lanes_for(size: int, most: int = 2 * LANES) -> int:
    """The largest power of two up to `most` that divides `size`: it fixes the tree of a sum."""
    lanes = most
    while size % lanes:
        lanes //= 2
    return lanes


def group_for(width: int, most: int = 4) -> int:
    """Rows that share one pass over the weights: the largest divisor of `width` up to `most`."""
    return max(group for group in range(1, most + 1) if width % group == 0)


def span(base, lanes: int):
    """The index of `lanes` elements from `base` on."""
    return T.Ramp(base, 1, lanes)


def splat(value, lanes: int):
    """`value` in every lane."""
    return T.Broadcast(value, lanes) if lanes > 1 else value


def vector(dtype: str, lanes: int) -> str:
    """The name of a vector type: ("float32", 8) -> "float32x8"."""
    return f"{dtype}x{lanes}" if lanes > 1 else dtype


def from_bf16(bits, lanes: int):
    """bfloat16 bits (uint16 vector) as float32, exactly."""
    wide = T.Cast(vector("uint32", lanes), bits)
    return T.reinterpret(vector("float32", lanes), T.shift_left(wide, splat(T.uint32(16), lanes)))


def tree_sum(buffer: tirx.Var, base, lanes: int):
    """Sum of `lanes` elements of a buffer, lower half plus upper half at every level."""
    values = [buffer[base + i] for i in range(lanes)]
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] + values[i + half] for i in range(half)]
    return values[0]


def tree_max(buffer: tirx.Var, base, lanes: int):
    """The largest of `lanes` elements of a buffer."""
    value = buffer[base]
    for i in range(1, lanes):
        value = T.max(value, buffer[base + i])
    return value


def sums_of_fours(part: tirx.Var, base):
    """The sums of eight times four elements as one vector: (0 + 2) + (1 + 3) of every four.

    Element i + 4 takes the upper half of the register whose lower half is element i: what was
    written four at a time is read so, and no shuffle crosses the halves.
    """

    def added(low, high, first, second):
        return T.Shuffle([low, high], first) + T.Shuffle([low, high], second)

    def fours(i):
        low, high = (part[span(base + 4 * at, 4)] for at in (i, i + 4))
        return T.Shuffle([low, high], list(range(8)))

    def pairs(i):
        low, high = fours(i), fours(i + 1)
        return added(low, high, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])

    return added(pairs(0), pairs(2), [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15])


def exp(x, lanes: int):
    """e^x for x <= 0 within 2 ulp, and exactly 0 below -87.

    Range reduction by log 2 in two parts and the minimax polynomial of Cephes' expf. Written out
    because a call of the C library's would not vectorise, and because linked code must not need it.
    """

    def const(value):
        return splat(T.float32(value), lanes)

    clamped = T.max(x, const(-87.0))
    n = T.nearbyint(clamped * const(1.4426950408889634))
    r = clamped - n * const(0.693359375) + n * const(2.12194440e-4)
    poly = const(1.9875691500e-4)
    for coefficient in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        poly = poly * r + const(coefficient)
    value = poly * r * r + r + const(1.0)
    exponent = T.Cast(vector("int32", lanes), n) + splat(T.int32(127), lanes)
    power = T.reinterpret(
        vector("float32", lanes), T.shift_left(exponent, splat(T.int32(23), lanes))
    )
    return T.Select(x < const(-87.0), const(0.0), value * power)


def log(x):
    """The natural logarithm of a positive float32 within 2 ulp; denormals count as 2^-126.

    x = m 2^e with m in [sqrt 1/2, sqrt 2) and the minimax polynomial of Cephes' logf. Written out
    for the same reasons as `exp`.
    """
    bits = T.reinterpret("int32", T.max(x, T.float32(2.0**-126)))
    # The bits of sqrt 1/2: what they leave above a whole exponent is m.
    e = T.shift_right(bits - 0x3F3504F3, 23)
    r = T.reinterpret("float32", bits - T.shift_left(e, 23)) - T.float32(1)
    poly = T.float32(7.0376836292e-2)
    for coefficient in (
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        poly = poly * r + T.float32(coefficient)
    power = T.Cast("float32", e)
    low = poly * r * r * r + power * T.float32(-2.12194440e-4) - T.float32(0.5) * r * r
    return r + low + power * T.float32(0.693359375)


@dataclass(frozen=True)
class DotProduct:
    """How the processor multiplies rows of four codes by the same four activations.

    A register of `codes` bytes holds `codes / 4` rows; their products are added to `lanes` partial
    sums of `dtype`, which hold a block of 128 elements at most before `widened` gives one int32 a
    row.
    """

    codes: int
    dtype: str
    lanes: int

    @property
    def rows(self) -> int:
        return self.codes // 4

    def step(self, partial, codes, x4):
        """`partial` plus products. codes: uint8 vector; x4: four int8 activations as one int32."""
        x = T.reinterpret(f"int8x{self.codes}", T.Broadcast(x4, self.rows))
        if self.dtype == "int32":
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            return T.call_llvm_pure_intrin("int32x4", name, partial, codes, x)
        # Codes are at most 2: a pair of products fits int16, and so does the sum of a block's 32.
        name = "llvm.x86.avx2.pmadd.ub.sw"
        return partial + T.call_llvm_pure_intrin("int16x16", name, codes, x)

    def widened(self, partial):
        """One int32 a row from the partial sums."""
        if self.dtype == "int32":
            return partial
        ones = T.Broadcast(T.int16(1), 16)
        return T.call_llvm_pure_intrin("int32x8", "llvm.x86.avx2.pmadd.wd", partial, ones)


AVX2 = DotProduct(codes=32, dtype="int16", lanes=16)
NEON = DotProduct(codes=16, dtype="int32", lanes=4)


def dot_product(target: tvm.target.Target) -> DotProduct:
    """The dot product of an llvm target. Raises ValueError for a processor that has neither."""
    triple = str(target.attrs.get("mtriple", ""))
    if triple.startswith("aarch64"):
        return NEON
    if triple.startswith("x86_64"):
        return AVX2
    raise ValueError(f"no 8-bit dot product is known for the processor {triple!r}")
