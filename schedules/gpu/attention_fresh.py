"""What four lanes make of a step's own rows: new keys and values, in the registers of fragments.

See schedules/gpu/attention_rope.py, whose `Step` the macros take.
"""

from tvm.script import tirx as T

from schedules.gpu.attention_fragments import GROUPS, PAIRS, STEP, STEPS, WORDS, Sizes, half_pair
from schedules.gpu.attention_loads import key_slot, value_element, value_slot
from schedules.gpu.heads import Heads
from schedules.gpu.thread import across, add, constant, fma, mul, span

# Neighbouring elements of a head that a lane holds, and what four lanes hold of it.
PIECE, PIECES = 8, 32


def own_columns(heads: Heads):
    """A macro that loads what a lane holds of a head: pieces of its lower and its upper half."""

    @T.macro
    def load(qkv, low, high, row, head, lane):
        for p in T.unroll(heads.half // PIECES):
            for i in T.unroll(PIECE // WORDS):
                low[span(p * PIECE + i * WORDS, WORDS)] = qkv[
                    row, span(head * heads.size + _column(p, lane) + i * WORDS, WORDS)
                ]
                high[span(p * PIECE + i * WORDS, WORDS)] = qkv[
                    row, span(head * heads.size + heads.half + _column(p, lane) + i * WORDS, WORDS)
                ]

    return load


def _column(p, lane):
    return p * PIECES + lane % 4 * PIECE


def norm_factor(heads: Heads, eps: float):
    """A macro for what a head is multiplied by: the tree of `heads.normalizer`, whose 32 lanes hold
    two columns of each half. Here four lanes stand for eight of them each."""
    parts = heads.half // PIECES

    @T.macro
    def factor_of(low, high, factor):
        square = T.sblock_alloc_buffer((parts * 4,), "float32", scope="local")
        for v in T.unroll(parts * 4):
            square[v] = fma(low[v * 2], low[v * 2], T.float32(0))
            square[v] = fma(low[v * 2 + 1], low[v * 2 + 1], square[v])
            square[v] = fma(high[v * 2], high[v * 2], square[v])
            square[v] = fma(high[v * 2 + 1], high[v * 2 + 1], square[v])
        for v in T.unroll(4):
            if parts == 2:
                square[v] = add(square[v], square[v + 4])
            square[v] = add(square[v], across(square[v], 2))
            square[v] = add(square[v], across(square[v], 1))
        for v in T.unroll(2):
            square[v] = add(square[v], square[v + 2])
        factor[0] = T.float32(1) / T.sqrt(
            add(square[0], square[1]) / T.float32(heads.size) + constant(eps)
        )

    return factor_of


def fresh_keys_of(sizes: Sizes, heads: Heads, eps: float | None):
    """A macro that puts the new ones among a lane's keys of 64 slots in their place."""
    parts, held, width = heads.half // PIECES, heads.half // 4, heads.width
    normed, load_own = eps is not None, own_columns(heads)
    factor_of = norm_factor(heads, eps or 0.0)

    @T.macro
    def norm(step, low, high, lane):
        factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
        factor_of(low, high, factor)
        for p in T.unroll(parts):
            for i in T.unroll(PIECE):
                low[p * PIECE + i] = mul(
                    mul(low[p * PIECE + i], step.norms[1][_column(p, lane) + i]), factor[0]
                )
                high[p * PIECE + i] = mul(
                    mul(high[p * PIECE + i], step.norms[1][heads.half + _column(p, lane) + i]),
                    factor[0],
                )

    @T.macro
    def rotate(low, high, turned):
        pair = T.sblock_alloc_buffer((2,), "float32", scope="local")
        for i in T.unroll(held):
            pair[0] = low[i]
            pair[1] = high[i]
            low[i] = add(mul(pair[0], turned[i * 2]), -mul(pair[1], turned[i * 2 + 1]))
            high[i] = add(mul(pair[1], turned[i * 2]), mul(pair[0], turned[i * 2 + 1]))

    @T.macro
    def put(step, keys, half, kv, slot, p, word, column):
        halves = T.sblock_alloc_buffer((PIECE,), "float16", scope="local")
        for i in T.unroll(PIECE):
            halves[i] = T.Cast("float16", half[p * PIECE + i])
        for i in T.unroll(WORDS):
            keys[word + i] = half_pair(halves, 2 * i)
        if step.writes:
            for i in T.unroll(PIECE // WORDS):
                step.cache[0, kv, slot, span(column + i * WORDS, WORDS)] = halves[
                    span(i * WORDS, WORDS)
                ]

    @T.macro
    def one_key(step, keys, kv, row, slot, last, n, lane):
        low = T.sblock_alloc_buffer((held,), "float32", scope="local")
        high = T.sblock_alloc_buffer((held,), "float32", scope="local")
        turned = T.sblock_alloc_buffer((held * 2,), "float32", scope="local")
        load_own(step.qkv, low, high, row, heads.queries + kv, lane)
        for i in T.unroll(held):
            turned[span(i * 2, 2)] = step.table[
                step.position[row], _column(i // PIECE, lane) + i % PIECE, span(0, 2)
            ]
        if normed:
            norm(step, low, high, lane)
        rotate(low, high, turned)
        if T.And(slot > last - width, slot <= last):
            for p in T.unroll(parts):
                put(step, keys, low, kv, slot, p, (n * 2 * parts + p) * WORDS, _column(p, lane))
                put(
                    step,
                    keys,
                    high,
                    kv,
                    slot,
                    p,
                    (n * 2 * parts + parts + p) * WORDS,
                    heads.half + _column(p, lane),
                )

    @T.macro
    def fresh_keys(step, keys, kv, slot, last, warp, lane):
        for n in T.unroll(GROUPS):
            # The same for all lanes of a warp.
            if _some_new(slot + warp * STEP + n * PAIRS, PAIRS, last, width):
                one_key(
                    step,
                    keys,
                    kv,
                    _row(slot + key_slot(n, warp, lane), last, width),
                    slot + key_slot(n, warp, lane),
                    last,
                    n,
                    lane,
                )

    return fresh_keys


def _some_new(slot, count: int, last, width: int):
    """Whether a row of this step is among `count` slots."""
    return T.And(slot + count > last + 1 - width, slot <= last)


def _row(slot, last, width: int):
    """The row of this step that a slot is of, or the nearest one."""
    return T.min(T.max(slot - (last + 1 - width), 0), width - 1)


def fresh_values_of(sizes: Sizes, heads: Heads):
    """A macro that puts the new ones among a lane's values of 64 slots in their place.

    Behind them nobody has written anything, and a weight of 0 does not make up for that: there the
    last row's are, as `attention_loads.loads` has it.
    """
    value, runs, width = sizes.value, sizes.runs, heads.width

    @T.macro
    def load(step, loaded, kv, slot, last, k_step, warp, lane):
        for row in T.unroll(4):
            for run in T.unroll(runs):
                loaded[span((row * runs + run) * value, value)] = step.qkv[
                    _row(slot + value_slot(k_step, row, lane), last, width),
                    span(
                        (heads.first_value + kv) * heads.size
                        + value_element(sizes, run, warp, lane),
                        value,
                    ),
                ]

    @T.macro
    def put(step, loaded, values, kv, slot, last, k_step, row, run, column):
        halves = T.sblock_alloc_buffer((value,), "float16", scope="local")
        for i in T.unroll(value):
            halves[i] = T.Cast("float16", loaded[(row * runs + run) * value + i])
        for i in T.unroll(value // 2):
            values[sizes.word(run, k_step, row, i)] = half_pair(halves, 2 * i)
        if T.And(step.writes, slot <= last):
            step.cache[1, kv, slot, span(column, value)] = halves[span(0, value)]

    @T.macro
    def one_step(step, values, kv, slot, last, k_step, warp, lane):
        loaded = T.sblock_alloc_buffer((4 * runs * value,), "float32", scope="local")
        load(step, loaded, kv, slot, last, k_step, warp, lane)
        for row in T.unroll(4):
            for run in T.unroll(runs):
                if slot + value_slot(k_step, row, lane) > last - width:
                    put(
                        step,
                        loaded,
                        values,
                        kv,
                        slot + value_slot(k_step, row, lane),
                        last,
                        k_step,
                        row,
                        run,
                        value_element(sizes, run, warp, lane),
                    )

    @T.macro
    def fresh_values(step, values, kv, slot, last, warp, lane):
        for k_step in T.unroll(STEPS):
            # The same for all lanes of a warp.
            if slot + (k_step + 1) * STEP > last + 1 - width:
                one_step(step, values, kv, slot, last, k_step, warp, lane)

    return fresh_values
