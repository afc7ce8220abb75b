"""Words of the cuda templates: one thread's arithmetic, and what the lanes of a warp exchange.

The helpers run while a template is parsed: each takes and returns expressions. Arithmetic that must
give the same bits in every kernel is spelled out (`fma`, `mul`, `add`), so that no compiler decides
from one kernel to the next which product and sum it fuses.
"""

import math
import struct

from tvm.script import tirx as T

WARP = 32
MAX_THREADS = 1024
STATIC_SHARED_BYTES = 48 * 1024
_EVERY_LANE = 0xFFFFFFFF
# Read once, so that it need not push the activations out of the nearest cache. A load of this form
# stays in front of `wait_for_others`, behind which the compiler moves plain ones.
_WEIGHTS = "ld.weak.global.L1::no_allocate.L2::128B.v4.u32"


def overlaps(target) -> bool:
    """Whether kernels for this target start while the one before still runs (sm_90 and later).

    Such a kernel waits by itself before it reads what another wrote (`wait_for_others`), or is made
    to wait first of all.
    """
    digits = "".join(c for c in str(target.attrs["arch"]) if c.isdigit())
    return int(digits) >= 90


@T.macro
def let_others_start():
    """Allow the next kernel to start; it waits for this one."""
    T.ptx.griddepcontrol.launch_dependents()


@T.macro
def wait_for_others():
    """Wait for the kernel before this one to end. Only what no kernel writes is read earlier."""
    T.ptx.griddepcontrol.wait()


@T.macro
def load_weights(words, first, address):
    """Four uint32 of what no kernel writes, from words[first] on."""
    T.ptx[_WEIGHTS](words[first], words[first + 1], words[first + 2], words[first + 3], address)


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def vector_width(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`: elements of one aligned load."""
    return math.gcd(size, most)


def span(base, lanes: int):
    """The index of `lanes` elements from `base` on."""
    return T.Ramp(base, 1, lanes) if lanes > 1 else base


def splat(value, lanes: int):
    """`value` in every lane."""
    return T.Broadcast(value, lanes) if lanes > 1 else value


def constant(value: float):
    """A float32 constant, rounded here so that the generated text names it exactly."""
    return T.float32(struct.unpack("<f", struct.pack("<f", value))[0])


def rolled(extent: int):
    """A loop that the compiler does not unroll, where more loads in flight would cost registers."""
    return T.serial(extent, annotations={"disable_unroll": True})


def fma(a, b, c):
    """a * b + c, rounded once."""
    return T.call_pure_extern("float32", "__fmaf_rn", a, b, c)


def mul(a, b):
    """a * b, never fused with a sum that follows."""
    return T.call_pure_extern("float32", "__fmul_rn", a, b)


def add(a, b):
    """a + b, never fused with a product before it."""
    return T.call_pure_extern("float32", "__fadd_rn", a, b)


def silu(value, lanes: int = 1):
    """value / (1 + exp(-value)), for a vector of `lanes` floats."""
    dtype = f"float32x{lanes}" if lanes > 1 else "float32"
    one = splat(T.float32(1), lanes)
    return value / T.call_pure_extern(dtype, "__fadd_rn", one, T.exp(-value))


def dp4a(a, b, c):
    """c plus the products of four signed bytes: int32 words a and b."""
    return T.call_pure_extern("int32", "__dp4a", a, b, c)


def from_bf16(bits):
    """The float32 that the uint16 `bits` of a bfloat16 stand for."""
    return T.reinterpret("float32", T.shift_left(T.Cast("uint32", bits), T.uint32(16)))


def from_lane(value, lane):
    """`value` as the given lane of the warp holds it."""
    return T.tvm_warp_shuffle(T.uint32(_EVERY_LANE), value, lane, WARP, WARP)


def across(value, distance):
    """`value` of the lane whose number differs in the bit `distance`."""
    return T.tvm_warp_shuffle_xor(T.uint32(_EVERY_LANE), value, distance, WARP, WARP)


@T.macro
def warp_sum(values, i, lanes):
    """Every one of `lanes` neighbouring lanes gets their sum of values[i]; the tree is a butterfly,
    in which both sides add the same two numbers."""
    for level in T.unroll(lanes.bit_length() - 1):
        values[i] = values[i] + across(values[i], T.shift_right(lanes // 2, level))


@T.macro
def warp_max(values, i):
    """Every lane gets the warp's largest values[i]."""
    for level in T.unroll(5):
        values[i] = T.max(values[i], across(values[i], T.shift_right(16, level)))


def integer_max(value):
    """The warp's largest int32 `value`, in every lane."""
    return T.call_pure_extern("int32", "__reduce_max_sync", T.uint32(_EVERY_LANE), value)


def integer_sum(value):
    """The warp's sum of int32 `value`, in every lane."""
    return T.call_pure_extern("int32", "__reduce_add_sync", T.uint32(_EVERY_LANE), value)
