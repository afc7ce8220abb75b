"""What four warps do with 64 slots: scores, weights and values (attention_fragments.py)."""

from tvm.script import tirx as T

from schedules.gpu.attention_fragments import (
    GROUPS,
    LOWER_HALVES,
    ONES,
    PAIRS,
    SLOTS,
    STEP,
    STEPS,
    UPPER_HALVES,
    WARPS,
    WORDS,
    Sizes,
    byte_perm,
    clear,
    fetch_queries,
    finite_values,
    loads,
    multiply,
    query_of_row,
    split,
)
from schedules.gpu.attention_warp import MASK_WORDS, NEG_INF, Plan, exp
from schedules.gpu.thread import WARP, across, add, constant, fma, mul, span


def _scores(plan: Plan, sizes: Sizes):
    """A macro that makes a warp's scores of 16 slots: four for each group of pairs."""
    tiles, at_once, pieces = sizes.tiles, plan.tile.at_once, sizes.head_dim // 32

    def sees(rows, masks, tile, slot, boundary):
        if plan.causal:
            return slot <= boundary + rows[tile]
        low, high = masks[tile * MASK_WORDS], masks[tile * MASK_WORDS + 1]
        word = T.Select(slot - boundary < 32, low, high)
        bit = T.shift_right(word, T.Cast("uint32", T.bitwise_and(slot - boundary, 31)))
        bit = T.Select(slot - boundary < plan.width, T.bitwise_and(bit, T.uint32(1)), T.uint32(0))
        # Choices of words: what "and" and "or" skip would be branches.
        return T.Select(slot < boundary, T.uint32(1), bit) == T.uint32(1)

    @T.macro
    def dot_products(queries, keys, dot, first, lane):
        a = T.sblock_alloc_buffer((at_once * WORDS,), "uint32", scope="local")
        clear(dot, at_once * GROUPS * 4)
        for step in T.unroll(sizes.key_steps):
            for i in T.unroll(at_once):
                a[span(i * WORDS, WORDS)] = queries[
                    span((((first + i) * sizes.key_steps + step) * WARP + lane) * WORDS, WORDS)
                ]
            for i in T.unroll(at_once):
                for n in T.unroll(GROUPS):
                    multiply(
                        dot,
                        (i * GROUPS + n) * 4,
                        a,
                        i * WORDS,
                        keys[(n * pieces + step // 2) * 4 + step % 2 * 2],
                        keys[(n * pieces + step // 2) * 4 + step % 2 * 2 + 1],
                    )

    @T.macro
    def join_terms(dot, score, tile, i):
        for n in T.unroll(GROUPS):
            for e in T.unroll(2):
                score[tile * 4 + n * 2 + e] = add(
                    dot[(i * GROUPS + n) * 4 + e], dot[(i * GROUPS + n) * 4 + 2 + e]
                )

    @T.macro
    def mask(score, rows, masks, tile, slot, boundary):
        for n in T.unroll(GROUPS):
            for e in T.unroll(2):
                score[tile * 4 + n * 2 + e] = T.Select(
                    sees(rows, masks, tile, slot + n * PAIRS + e, boundary),
                    score[tile * 4 + n * 2 + e],
                    constant(NEG_INF),
                )

    @T.macro
    def largest(score, highest, tile, warp, lane):
        top = T.sblock_alloc_buffer((1,), "float32", scope="local")
        top[0] = T.max(
            T.max(score[tile * 4], score[tile * 4 + 1]),
            T.max(score[tile * 4 + 2], score[tile * 4 + 3]),
        )
        for level in T.unroll(2):
            top[0] = T.max(top[0], across(top[0], T.shift_left(1, level)))
        if lane % 4 == 0:
            highest[(tile * PAIRS + lane // 4) * WARPS + warp] = top[0]

    @T.macro
    def scores(queries, keys, score, highest, rows, masks, slot, boundary, warp, lane):
        dot = T.sblock_alloc_buffer((at_once * GROUPS * 4,), "float32", scope="local")
        for part in T.unroll(tiles // at_once):
            dot_products(queries, keys, dot, part * at_once, lane)
            for i in T.unroll(at_once):
                join_terms(dot, score, part * at_once + i, i)
            # All pairs see the slots before the step's own.
            if slot + SLOTS > boundary:
                for i in T.unroll(at_once):
                    mask(
                        score,
                        rows,
                        masks,
                        part * at_once + i,
                        slot + warp * STEP + lane % 4 * 2,
                        boundary,
                    )
            for i in T.unroll(at_once):
                largest(score, highest, part * at_once + i, warp, lane)

    return scores


def _weights(tiles: int):
    """A macro that makes the weights of a warp's scores, and what the sums so far are times."""

    @T.macro
    def weigh(score, highest, weights, top, shrink, tile, warp, lane):
        high = T.sblock_alloc_buffer((WARPS,), "float32", scope="local")
        share = T.sblock_alloc_buffer((4,), "float32", scope="local")
        terms = T.sblock_alloc_buffer((WORDS,), "uint32", scope="local")
        high[span(0, WARPS)] = highest[span((tile * PAIRS + lane // 4) * WARPS, WARPS)]
        shrink[tile] = top[tile]
        for i in T.unroll(WARPS):
            top[tile] = T.max(top[tile], high[i])
        shrink[tile] = exp(shrink[tile] - top[tile])
        # All exponentials first: as a part of the choice each would be a branch of its own.
        for i in T.unroll(4):
            share[i] = exp(score[tile * 4 + i] - top[tile])
        for i in T.unroll(4):
            share[i] = T.Select(score[tile * 4 + i] != constant(NEG_INF), share[i], T.float32(0))
        split(share, terms, 0)
        weights[span(((tile * STEPS + warp) * WARP + lane) * WORDS, WORDS)] = terms[span(0, WORDS)]

    @T.macro
    def all_weights(score, highest, weights, top, shrink, warp, lane):
        for tile in T.unroll(tiles):
            weigh(score, highest, weights, top, shrink, tile, warp, lane)

    return all_weights


def _arrange(sizes: Sizes):
    """A macro that makes B of a lane's values: pairs of slots in place of pairs of elements."""

    @T.macro
    def exchange(values, first, second):
        lower = T.sblock_alloc_buffer((1,), "uint32", scope="local")
        lower[0] = byte_perm(values[first], values[second], LOWER_HALVES)
        values[second] = byte_perm(values[first], values[second], UPPER_HALVES)
        values[first] = lower[0]

    @T.macro
    def arrange(values):
        for run in T.unroll(sizes.runs):
            for step in T.unroll(STEPS):
                for pair in T.unroll(2):
                    for i in T.unroll(sizes.value // 2):
                        exchange(
                            values,
                            sizes.word(run, step, 2 * pair, i),
                            sizes.word(run, step, 2 * pair + 1, i),
                        )

    return arrange


def norm_warp(tile):
    """Which warp has the norms of a group of pairs: all warps have as much to do."""
    return tile % WARPS


def _mix(sizes: Sizes, may_break: bool):
    """A macro that adds a turn's values to a warp's sums; the weights of a group of pairs are added
    up by the warp that `norm_warp` names."""
    columns, value = sizes.runs * sizes.value, sizes.value

    @T.macro
    def weighted(dot, a, values):
        clear(dot, columns * 4)
        for step in T.unroll(STEPS):
            for n in T.unroll(columns):
                multiply(
                    dot,
                    n * 4,
                    a,
                    step * WORDS,
                    values[sizes.word(n // value, step, n % value % 2, n % value // 2)],
                    values[sizes.word(n // value, step, 2 + n % value % 2, n % value // 2)],
                )

    @T.macro
    def add_values(dot, acc, shrink, tile):
        for n in T.unroll(columns):
            for e in T.unroll(2):
                acc[tile * sizes.held + n // value * 2 * value + e * value + n % value] = fma(
                    acc[tile * sizes.held + n // value * 2 * value + e * value + n % value],
                    shrink,
                    add(dot[n * 4 + e], dot[n * 4 + 2 + e]),
                )

    @T.macro
    def add_weights(dot, a, norm, shrink, tile):
        clear(dot, 4)
        for step in T.unroll(STEPS):
            multiply(dot, 0, a, step * WORDS, T.uint32(ONES), T.uint32(ONES))
        norm[tile] = fma(norm[tile], shrink, add(dot[0], dot[2]))

    @T.macro
    def mark_broken(dot, a, acc, marks, tile):
        """A pair that gives weight to a slot whose value is no number has none itself."""
        clear(dot, 4)
        for step in T.unroll(STEPS):
            multiply(dot, 0, a, step * WORDS, marks[1 + 2 * step], marks[2 + 2 * step])
        if add(dot[0], dot[2]) != T.float32(0):
            for i in T.unroll(sizes.held):
                acc[tile * sizes.held + i] = T.reinterpret("float32", T.uint32(0x7FFFFFFF))

    @T.macro
    def mix(weights, values, marks, acc, norm, shrink, warp, lane):
        a = T.sblock_alloc_buffer((STEPS * WORDS,), "uint32", scope="local")
        dot = T.sblock_alloc_buffer((columns * 4,), "float32", scope="local")
        for tile in T.unroll(sizes.tiles):
            for step in T.unroll(STEPS):
                a[span(step * WORDS, WORDS)] = weights[
                    span(((tile * STEPS + step) * WARP + lane) * WORDS, WORDS)
                ]
            weighted(dot, a, values)
            add_values(dot, acc, shrink[tile], tile)
            if warp == norm_warp(tile):
                add_weights(dot, a, norm, shrink[tile], tile)
            if may_break:
                if marks[0] != T.uint32(0):
                    mark_broken(dot, a, acc, marks, tile)

    return mix


def turn_of(plan: Plan, sizes: Sizes):
    """A macro that adds 64 slots to a block's sums, and loads keys and values of the next."""
    tiles = sizes.tiles
    # One row alone sees whatever it reads.
    may_break = plan.width > 1
    scores, weigh, arrange = _scores(plan, sizes), _weights(tiles), _arrange(sizes)
    mix, finite = _mix(sizes, may_break), finite_values(sizes)
    load_keys, load_values = loads(sizes)

    @T.macro
    def one_turn(
        cache, shared, state, keys, values, kv, boundary, slot, following, more, last, warp, lane
    ):
        queries, weights, highest = shared
        rows, masks, top, norm, acc = state
        score = T.sblock_alloc_buffer((tiles * 4,), "float32", scope="local")
        shrink = T.sblock_alloc_buffer((tiles,), "float32", scope="local")
        marks = T.sblock_alloc_buffer((1 + 2 * STEPS,), "uint32", scope="local")
        scores(queries, keys, score, highest, rows, masks, slot, boundary, warp, lane)
        if more:
            load_keys(cache, keys, kv, following, last, warp, lane)
        T.tvm_storage_sync("shared")
        weigh(score, highest, weights, top, shrink, warp, lane)
        if may_break:
            marks[0] = T.uint32(0)
            if slot + SLOTS > boundary:
                finite(values, marks)
        arrange(values)
        T.tvm_storage_sync("shared")
        mix(weights, values, marks, acc, norm, shrink, warp, lane)
        if more:
            load_values(cache, values, kv, following, last, warp, lane)

    return one_turn


def begin_with(plan: Plan, sizes: Sizes, load_query=None):
    """A macro that brings in what a block knows of its pairs, and its first keys and values.

    `load_query` as `fetch_queries` takes it, by default from the queries of all rows.
    """
    tiles = sizes.tiles
    fetch = fetch_queries(plan, sizes, load_query or query_of_row(plan))
    load_keys, load_values = loads(sizes)

    @T.macro
    def begin(q, cache, visible, queries, rows, masks, keys, values, kv, first, slot, last, thread):
        load_keys(cache, keys, kv, slot, last, thread // WARP, thread % WARP)
        load_values(cache, values, kv, slot, last, thread // WARP, thread % WARP)
        fetch(q, queries, kv, first, thread)
        for tile in T.unroll(tiles):
            rows[tile] = plan.row_of(first, tile * PAIRS + thread % WARP // 4)
            if visible is not None:
                masks[span(tile * MASK_WORDS, MASK_WORDS)] = visible[
                    rows[tile], span(0, MASK_WORDS)
                ]
        T.tvm_storage_sync("shared")

    return begin


# Part of the tree: 64 slots belong to chain t mod CHAINS.
CHAINS = 32


@T.macro
def start_chain(top, norm, acc, tiles, sums):
    for tile in T.unroll(tiles):
        top[tile] = constant(NEG_INF)
        norm[tile] = T.float32(0)
    clear(acc, sums)


@T.macro
def fold(top, norm, acc, whole, tile, held):
    """Add a chain's sums to those of the chains before it."""
    factors = T.sblock_alloc_buffer((2,), "float32", scope="local")
    factors[0] = whole[0][tile]
    whole[0][tile] = T.max(whole[0][tile], top[tile])
    factors[0] = exp(factors[0] - whole[0][tile])
    factors[1] = exp(top[tile] - whole[0][tile])
    whole[1][tile] = fma(whole[1][tile], factors[0], mul(norm[tile], factors[1]))
    for i in T.unroll(held):
        whole[2][tile * held + i] = fma(
            whole[2][tile * held + i], factors[0], mul(acc[tile * held + i], factors[1])
        )
