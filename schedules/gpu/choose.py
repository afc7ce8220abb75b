"""The choice of tokens on cuda.

A warp sums up a part of a row; `choose` gives a block to each row. Its warps join the parts, each
for itself, and draw together where the request samples (schedules/gpu/draw.py). Sums follow a tree
that depends on the vocabulary alone.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.draw import (
    NEIGHBOURS,
    ROW_THREADS,
    ROW_WARPS,
    best_of_block,
    exp,
    loader,
    log,
    merge,
    merge_across_warp,
    sampler,
    sum_over_block,
    token_of,
)
from schedules.gpu.thread import WARP, add, ceil_div, mul, warp_sum
from schedules.sampling import Row, is_broken, words_of
from schedules.workload import Workload

WARPS = 8


def softmax_parts(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.choose_ops.softmax_parts`: a warp a part."""
    (rows, vocab_size), state_words = work.shapes[0], work.shapes[3][0]
    parts, part = work.shapes[-1][1], work.settings["part"]
    groups, mine = ceil_div(parts, WARPS), part // WARP
    load = loader(vocab_size, part, words_of(work))

    @T.macro
    def consider(best, token, value, index):
        # What is no number counts as +inf with the id -1, which wins over everything.
        if is_broken(value):
            best[0] = T.infinity("float32")
            token[0] = -1
        elif value > best[0]:
            best[0] = value
            token[0] = index

    @T.macro
    def one_part(logits, seen, state, top, best, total, position, row, index, lane):
        values = T.sblock_alloc_buffer((mine,), "float32", scope="local")
        most = T.sblock_alloc_buffer((1,), "float32", scope="local")
        token = T.sblock_alloc_buffer((1,), "int32", scope="local")
        mass = T.sblock_alloc_buffer((1,), "float32", scope="local")
        load(values, logits, seen, state, position, row, index * part + lane * NEIGHBOURS)
        most[0] = T.float32("-inf")
        token[0] = -1
        for i in T.unroll(mine):
            consider(most, token, values[i], index * part + lane * NEIGHBOURS + token_of(i))
        merge_across_warp(most, token)
        mass[0] = T.float32(0)
        if token[0] >= 0:
            for i in T.unroll(mine):
                mass[0] = add(mass[0], exp(add(values[i], -most[0])))
        warp_sum(mass, 0, WARP)
        if lane == 0:
            top[row, index] = most[0]
            best[row, index] = token[0]
            total[row, index] = mass[0]

    @T.prim_func(private=True, s_tir=True)
    def func(
        logits: T.Buffer((rows, vocab_size), "float32"),
        logit_rows: T.Buffer((rows,), "int32"),
        horizon: T.Buffer((rows,), "int32"),
        state: T.Buffer((state_words,), "int32"),
        seen: T.Buffer((vocab_size,), "int32"),
        top: T.Buffer((rows, parts), "float32"),
        best: T.Buffer((rows, parts), "int32"),
        total: T.Buffer((rows, parts), "float32"),
    ):
        for bx in T.thread_binding(rows * groups, thread="blockIdx.x"):
            for tx in T.thread_binding(WARPS * WARP, thread="threadIdx.x"):
                with T.sblock("softmax_parts"):
                    block = T.axis.spatial(rows * groups, bx)
                    thread = T.axis.spatial(WARPS * WARP, tx)
                    if (logit_rows[block // groups] >= 0) and (
                        block % groups * WARPS + thread // WARP < parts
                    ):
                        one_part(
                            logits,
                            seen,
                            state,
                            top,
                            best,
                            total,
                            horizon[block // groups],
                            block // groups,
                            block % groups * WARPS + thread // WARP,
                            thread % WARP,
                        )

    return func


def choose(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.choose_ops.choose`: a block a row."""
    (rows, vocab_size), state_words = work.shapes[0], work.shapes[3][0]
    parts, words = work.shapes[5][1], words_of(work)
    turns = ceil_div(parts, ROW_THREADS)
    sample = sampler(vocab_size, parts, work.settings["part"], words)

    @T.macro
    def join(best, total, token, mass, at):
        """The row's maximum, its token and Σ exp(z - maximum)."""
        count = T.sblock_alloc_buffer((1,), "int32", scope="local")
        at.peak[0] = T.float32("-inf")
        token[0] = -1
        for turn in T.unroll(turns):
            if turn * ROW_THREADS + at.thread < parts:
                merge(
                    at.peak,
                    token,
                    at.top[at.row, turn * ROW_THREADS + at.thread],
                    best[at.row, turn * ROW_THREADS + at.thread],
                )
        best_of_block(at.peak, token, at)
        mass[0] = T.float32(0)
        count[0] = 0
        if token[0] >= 0:
            for turn in T.unroll(turns):
                if turn * ROW_THREADS + at.thread < parts:
                    mass[0] = add(
                        mass[0],
                        mul(
                            total[at.row, turn * ROW_THREADS + at.thread],
                            exp(add(at.top[at.row, turn * ROW_THREADS + at.thread], -at.peak[0])),
                        ),
                    )
        sum_over_block(count, mass, at)

    @T.macro
    def serve(best, total, token, confidence, logprob, at):
        """What a row that asks gets; token stays -1 where it has no finite logit."""
        mass = T.sblock_alloc_buffer((1,), "float32", scope="local")
        z = T.sblock_alloc_buffer((1,), "float32", scope="local")
        join(best, total, token, mass, at)
        if token[0] >= 0:
            z[0] = at.peak[0]
            sample(token, z, at)
            if at.thread == 0:
                confidence[at.row] = T.float32(1) / mass[0]
                logprob[at.row] = add(add(z[0], -at.peak[0]), -log(mass[0]))

    @T.prim_func(private=True, s_tir=True)
    def func(
        logits: T.Buffer((rows, vocab_size), "float32"),
        logit_rows: T.Buffer((rows,), "int32"),
        horizon: T.Buffer((rows,), "int32"),
        state: T.Buffer((state_words,), "int32"),
        seen: T.Buffer((vocab_size,), "int32"),
        top: T.Buffer((rows, parts), "float32"),
        best: T.Buffer((rows, parts), "int32"),
        total: T.Buffer((rows, parts), "float32"),
        token: T.Buffer((rows,), "int32"),
        confidence: T.Buffer((rows,), "float32"),
        logprob: T.Buffer((rows,), "float32"),
    ):
        for bx in T.thread_binding(rows, thread="blockIdx.x"):
            for tx in T.thread_binding(ROW_THREADS, thread="threadIdx.x"):
                with T.sblock("choose"):
                    row = T.axis.spatial(rows, bx)
                    thread = T.axis.spatial(ROW_THREADS, tx)
                    peak = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    inverse = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    chosen = T.sblock_alloc_buffer((1,), "int32", scope="local")
                    ids = T.sblock_alloc_buffer((ROW_WARPS,), "int32", scope="shared")
                    values = T.sblock_alloc_buffer((ROW_WARPS,), "float32", scope="shared")
                    chosen[0] = -1
                    if thread == 0:
                        confidence[row] = T.float32(0)
                        logprob[row] = T.float32(0)
                    if logit_rows[row] >= 0:
                        serve(
                            best,
                            total,
                            chosen,
                            confidence,
                            logprob,
                            Row(
                                logits,
                                seen,
                                state,
                                top,
                                horizon[row],
                                row,
                                peak,
                                inverse,
                                thread,
                                ids,
                                values,
                            ),
                        )
                    if thread == 0:
                        token[row] = chosen[0]

    return func
