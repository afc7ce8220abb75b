"""The first half of a decode step's attention together with what comes before it: one operation in
place of the rotation, the cache write and `attention_ops.attention_parts`.

`bitmtp_tvm/fuse.py` puts them in place of their parts, and they give the same bits.
"""

from collections.abc import Callable

from tvm import tirx
from tvm.script import tirx as T

from relax_models.attention_ops import CHAIN_SLOTS, CHAINS, NEG_INF
from relax_models.ops import rope_writer, stamp


def rope_attention_parts(
    num_heads: int, num_kv_heads: int, head_dim: int, positions: int, slots: int
) -> tirx.PrimFunc:
    """`attention_ops.attention_parts` of `ops.rope_kv_write`.

    qkv, position, boundary, table and cache as the latter takes them, and visible; the results are
    those of the former, and the cache is written in place.
    """
    half, columns = head_dim // 2, (num_heads + 2 * num_kv_heads) * head_dim
    write = rope_writer(num_heads, num_kv_heads, head_dim)
    attend = _attend(num_heads, num_kv_heads, head_dim, slots)

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv_: T.handle,
        position_: T.handle,
        boundary: T.Buffer((1,), "int32"),
        table: T.Buffer((positions, half, 2), "float32"),
        cache: T.Buffer((2, num_kv_heads, slots, head_dim), "float16"),
        visible_: T.handle,
        tops_: T.handle,
        norms_: T.handle,
        mixed_: T.handle,
    ):
        width = T.int64()
        qkv = T.match_buffer(qkv_, (width, columns), "float32")
        position = T.match_buffer(position_, (width,), "int32")
        visible = T.match_buffer(visible_, (width, 2), "uint32")
        tops = T.match_buffer(tops_, (width, num_heads, CHAINS), "float32")
        norms = T.match_buffer(norms_, (width, num_heads, CHAINS), "float32")
        mixed = T.match_buffer(mixed_, (width, num_heads, CHAINS, head_dim), "float32")
        q = T.sblock_alloc_buffer((width, num_heads, head_dim), "float32")
        write(qkv, position, boundary, table, cache, q, width)
        attend(q, cache, boundary, visible, tops, norms, mixed, width)

    return stamp(func, "rope_attention_parts", chains=CHAINS, chain_slots=CHAIN_SLOTS)


def _attend(heads: int, kv_heads: int, head_dim: int, slots: int) -> Callable:
    """A macro for `attention_ops.attention_parts`."""
    group, turns = heads // kv_heads, -(-slots // (CHAINS * CHAIN_SLOTS))

    def slot_of(c, turn, j):
        return T.min((turn * CHAINS + c) * CHAIN_SLOTS + j, slots - 1)

    def sees(visible, boundary, width, i, c, turn, j):
        """Whether row i sees slot j of a turn of chain c, and there is such a slot."""
        slot = (turn * CHAINS + c) * CHAIN_SLOTS + j
        at = T.Cast("int64", slot) - T.Cast("int64", boundary[0])
        word = visible[i, T.min(T.max(at, T.int64(0)), width - 1) // 32]
        bit = T.bitwise_and(T.shift_right(word, T.Cast("uint32", at % 32)), T.uint32(1))
        mine = T.And(at < width, bit == T.uint32(1))
        return T.And(slot < slots, T.Or(at < 0, mine))

    @T.macro
    def attend(q, cache, boundary, visible, tops, norms, mixed, width):
        score = T.sblock_alloc_buffer((width, heads, slots), "float32")
        for i, h, t, d in T.grid(width, heads, slots, head_dim):
            with T.sblock("score"):
                vi, vh, vt, vd = T.axis.remap("SSSR", [i, h, t, d])
                with T.init():
                    score[vi, vh, vt] = T.float32(0)
                score[vi, vh, vt] = score[vi, vh, vt] + q[vi, vh, vd] * T.Cast(
                    "float32", cache[0, vh // group, vt, vd]
                )
        for i, h, c, turn, j in T.grid(width, heads, CHAINS, turns, CHAIN_SLOTS):
            with T.sblock("tops"):
                vi, vh, vc, vt, vj = T.axis.remap("SSSRR", [i, h, c, turn, j])
                with T.init():
                    tops[vi, vh, vc] = T.float32(NEG_INF)
                tops[vi, vh, vc] = T.max(
                    tops[vi, vh, vc],
                    T.if_then_else(
                        sees(visible, boundary, width, vi, vc, vt, vj),
                        score[vi, vh, slot_of(vc, vt, vj)] * T.float32(head_dim**-0.5),
                        T.float32(NEG_INF),
                    ),
                )
        for i, h, c, turn, j in T.grid(width, heads, CHAINS, turns, CHAIN_SLOTS):
            with T.sblock("norms"):
                vi, vh, vc, vt, vj = T.axis.remap("SSSRR", [i, h, c, turn, j])
                with T.init():
                    norms[vi, vh, vc] = T.float32(0)
                norms[vi, vh, vc] = norms[vi, vh, vc] + T.if_then_else(
                    sees(visible, boundary, width, vi, vc, vt, vj),
                    T.exp(
                        score[vi, vh, slot_of(vc, vt, vj)] * T.float32(head_dim**-0.5)
                        - tops[vi, vh, vc]
                    ),
                    T.float32(0),
                )
        for i, h, c, d, turn, j in T.grid(width, heads, CHAINS, head_dim, turns, CHAIN_SLOTS):
            with T.sblock("mixed"):
                vi, vh, vc, vd, vt, vj = T.axis.remap("SSSSRR", [i, h, c, d, turn, j])
                with T.init():
                    mixed[vi, vh, vc, vd] = T.float32(0)
                mixed[vi, vh, vc, vd] = mixed[vi, vh, vc, vd] + T.if_then_else(
                    sees(visible, boundary, width, vi, vc, vt, vj),
                    T.exp(
                        score[vi, vh, slot_of(vc, vt, vj)] * T.float32(head_dim**-0.5)
                        - tops[vi, vh, vc]
                    )
                    * T.Cast("float32", cache[1, vh // group, slot_of(vc, vt, vj), vd]),
                    T.float32(0),
                )

    return attend
