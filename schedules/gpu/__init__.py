"""Rules of the cuda target."""

from schedules.gpu.attention import attention
from schedules.gpu.elementwise import embed, rope_kv_write
from schedules.gpu.head import greedy, head
from schedules.gpu.low_bit_gemv import low_bit_linear
from schedules.gpu.norm import final_norm, gated_norm_quantize, norm_quantize

RULES = {
    "attention": attention,
    "embed": embed,
    "final_norm": final_norm,
    "gated_norm_quantize": gated_norm_quantize,
    "greedy": greedy,
    "head": head,
    "low_bit_linear": low_bit_linear,
    "norm_quantize": norm_quantize,
    "rope_kv_write": rope_kv_write,
}
