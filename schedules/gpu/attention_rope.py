"""Queries, keys and values of a step's own rows, made of its qkv as a block attends to them.

What schedules/gpu/rope.py would have written to q and to the cache a lane makes in the registers of
its fragments, which have both elements of the pairs that RoPE turns. So nothing of this step is
read from the cache, and the launch that reads the cache can be the one that writes it: of the
blocks that share a chain one does.
"""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from schedules.gpu.attention_fragments import WORDS, Sizes
from schedules.gpu.attention_fresh import (
    PIECE,
    fresh_keys_of,
    fresh_values_of,
    norm_factor,
    own_columns,
)
from schedules.gpu.attention_loads import Access, fetch_queries, loads
from schedules.gpu.attention_warp import Plan
from schedules.gpu.heads import Heads
from schedules.gpu.thread import add, mul, span


@dataclass(frozen=True)
class Step:
    """Buffers of a step, and whether a block is the one that writes the new slots of its chain.

    norms: weights of the queries' and of the keys' norm, or None.
    """

    qkv: Any
    norms: Any
    position: Any
    table: Any
    cache: Any
    writes: Any


def from_qkv(plan: Plan, sizes: Sizes, heads: Heads, eps: float | None = None) -> Access:
    """Of the rows' qkv, normed first with `eps`, and of the cache where the slots are older.

    The macros take a `Step`.
    """
    load_keys, load_values = loads(sizes)
    fresh_keys = fresh_keys_of(sizes, heads, eps)
    fresh_values = fresh_values_of(sizes, heads)

    def old(last):
        """The last slot that is read from the cache; where there is none, what is read is not
        used."""
        return T.max(last - plan.width, 0)

    @T.macro
    def old_keys(step, keys, kv, slot, last, warp, lane):
        load_keys(step, keys, kv, slot, old(last), warp, lane)

    @T.macro
    def old_values(step, values, kv, slot, last, warp, lane):
        load_values(step, values, kv, slot, old(last), warp, lane)

    @T.macro
    def fresh(step, keys, values, kv, slot, last, warp, lane):
        fresh_values(step, values, kv, slot, last, warp, lane)
        fresh_keys(step, keys, kv, slot, last, warp, lane)

    fetch = fetch_queries(plan, sizes, _load_query(heads, eps))
    return Access(fetch, old_keys, old_values, fresh)


def _load_query(heads: Heads, eps: float | None):
    """A macro that loads four elements of a query, normed and turned."""
    half, size, held = heads.half, heads.size, heads.half // 4
    normed, load_own = eps is not None, own_columns(heads)
    factor_of = norm_factor(heads, eps or 0.0)

    @T.macro
    def norm(step, loaded, other, row, head, column):
        low = T.sblock_alloc_buffer((held,), "float32", scope="local")
        high = T.sblock_alloc_buffer((held,), "float32", scope="local")
        factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
        # Of the lane whose columns these are.
        load_own(step.qkv, low, high, row, head, column // PIECE % 4)
        factor_of(low, high, factor)
        for i in T.unroll(WORDS):
            loaded[i] = mul(mul(loaded[i], step.norms[0][column + i]), factor[0])
            other[i] = mul(mul(other[i], step.norms[0][(column + half) % size + i]), factor[0])

    @T.macro
    def load(step, loaded, row, head, column):
        other = T.sblock_alloc_buffer((WORDS,), "float32", scope="local")
        turned = T.sblock_alloc_buffer((WORDS * 2,), "float32", scope="local")
        loaded[span(0, WORDS)] = step.qkv[row, span(head * size + column, WORDS)]
        other[span(0, WORDS)] = step.qkv[row, span(head * size + (column + half) % size, WORDS)]
        if normed:
            norm(step, loaded, other, row, head, column)
        for i in T.unroll(WORDS):
            turned[span(i * 2, 2)] = step.table[step.position[row], column % half + i, span(0, 2)]
        for i in T.unroll(WORDS):
            other[i] = mul(other[i], turned[i * 2 + 1])
            loaded[i] = add(
                mul(loaded[i], turned[i * 2]), T.Select(column < half, -other[i], other[i])
            )

    return load
