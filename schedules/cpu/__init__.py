"""Rules and schedule spaces of the llvm target."""

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
from schedules.sampled import Space, tasks, tiled

ALONE = 1 << 14
"""Elements that norms and quantisation take some 10 µs for; waking a thread takes 2 to 3."""

RULES = {
    "accept": accept,
    "attention": Space(attention, tasks("head")),
    # A few rows, and TVM reads this function back from a database as another one.
    "choose": choose,
    "embed": embed,
    "final_norm": Space(final_norm, tasks("row", ALONE)),
    "gated_norm_quantize": Space(gated_norm_quantize, tasks("row", ALONE)),
    "gated_quantize": Space(gated_quantize, tasks("row", ALONE)),
    "greedy": Space(greedy, tasks("row")),
    "head": Space(head, tiled("token")),
    "low_bit_embed": low_bit_embed,
    "low_bit_linear": Space(low_bit_linear, tiled("tile")),
    "norm_quantize": Space(norm_quantize, tasks("row", ALONE)),
    "qk_norm": Space(qk_norm, tasks("head")),
    "quantize": Space(quantize, tasks("row", ALONE)),
    "rope_kv_write": rope_kv_write,
    "softmax_parts": Space(softmax_parts, tasks("part")),
    "running": running,
    "step_rows": step_rows,
}
