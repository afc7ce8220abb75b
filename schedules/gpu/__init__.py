"""Rules of the cuda target."""

import tvm
from tvm import tirx

from schedules.gpu import low_bit_gemv, low_bit_group_gemv, low_bit_group_mma, low_bit_mma
from schedules.gpu.attention import attention
from schedules.gpu.attention_parts import attention_join, attention_parts
from schedules.gpu.choose import choose, softmax_parts
from schedules.gpu.elementwise import embed, rope_kv_write
from schedules.gpu.head import greedy, head
from schedules.gpu.low_bit_embed import low_bit_embed
from schedules.gpu.norm import final_norm, gated_norm_quantize, norm_quantize
from schedules.gpu.qk_norm import qk_norm
from schedules.gpu.quantize import gated_quantize, quantize
from schedules.gpu.step import accept, step_rows
from schedules.workload import Workload


def low_bit_linear(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """The rule of the format and the width: one scale a matrix, or one a group."""
    for rule in (low_bit_mma, low_bit_gemv, low_bit_group_mma, low_bit_group_gemv):
        if made := rule.low_bit_linear(func, work, target):
            return made
    return None


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
    "low_bit_linear": low_bit_linear,
    "norm_quantize": norm_quantize,
    "qk_norm": qk_norm,
    "quantize": quantize,
    "rope_kv_write": rope_kv_write,
    "softmax_parts": softmax_parts,
    "step_rows": step_rows,
}
