"""What one warp of `schedules.gpu.attention` does with its tiles of slots: scores, weights, values.

A lane owns a slot while scores are made, and a few elements of the head while values are added up.
"""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from schedules.gpu.thread import (
    WARP,
    constant,
    fma,
    from_lane,
    mul,
    rolled,
    span,
    warp_max,
    warp_sum,
)
from schedules.workload import Workload

TILE = WARP

NEG_INF = -3.0e38
"""Score of a slot that a row does not see: finite, so that the difference of two is no NaN."""

MASK_WORDS = 2
MAX_VISIBLE = 32 * MASK_WORDS
SLOTS_AHEAD = 8


@dataclass(frozen=True)
class AttentionTile:
    """How much a block and a lane take at once; nothing here is part of the tree.

    pairs: (row, head) pairs of a block; key, value: float16 elements of one load of a lane;
    keys_ahead: loads of a key that a lane has in flight; value_turns: loads for a slot's value.
    """

    pairs: int
    key: int
    keys_ahead: int
    value: int
    value_turns: int

    @property
    def held(self) -> int:
        """Elements of the weighted sum of values that a lane holds for each pair."""
        return self.value * self.value_turns


@dataclass(frozen=True)
class Plan:
    """Sizes of one attention, and the expressions for who is who and who sees what.

    The pairs of a key/value head are numbered row by row; `first` is a block's first one, and
    tile.pairs are a block's.
    """

    width: int
    group: int
    head_dim: int
    causal: bool
    tile: Any
    # Slot t belongs to chain t / chain_slots mod `chains`: part of the tree, the same for every
    # width.
    chains: int
    chain_slots: int

    @property
    def pairs(self) -> int:
        return self.width * self.group

    def row_of(self, first, i):
        return T.min(first + i, self.pairs - 1) // self.group

    def head_of(self, kv, first, i):
        return kv * self.group + T.min(first + i, self.pairs - 1) % self.group

    def end(self, boundary, first):
        """The first slot that no row of a block sees."""
        if not self.causal:
            return boundary + self.width
        return boundary + self.row_of(first, self.tile.pairs - 1) + 1

    def sees(self, masks, i, first, slot, boundary):
        """Whether pair `i` of a block sees a slot; `masks` has MASK_WORDS words a pair."""
        if self.causal:
            return slot <= boundary + self.row_of(first, i)
        low, high = masks[i * MASK_WORDS], masks[i * MASK_WORDS + 1]
        word = T.Select(slot - boundary < 32, low, high)
        bit = T.shift_right(word, T.Cast("uint32", T.bitwise_and(slot - boundary, 31)))
        marked = T.bitwise_and(bit, T.uint32(1)) == T.uint32(1)
        return T.Or(slot < boundary, T.And(slot < boundary + self.width, marked))


def plan_of(work: Workload, tile: Any, chains: int, chain_slots: int) -> Plan:
    """The plan of `attention` or `attention_parts`.

    Raises ValueError for masks of more than 64 rows.
    """
    width, heads, head_dim = work.shapes[0]
    causal = work.settings.get("causal", False)
    if not causal and width > MAX_VISIBLE:
        raise ValueError(f"masks speak of {MAX_VISIBLE} rows at most, and this step has {width}")
    group = heads // work.shapes[1][1]
    return Plan(width, group, head_dim, causal, tile, chains, chain_slots)


def exp(x):
    """e^x by the accurate routine, whatever TVM's own intrinsic is lowered to."""
    return T.call_pure_extern("float32", "expf", x)


def _dot_products(plan: Plan):
    tile, head_dim = plan.tile, plan.head_dim
    pairs, step_size = tile.pairs, tile.keys_ahead * tile.key

    @T.macro
    def dot_products(cache, queries, even, odd, kv, slot):
        """q · k of one slot a lane, even and odd elements apart."""
        key = T.sblock_alloc_buffer((step_size,), "float16", scope="local")
        for i in T.unroll(pairs):
            even[i] = T.float32(0)
            odd[i] = T.float32(0)
        for step in rolled(head_dim // step_size):
            for j in T.unroll(tile.keys_ahead):
                key[span(j * tile.key, tile.key)] = cache[
                    0, kv, slot, span(step * step_size + j * tile.key, tile.key)
                ]
            for i in T.unroll(pairs):
                for d in T.unroll(step_size // 2):
                    even[i] = fma(
                        queries[i * head_dim + step * step_size + d * 2],
                        T.Cast("float32", key[d * 2]),
                        even[i],
                    )
                    odd[i] = fma(
                        queries[i * head_dim + step * step_size + d * 2 + 1],
                        T.Cast("float32", key[d * 2 + 1]),
                        odd[i],
                    )

    return dot_products


def _weigh(held: int):
    @T.macro
    def weigh(score, weight, top, norm, acc, i, seen):
        """Scores of a tile to weights, -1 for a slot not seen; sums so far to the new maximum."""
        before = T.sblock_alloc_buffer((1,), "float32", scope="local")
        before[0] = top[i]
        weight[i] = T.Select(seen, score, constant(NEG_INF))
        top[i] = weight[i]
        warp_max(top, i)
        top[i] = T.max(before[0], top[i])
        weight[i] = T.Select(seen, exp(weight[i] - top[i]), T.float32(-1))
        before[0] = exp(before[0] - top[i])
        norm[i] = fma(norm[i], before[0], T.Select(seen, weight[i], T.float32(0)))
        for j in T.unroll(held):
            acc[i * held + j] = mul(acc[i * held + j], before[0])

    return weigh


def _add_values(plan: Plan):
    tile, head_dim = plan.tile, plan.head_dim
    value, held = tile.value, tile.held

    @T.macro
    def add_values(cache, weight, acc, kv, first_slot, last_slot, lane):
        values = T.sblock_alloc_buffer((SLOTS_AHEAD * held,), "float16", scope="local")
        share = T.sblock_alloc_buffer((1,), "float32", scope="local")
        for step in rolled(TILE // SLOTS_AHEAD):
            for s in T.unroll(SLOTS_AHEAD):
                for turn in T.unroll(tile.value_turns):
                    values[span(s * held + turn * value, value)] = cache[
                        1,
                        kv,
                        T.min(first_slot + step * SLOTS_AHEAD + s, last_slot),
                        span(T.min((turn * WARP + lane) * value, head_dim - value), value),
                    ]
            for s in T.unroll(SLOTS_AHEAD):
                for i in T.unroll(tile.pairs):
                    share[0] = from_lane(weight[i], step * SLOTS_AHEAD + s)
                    # What a row does not see may be no number at all: it is not even multiplied.
                    # A weight that is none itself has made the norm none.
                    if share[0] >= T.float32(0):
                        for j in T.unroll(held):
                            acc[i * held + j] = fma(
                                share[0],
                                T.Cast("float32", values[s * held + j]),
                                acc[i * held + j],
                            )

    return add_values


def _one_tile(plan: Plan):
    pairs, factor = plan.tile.pairs, plan.head_dim**-0.5
    dot_products, weigh, add_values = _dot_products(plan), _weigh(plan.tile.held), _add_values(plan)

    @T.macro
    def one_tile(cache, queries, masks, top, norm, acc, kv, first, boundary, slot, last_slot, lane):
        even = T.sblock_alloc_buffer((pairs,), "float32", scope="local")
        odd = T.sblock_alloc_buffer((pairs,), "float32", scope="local")
        weight = T.sblock_alloc_buffer((pairs,), "float32", scope="local")
        # Slots behind the last one hold nothing yet: such lanes read the last one, unseen.
        dot_products(cache, queries, even, odd, kv, T.min(slot + lane, last_slot))
        for i in T.unroll(pairs):
            even[i] = mul(even[i] + odd[i], constant(factor))
            weigh(
                even[i],
                weight,
                top,
                norm,
                acc,
                i,
                plan.sees(masks, i, first, slot + lane, boundary),
            )
        add_values(cache, weight, acc, kv, slot, last_slot, lane)

    return one_tile


def warp_pass(plan: Plan, keep, keep_element):
    """A macro that takes a warp through the tiles of one chain.

    At the end the macro `keep(tops, norms, kv, first, i, chain, top, norm)` stores maximum and norm
    of pair i, and `keep_element(mixed, kv, first, i, chain, d, value)` an element of its sum.
    """
    tile, head_dim, chains = plan.tile, plan.head_dim, plan.chains
    together = plan.chain_slots // TILE
    pairs, value, held = tile.pairs, tile.value, tile.held
    one_tile = _one_tile(plan)

    def first_slot(turn, chain):
        """The first slot of a chain's tile number `turn`."""
        return ((turn // together * chains + chain) * together + turn % together) * TILE

    @T.macro
    def start(top, norm, acc):
        for i in T.unroll(pairs):
            top[i] = constant(NEG_INF)
            norm[i] = T.float32(0)
        for i in T.unroll(pairs * held):
            acc[i] = T.float32(0)

    @T.macro
    def one_warp(cache, masks, queries, tops, norms, mixed, kv, first, boundary, chain, lane):
        top = T.sblock_alloc_buffer((pairs,), "float32", scope="local")
        norm = T.sblock_alloc_buffer((pairs,), "float32", scope="local")
        acc = T.sblock_alloc_buffer((pairs * held,), "float32", scope="local")
        start(top, norm, acc)
        for turn in range(
            ((plan.end(boundary, first) - 1) // (chains * plan.chain_slots) + 1) * together
        ):
            if first_slot(turn, chain) < plan.end(boundary, first):
                one_tile(
                    cache,
                    queries,
                    masks,
                    top,
                    norm,
                    acc,
                    kv,
                    first,
                    boundary,
                    first_slot(turn, chain),
                    boundary + plan.width - 1,
                    lane,
                )
        for i in T.unroll(pairs):
            warp_sum(norm, i, WARP)
            if lane == 0:
                keep(tops, norms, kv, first, i, chain, top[i], norm[i])
            for turn in T.unroll(tile.value_turns):
                if (turn * WARP + lane) * value < head_dim:
                    for j in T.unroll(value):
                        keep_element(
                            mixed,
                            kv,
                            first,
                            i,
                            chain,
                            (turn * WARP + lane) * value + j,
                            acc[i * held + turn * value + j],
                        )

    return one_warp
