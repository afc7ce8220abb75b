"""Rules of the llvm target."""

from schedules.cpu.attention import attention
from schedules.cpu.choose import choose, softmax_parts
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
from schedules.cpu.step import accept, running, step_rows

RULES = {
    "accept": accept,
    "attention": attention,
    "choose": choose,
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
    "softmax_parts": softmax_parts,
    "running": running,
    "step_rows": step_rows,
}
