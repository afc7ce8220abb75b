"""Operations that are two or three of others in one, with the same bits.

`bitmtp_tvm/fuse.py` puts them in place of their parts. Each block of a linear that quantises its
own input does that work once more, so it is for steps of a few rows.
"""

from collections.abc import Sequence

from tvm import te, tirx
from tvm.script import tirx as T

from relax_models.attention_ops import CHAIN_SLOTS, joined
from relax_models.formats import FORMATS
from relax_models.ops import (
    any_width,
    gated,
    low_bit_dots,
    quantized,
    rms_norm,
    rope_writer,
    stamp,
    stamped,
    with_residual,
)


def norm_low_bit_linear(
    segments: Sequence[int],
    size: int,
    kind: str,
    format_name: str,
    residual: bool,
    eps: float,
    activation: str = "",
) -> tirx.PrimFunc:
    """`ops.low_bit_linear` of `ops.norm_quantize`.

    x `(width, size)` float32, norm `(size,)` float32, then weight, weight_scale and residual as
    `ops.low_bit_linear` takes them -> y `(width, sum(segments))` float32. With an `activation`
    ("relu2", "silu") the two segments are a gate and as many rows up, and y is
    activation(gate) · up, `(width, segments[0])`.
    """
    x = te.placeholder((any_width(), size), "float32", "x")
    norm = te.placeholder((size,), "float32", "norm")
    return _linear_of(
        rms_norm(x, norm, eps),
        [x, norm],
        "norm_low_bit_linear",
        (segments, kind, format_name, residual),
        eps=eps,
        activation=activation,
    )


def quantize_low_bit_linear(
    segments: Sequence[int],
    size: int,
    kind: str,
    format_name: str,
    residual: bool,
    activation: str = "",
) -> tirx.PrimFunc:
    """`ops.low_bit_linear` of `ops.quantize`: as `norm_low_bit_linear`, without a norm."""
    x = te.placeholder((any_width(), size), "float32", "x")
    return _linear_of(
        x,
        [x],
        "quantize_low_bit_linear",
        (segments, kind, format_name, residual),
        activation=activation,
    )


def _linear_of(
    x: te.Tensor,
    inputs: Sequence[te.Tensor],
    op: str,
    linear: tuple[Sequence[int], str, str, bool],
    activation: str,
    **settings,
) -> tirx.PrimFunc:
    """A linear (segments, kind, format, residual) of `x` `(width, size)`, made of `inputs`."""
    segments, kind, format_name, residual = linear
    size = int(x.shape[1])
    parts = quantized(x, FORMATS[format_name].group or 0)
    weights, dot = low_bit_dots(*parts, segments, size, kind, format_name)
    if activation:
        dot = gated(dot, segments[0], activation)
    added, y = with_residual(dot, residual)
    return stamped(
        [*inputs, *weights, *added, y],
        op,
        format=format_name,
        segments=list(segments),
        residual=residual,
        size=size,
        activation=activation,
        **settings,
    )


def attention_join_quantize(num_heads: int, head_dim: int, group: int) -> tirx.PrimFunc:
    """`ops.quantize` of `attention_ops.attention_join`: takes what the latter takes, and gives what
    the former gives."""
    inputs, out = joined(num_heads, head_dim)
    return stamped(
        [*inputs, *quantized(out, group)],
        "attention_join_quantize",
        chain_slots=CHAIN_SLOTS,
        group=group,
    )


def norm_rope_kv_write(
    num_heads: int, num_kv_heads: int, head_dim: int, positions: int, slots: int, eps: float
) -> tirx.PrimFunc:
    """`ops.rope_kv_write` of `ops.qk_norm`.

    qkv, q_norm and k_norm as `ops.qk_norm` takes them, then what `ops.rope_kv_write` takes behind
    its first; the results are those of the latter.
    """
    half, heads = head_dim // 2, num_heads + 2 * num_kv_heads
    first_v, write = num_heads + num_kv_heads, rope_writer(num_heads, num_kv_heads, head_dim)

    def normed(qkv, square, q_norm, k_norm, i, h, d):
        mean = square[i, T.min(h, first_v - 1)] / T.float32(head_dim)
        weight = T.if_then_else(h < num_heads, q_norm[d], k_norm[d])
        value = qkv[i, h * head_dim + d] / T.sqrt(mean + T.float32(eps)) * weight
        return T.if_then_else(h < first_v, value, qkv[i, h * head_dim + d])

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv_: T.handle,
        q_norm: T.Buffer((head_dim,), "float32"),
        k_norm: T.Buffer((head_dim,), "float32"),
        position_: T.handle,
        boundary: T.Buffer((1,), "int32"),
        table: T.Buffer((positions, half, 2), "float32"),
        cache: T.Buffer((2, num_kv_heads, slots, head_dim), "float16"),
        q_: T.handle,
    ):
        width = T.int64()
        qkv = T.match_buffer(qkv_, (width, heads * head_dim), "float32")
        position = T.match_buffer(position_, (width,), "int32")
        q = T.match_buffer(q_, (width, num_heads, head_dim), "float32")
        square = T.sblock_alloc_buffer((width, first_v), "float32")
        x = T.sblock_alloc_buffer((width, heads * head_dim), "float32")
        for i, h, d in T.grid(width, first_v, head_dim):
            with T.sblock("square"):
                vi, vh, vd = T.axis.remap("SSR", [i, h, d])
                with T.init():
                    square[vi, vh] = T.float32(0)
                square[vi, vh] = square[vi, vh] + (
                    qkv[vi, vh * head_dim + vd] * qkv[vi, vh * head_dim + vd]
                )
        for i, h, d in T.grid(width, heads, head_dim):
            with T.sblock("normed"):
                vi, vh, vd = T.axis.remap("SSS", [i, h, d])
                x[vi, vh * head_dim + vd] = normed(qkv, square, q_norm, k_norm, vi, vh, vd)
        write(x, position, boundary, table, cache, q, width)

    return stamp(func, "norm_rope_kv_write", eps=eps)
