"""Rules and templates of the cuda target."""

from schedules.gpu import (
    fused_linear,
    low_bit_gemv,
    low_bit_group_gemv,
    low_bit_group_mma,
    low_bit_mma,
)
from schedules.gpu.attention import attention
from schedules.gpu.attention_parts import attention_join, attention_parts
from schedules.gpu.choose import choose, softmax_parts
from schedules.gpu.elementwise import embed
from schedules.gpu.head import greedy, head
from schedules.gpu.low_bit_embed import low_bit_embed
from schedules.gpu.norm import final_norm, gated_norm_quantize, norm_quantize
from schedules.gpu.qk_norm import qk_norm
from schedules.gpu.quantize import gated_quantize, quantize
from schedules.gpu.rope import norm_rope_kv_write, rope_kv_write
from schedules.gpu.step import accept, step_rows

TEMPLATES = {
    "low_bit_linear": (
        low_bit_mma.TEMPLATE,
        low_bit_gemv.TEMPLATE,
        low_bit_group_mma.TEMPLATE,
        low_bit_group_gemv.TEMPLATE,
    ),
    "norm_low_bit_linear": (fused_linear.TEMPLATE,),
    "quantize_low_bit_linear": (fused_linear.TEMPLATE,),
}

RULES = {
    "accept": accept,
    "attention": attention,
    "attention_join": attention_join,
    "attention_parts": attention_parts,
    "choose": choose,
    "embed": embed,
    "final_norm": final_norm,
    "gated_norm_quantize": gated_norm_quantize,
    "gated_quantize": gated_quantize,
    "greedy": greedy,
    "head": head,
    "low_bit_embed": low_bit_embed,
    "norm_quantize": norm_quantize,
    "norm_rope_kv_write": norm_rope_kv_write,
    "qk_norm": qk_norm,
    "quantize": quantize,
    "rope_kv_write": rope_kv_write,
    "softmax_parts": softmax_parts,
    "step_rows": step_rows,
}
