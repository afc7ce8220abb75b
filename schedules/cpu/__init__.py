"""Rules of the llvm target."""

from schedules.cpu.attention import attention
from schedules.cpu.elementwise import embed, low_bit_embed, rope_kv_write
from schedules.cpu.head import greedy, head
from schedules.cpu.low_bit_gemv import low_bit_linear
from schedules.cpu.norm import (
    final_norm,
    gated_norm_quantize,
    gated_quantize,
    norm_quantize,
    qk_norm,
    quantize,
)

RULES = {
    "attention": attention,
    "embed": embed,
    "final_norm": final_norm,
    "gated_norm_quantize": gated_norm_quantize,
    "gated_quantize": gated_quantize,
    "greedy": greedy,
    "head": head,
    "low_bit_embed": low_bit_embed,
    "low_bit_linear": low_bit_linear,
    "norm_quantize": norm_quantize,
    "qk_norm": qk_norm,
    "quantize": quantize,
    "rope_kv_write": rope_kv_write,
}
