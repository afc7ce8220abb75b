"""The numpy twin of everything that is compiled: each operation here, the whole forward pass in
`model`, which needs a checkpoint."""

from bitmtp_tvm.reference.choose import choose, philox4x32, softmax_parts
from bitmtp_tvm.reference.ops import (
    attention,
    dequantize,
    embed,
    gated,
    gated_norm_quantize,
    gated_quantize,
    greedy,
    group_linear,
    head,
    low_bit_accumulate,
    low_bit_embed,
    low_bit_linear,
    qk_norm,
    quantize,
    quantize_groups,
    rms_norm,
    rope,
    silu,
)

__all__ = [
    "attention",
    "choose",
    "dequantize",
    "embed",
    "gated",
    "gated_norm_quantize",
    "gated_quantize",
    "greedy",
    "group_linear",
    "head",
    "low_bit_accumulate",
    "low_bit_embed",
    "low_bit_linear",
    "philox4x32",
    "qk_norm",
    "quantize",
    "quantize_groups",
    "rms_norm",
    "rope",
    "silu",
    "softmax_parts",
]
