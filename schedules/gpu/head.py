"""Logits and their greedy token on cuda.

Where the tensor cores can read the table, which hangs on the row's size alone, they make the logits
(schedules/gpu/head_mma.py). Elsewhere a warp holds four rows of the table for up to eight
activation rows; its lanes split the row. The tree of a dot product, lane by lane and then a
butterfly, depends on the row's size alone as well.
"""

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.head_mma import choose_tile as choose_mma
from schedules.gpu.head_mma import mma_head, serves
from schedules.gpu.thread import (
    MAX_THREADS,
    WARP,
    across,
    ceil_div,
    fma,
    from_bf16,
    span,
    vector_width,
    warp_sum,
)
from schedules.workload import Workload

WARPS = 8
ENTRIES = 4
MOST_ROWS = 8


@dataclass(frozen=True)
class HeadTile:
    """What a warp computes: `entries` rows of the table for `rows` activation rows.

    vector: elements of the table that a lane loads at once, 8 where the row's size allows.
    """

    rows: int
    entries: int
    vector: int


def choose_tile(rows: int, size: int) -> HeadTile:
    """The tile for `rows` activation rows of `size` elements."""
    return HeadTile(ceil_div(rows, ceil_div(rows, MOST_ROWS)), ENTRIES, vector_width(size, 8))


def head(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.ops.head`."""
    if serves(work.shapes[0][1]):
        return mma_head(work, choose_mma(work.width))
    return _head_template(work, choose_tile(work.width, work.shapes[0][1]))


def _head_template(work: Workload, tile: HeadTile) -> tirx.PrimFunc:
    (width, size), (vocab_size, _) = work.shapes[:2]
    rows, entries, vector = tile.rows, tile.entries, tile.vector
    groups, sums = ceil_div(width, rows), tile.rows * tile.entries
    grid = ceil_div(vocab_size, WARPS * entries) * groups
    part = vector_width(vector, 4)

    def is_asked(logit_rows, first_row):
        """Whether any row of the group asks for logits."""
        asked = [logit_rows[T.min(first_row + i, width - 1)] >= 0 for i in range(rows)]
        return _any(asked)

    @T.macro
    def multiply(x, table, acc, first_row, entry, k):
        bits = T.sblock_alloc_buffer((entries * vector,), "uint16", scope="local")
        values = T.sblock_alloc_buffer((vector,), "float32", scope="local")
        for e in T.unroll(entries):
            bits[span(e * vector, vector)] = table[
                T.min(entry + e, vocab_size - 1), span(k, vector)
            ]
        for i in T.unroll(rows):
            for j in T.unroll(vector // part):
                values[span(j * part, part)] = x[
                    T.min(first_row + i, width - 1), span(k + j * part, part)
                ]
            for e in T.unroll(entries):
                for j in T.unroll(vector):
                    acc[i * entries + e] = fma(
                        from_bf16(bits[e * vector + j]), values[j], acc[i * entries + e]
                    )

    @T.macro
    def store(acc, logits, first_row, entry, lane):
        mine = T.sblock_alloc_buffer((1,), "float32", scope="local")
        for i in T.unroll(sums):
            warp_sum(acc, i, WARP)
        mine[0] = acc[0]
        for i in T.unroll(sums - 1):
            mine[0] = T.Select(lane == i + 1, acc[i + 1], mine[0])
        if (
            (lane < sums)
            and (first_row + lane // entries < width)
            and (entry + lane % entries < vocab_size)
        ):
            logits[first_row + lane // entries, entry + lane % entries] = mine[0]

    @T.macro
    def one_warp(x, table, logits, first_row, entry, lane):
        acc = T.sblock_alloc_buffer((sums,), "float32", scope="local")
        for i in T.unroll(sums):
            acc[i] = T.float32(0)
        for turn in range(ceil_div(size, WARP * vector)):
            if (turn * WARP + lane) * vector < size:
                multiply(x, table, acc, first_row, entry, (turn * WARP + lane) * vector)
        store(acc, logits, first_row, entry, lane)

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, size), "float32"),
        table: T.Buffer((vocab_size, size), "uint16"),
        logit_rows: T.Buffer((width,), "int32"),
        logits: T.Buffer((width, vocab_size), "float32"),
    ):
        for bx in T.thread_binding(grid, thread="blockIdx.x"):
            for tx in T.thread_binding(WARPS * WARP, thread="threadIdx.x"):
                with T.sblock("head"):
                    block = T.axis.spatial(grid, bx)
                    thread = T.axis.spatial(WARPS * WARP, tx)
                    # Neighbouring blocks share their part of the table.
                    if is_asked(logit_rows, block % groups * rows):
                        one_warp(
                            x,
                            table,
                            logits,
                            block % groups * rows,
                            (block // groups * WARPS + thread // WARP) * entries,
                            thread % WARP,
                        )

    return func


def _any(conditions: list):
    result = conditions[0]
    for condition in conditions[1:]:
        result = T.Or(result, condition)
    return result


def greedy(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.ops.greedy`. A NaN anywhere in a row gives -1.

    A NaN counts as +inf with the id -1, which wins over everything; equal logits go to the lower
    id.
    """
    rows, vocab_size = work.shapes[0]
    vector = vector_width(vocab_size, 4)
    threads = MAX_THREADS
    while threads > WARP and threads * vector // 2 >= vocab_size:
        threads //= 2
    warps = threads // WARP

    def is_nan(value):
        # Written on the bits: a compiler may take value != value for false.
        magnitude = T.bitwise_and(T.reinterpret("int32", value), T.int32(0x7FFFFFFF))
        return magnitude > T.int32(0x7F800000)

    @T.macro
    def consider(best, token, value, index):
        if is_nan(value):
            best[0] = T.infinity("float32")
            token[0] = -1
        elif value > best[0]:
            best[0] = value
            token[0] = index

    @T.macro
    def merge(best, token, other, candidate):
        if (other > best[0]) or ((other == best[0]) and (candidate < token[0])):
            best[0] = other
            token[0] = candidate

    @T.macro
    def across_warp(best, token, other, candidate):
        for level in T.unroll(5):
            other[0] = across(best[0], T.shift_right(16, level))
            candidate[0] = across(token[0], T.shift_right(16, level))
            merge(best, token, other[0], candidate[0])

    @T.macro
    def scan(logits, best, token, row, thread):
        values = T.sblock_alloc_buffer((vector,), "float32", scope="local")
        for turn in range(ceil_div(vocab_size, threads * vector)):
            if (turn * threads + thread) * vector < vocab_size:
                values[span(0, vector)] = logits[
                    row, span((turn * threads + thread) * vector, vector)
                ]
                for j in T.unroll(vector):
                    consider(best, token, values[j], (turn * threads + thread) * vector + j)

    @T.prim_func(private=True, s_tir=True)
    def func(
        logits: T.Buffer((rows, vocab_size), "float32"),
        logit_rows: T.Buffer((rows,), "int32"),
        tokens: T.Buffer((rows,), "int32"),
    ):
        for bx in T.thread_binding(rows, thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("greedy"):
                    row = T.axis.spatial(rows, bx)
                    thread = T.axis.spatial(threads, tx)
                    best = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    token = T.sblock_alloc_buffer((1,), "int32", scope="local")
                    other = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    candidate = T.sblock_alloc_buffer((1,), "int32", scope="local")
                    bests = T.sblock_alloc_buffer((warps,), "float32", scope="shared")
                    candidates = T.sblock_alloc_buffer((warps,), "int32", scope="shared")
                    best[0] = T.min_value("float32")
                    token[0] = -1
                    if logit_rows[row] >= 0:
                        scan(logits, best, token, row, thread)
                    across_warp(best, token, other, candidate)
                    if thread % WARP == 0:
                        bests[thread // WARP] = best[0]
                        candidates[thread // WARP] = token[0]
                    T.tvm_storage_sync("shared")
                    for warp in T.unroll(warps):
                        other[0] = bests[warp]
                        candidate[0] = candidates[warp]
                        merge(best, token, other[0], candidate[0])
                    if thread == 0:
                        tokens[row] = token[0]

    return func
