"""Candidates of the bounded head on cuda: found by their bound, and computed again from bfloat16.

A warp looks at a part of a row, and then does its candidates one by one, all lanes together. The
tree of a dot product, lane by lane and then a butterfly, depends on the row's size alone.
"""

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.head_bound import ERROR, Penalty, bound, is_finite, penalizer
from schedules.gpu.thread import (
    WARP,
    add,
    ceil_div,
    fma,
    from_bf16,
    rolled,
    span,
    vector_width,
    warp_sum,
)
from schedules.sampling import key_of
from schedules.workload import Workload

WARPS = 8
NEIGHBOURS = 4
# Elements of a row that a lane loads at once, and how many such loads it has under way.
VECTOR = 8
MOST_LOADS = 10
EVERY_LANE = 0xFFFFFFFF


@dataclass(frozen=True)
class RescoreTile:
    """How a row of logits is looked at: `each` tokens a lane, in groups of `NEIGHBOURS`."""

    each: int

    @property
    def part(self) -> int:
        """Tokens of a warp."""
        return self.each * WARP


def choose_tile(width: int) -> RescoreTile:
    """The tile for `width` rows of logits: few of them leave the device idle with large parts."""
    return RescoreTile(4 if width <= 4 else 8)


def head_rescore(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.head_ops.head_rescore`."""
    (rows, size), (vocab_size, _) = work.shapes[:2]
    tile = choose_tile(rows)
    each, parts = tile.each, ceil_div(vocab_size, tile.part)
    groups = ceil_div(parts, WARPS)
    vector = vector_width(vocab_size, NEIGHBOURS)
    dot = _dot(size)
    penalise = penalizer(work)

    def token_of(i):
        return i // NEIGHBOURS * (WARP * NEIGHBOURS) + i % NEIGHBOURS

    def is_candidate(high, floor, row):
        return T.Or(T.Not(is_finite(high)), key_of(high) >= floor[row])

    @T.macro
    def load(values, bounds, spread, logits, row, first):
        """z + e of a lane's tokens; what stands behind the vocabulary is not defined."""
        lengths = T.sblock_alloc_buffer((2 * NEIGHBOURS,), "float32", scope="local")
        for turn in T.unroll(each // NEIGHBOURS):
            for j in T.unroll(NEIGHBOURS // vector):
                if first + turn * (WARP * NEIGHBOURS) + j * vector < vocab_size:
                    values[span(turn * NEIGHBOURS + j * vector, vector)] = logits[
                        row, span(first + turn * (WARP * NEIGHBOURS) + j * vector, vector)
                    ]
            if first + turn * (WARP * NEIGHBOURS) < vocab_size:
                for i in T.unroll(2):
                    lengths[span(i * NEIGHBOURS, NEIGHBOURS)] = bounds[
                        ERROR + i, span(first + turn * (WARP * NEIGHBOURS), NEIGHBOURS)
                    ]
                for j in T.unroll(NEIGHBOURS):
                    values[turn * NEIGHBOURS + j] = add(
                        values[turn * NEIGHBOURS + j],
                        bound(
                            lengths[j],
                            lengths[NEIGHBOURS + j],
                            spread,
                            row,
                            work.settings["least_error"],
                        ),
                    )

    @T.macro
    def take(left, found):
        """The next candidate: to found[0] its lane, to found[1] its place among the lane's."""
        found[0] = left[0]
        found[1] = T.uint32(0)
        for i in T.unroll(each - 1):
            if found[0] == T.uint32(0):
                found[0] = left[i + 1]
                found[1] = T.Cast("uint32", i + 1)
        for i in T.unroll(each):
            if found[1] == T.Cast("uint32", i):
                left[i] = T.bitwise_and(left[i], left[i] - T.uint32(1))
        found[0] = T.Cast(
            "uint32",
            T.call_pure_extern("int32", "__ffs", T.reinterpret("int32", found[0])) - 1,
        )

    def any_of(left):
        result = left[0]
        for i in range(1, each):
            result = T.bitwise_or(result, left[i])
        return result

    @T.macro
    def one_part(x, table, spread, bounds, given, floor, logits, row, first, lane):
        values = T.sblock_alloc_buffer((each,), "float32", scope="local")
        # A bit for every lane whose token i is a candidate.
        left = T.sblock_alloc_buffer((each,), "uint32", scope="local")
        found = T.sblock_alloc_buffer((2,), "uint32", scope="local")
        load(values, bounds, spread, logits, row, first + lane * NEIGHBOURS)
        for i in T.unroll(each):
            found[0] = T.uint32(0)
            if first + lane * NEIGHBOURS + token_of(i) < vocab_size:
                penalise(values, i, first + lane * NEIGHBOURS + token_of(i), row, given)
                if is_candidate(values[i], floor, row):
                    found[0] = T.uint32(1)
            left[i] = T.call_pure_extern("uint32", "__ballot_sync", T.uint32(EVERY_LANE), found[0])
        while any_of(left) != T.uint32(0):
            take(left, found)
            dot(
                x,
                table,
                logits,
                row,
                first
                + T.Cast("int32", found[0]) * NEIGHBOURS
                + token_of(T.Cast("int32", found[1])),
                lane,
            )

    @T.macro
    def one_warp(x, table, spread, bounds, logit_rows, given, floor, logits, block, thread):
        if (logit_rows[block // groups] >= 0) and (block % groups * WARPS + thread // WARP < parts):
            one_part(
                x,
                table,
                spread,
                bounds,
                given,
                floor,
                logits,
                block // groups,
                (block % groups * WARPS + thread // WARP) * tile.part,
                thread % WARP,
            )

    make = _penalised_shell if work.settings["with_penalty"] else _shell
    return make(work, rows * groups, WARPS * WARP, one_warp)


def _dot(size: int):
    """A macro: a warp computes one logit and writes it."""
    vector = vector_width(size, VECTOR)
    part = vector_width(vector, 4)
    turns = ceil_div(size, WARP * vector)
    rounds = ceil_div(turns, MOST_LOADS)
    loads = ceil_div(turns, rounds)

    @T.macro
    def multiply(x, table, acc, row, n, first, lane):
        bits = T.sblock_alloc_buffer((loads * vector,), "uint16", scope="local")
        values = T.sblock_alloc_buffer((vector,), "float32", scope="local")
        for i in T.unroll(loads):
            if ((first + i) * WARP + lane) * vector < size:
                bits[span(i * vector, vector)] = table[
                    n, span(((first + i) * WARP + lane) * vector, vector)
                ]
        for i in T.unroll(loads):
            if ((first + i) * WARP + lane) * vector < size:
                for j in T.unroll(vector // part):
                    values[span(j * part, part)] = x[
                        row, span(((first + i) * WARP + lane) * vector + j * part, part)
                    ]
                for j in T.unroll(vector):
                    acc[0] = fma(from_bf16(bits[i * vector + j]), values[j], acc[0])

    @T.macro
    def dot(x, table, logits, row, n, lane):
        acc = T.sblock_alloc_buffer((1,), "float32", scope="local")
        acc[0] = T.float32(0)
        for turn in rolled(rounds):
            multiply(x, table, acc, row, n, turn * loads, lane)
        warp_sum(acc, 0, WARP)
        if lane == 0:
            logits[row, n] = acc[0]

    return dot


def _shell(work: Workload, grid: int, threads: int, one_thread) -> tirx.PrimFunc:
    """The kernel around what one thread does."""
    x_shape, table_shape, spread_shape, bounds_shape, (rows,) = work.shapes[:5]
    vocab_size = work.shapes[-1][1]

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer(x_shape, "float32"),
        table: T.Buffer(table_shape, "uint16"),
        spread: T.Buffer(spread_shape, "float32"),
        bounds: T.Buffer(bounds_shape, "float32"),
        logit_rows: T.Buffer((rows,), "int32"),
        floor: T.Buffer((rows,), "int32"),
        logits: T.Buffer((rows, vocab_size), "float32"),
    ):
        for bx in T.thread_binding(grid, thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("head_rescore"):
                    block = T.axis.spatial(grid, bx)
                    thread = T.axis.spatial(threads, tx)
                    one_thread(
                        x, table, spread, bounds, logit_rows, None, floor, logits, block, thread
                    )

    return func


def _penalised_shell(work: Workload, grid: int, threads: int, one_thread) -> tirx.PrimFunc:
    """As `_shell`, with what a penalty needs."""
    x_shape, table_shape, spread_shape, bounds_shape, (rows,) = work.shapes[:5]
    vocab_size = work.shapes[-1][1]
    state_words = work.shapes[6][0]

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer(x_shape, "float32"),
        table: T.Buffer(table_shape, "uint16"),
        spread: T.Buffer(spread_shape, "float32"),
        bounds: T.Buffer(bounds_shape, "float32"),
        logit_rows: T.Buffer((rows,), "int32"),
        horizon: T.Buffer((rows,), "int32"),
        state: T.Buffer((state_words,), "int32"),
        seen: T.Buffer((vocab_size,), "int32"),
        floor: T.Buffer((rows,), "int32"),
        logits: T.Buffer((rows, vocab_size), "float32"),
    ):
        for bx in T.thread_binding(grid, thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("head_rescore"):
                    block = T.axis.spatial(grid, bx)
                    thread = T.axis.spatial(threads, tx)
                    one_thread(
                        x,
                        table,
                        spread,
                        bounds,
                        logit_rows,
                        Penalty(horizon, state, seen),
                        floor,
                        logits,
                        block,
                        thread,
                    )

    return func
