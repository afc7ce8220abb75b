"""Rules and templates of the cuda target."""

from schedules.gpu import (
    attention,
    attention_parts,
    attention_split,
    attention_split_rope,
    attention_whole,
    fused_linear,
    gemv_tile,
    head_codes,
    low_bit_group_mma,
    low_bit_group_mma_wide,
    low_bit_mma,
    low_bit_mma_wide,
)
from schedules.gpu.attention_join import attention_join, attention_join_quantize
from schedules.gpu.choose import choose, softmax_parts
from schedules.gpu.elementwise import embed
from schedules.gpu.head import greedy, head
from schedules.gpu.head_norm import final_norm_codes
from schedules.gpu.head_rescore import head_rescore
from schedules.gpu.low_bit_embed import low_bit_embed
from schedules.gpu.norm import final_norm, gated_norm_quantize, norm_quantize
from schedules.gpu.qk_norm import qk_norm
from schedules.gpu.quantize import gated_quantize, quantize
from schedules.gpu.rope import norm_rope_kv_write, rope_kv_write
from schedules.gpu.step import accept, step_rows

TEMPLATES = {
    "attention": (attention_whole.TEMPLATE, attention.TEMPLATE),
    "attention_parts": (attention_split.TEMPLATE, attention_parts.TEMPLATE),
    "head_codes": (head_codes.TEMPLATE,),
    "low_bit_linear": (
        low_bit_mma_wide.TEMPLATE,
        low_bit_mma.TEMPLATE,
        low_bit_mma_wide.SOME_ROWS,
        gemv_tile.TEMPLATE,
        low_bit_mma.FEW_ROWS,
        low_bit_group_mma_wide.TEMPLATE,
        low_bit_group_mma.TEMPLATE,
        low_bit_group_mma_wide.SOME_ROWS,
        gemv_tile.GROUP_TEMPLATE,
    ),
    "norm_low_bit_linear": (fused_linear.TEMPLATE,),
    "quantize_low_bit_linear": (fused_linear.TEMPLATE,),
    "rope_attention_parts": (attention_split_rope.TEMPLATE,),
}

RULES = {
    "accept": accept,
    "attention_join": attention_join,
    "attention_join_quantize": attention_join_quantize,
    "choose": choose,
    "embed": embed,
    "final_norm": final_norm,
    "final_norm_codes": final_norm_codes,
    "gated_norm_quantize": gated_norm_quantize,
    "gated_quantize": gated_quantize,
    "greedy": greedy,
    "head": head,
    "head_rescore": head_rescore,
    "low_bit_embed": low_bit_embed,
    "norm_quantize": norm_quantize,
    "norm_rope_kv_write": norm_rope_kv_write,
    "qk_norm": qk_norm,
    "quantize": quantize,
    "rope_kv_write": rope_kv_write,
    "softmax_parts": softmax_parts,
    "step_rows": step_rows,
}
