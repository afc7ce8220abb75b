"""The choice of tokens on the processor: a part of a row is a task, then a row.

A row that samples is looked at part by part, and a part whose maximum rules it out is passed over.
Sums follow the order of the tokens, so that they depend on the vocabulary alone.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.cpu.vector import LANES, exp, log, span, splat, tree_sum
from schedules.sampling import (
    ENOUGH,
    REACH,
    STEPS,
    TRY,
    Row,
    is_active,
    is_broken,
    is_open,
    narrow,
    next_threshold,
    penalty_factor,
    philox,
    setting,
    share,
    start_search,
    uniform,
    value_of,
    wanted,
    words_of,
)
from schedules.workload import Workload

WIDE = 2 * LANES


def softmax_parts(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.choose_ops.softmax_parts`."""
    (rows, vocab_size), state_words = work.shapes[0], work.shapes[3][0]
    parts, part = work.shapes[-1][1], work.settings["part"]
    words = words_of(work)

    @T.macro
    def load(z, logits, seen, state, position, row, first):
        """z (part,): the part's logits after the penalty, -inf behind the vocabulary."""
        for k in range(part):
            z[k] = T.if_then_else(
                first + k < vocab_size,
                logits[row, T.min(first + k, vocab_size - 1)],
                T.float32("-inf"),
            )
        if setting(state, words.penalty) != T.float32(1):
            for k in range(part):
                if first + k < vocab_size:
                    if seen[first + k] < position:
                        z[k] = z[k] * penalty_factor(z[k], state, words)

    @T.macro
    def find(z, most, token, first):
        most[0] = T.float32("-inf")
        token[0] = -1
        for k in range(part):
            if z[k] > most[0]:
                most[0] = z[k]
                token[0] = first + k
        # +inf is the most of its part, and stays so; what is no number is greater than nothing.
        for k in range(part):
            if is_broken(z[k]):
                most[0] = T.infinity("float32")
                token[0] = -1

    @T.macro
    def add_up(z, most, sums, total, row, index):
        sums[span(0, WIDE)] = splat(T.float32(0), WIDE)
        for k in range(part // WIDE):
            sums[span(0, WIDE)] = sums[span(0, WIDE)] + exp(
                z[span(k * WIDE, WIDE)] - splat(most[0], WIDE), WIDE
            )
        total[row, index] = tree_sum(sums, 0, WIDE)

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
        for i in range(rows * parts):
            with T.sblock("part"):
                task = T.axis.spatial(rows * parts, i)
                z = T.sblock_alloc_buffer((part,), "float32")
                sums = T.sblock_alloc_buffer((WIDE,), "float32")
                most = T.sblock_alloc_buffer((1,), "float32")
                token = T.sblock_alloc_buffer((1,), "int32")
                if logit_rows[task // parts] >= 0:
                    load(
                        z,
                        logits,
                        seen,
                        state,
                        horizon[task // parts],
                        task // parts,
                        task % parts * part,
                    )
                    find(z, most, token, task % parts * part)
                    total[task // parts, task % parts] = T.float32(0)
                    if token[0] >= 0:
                        add_up(z, most, sums, total, task // parts, task % parts)
                    top[task // parts, task % parts] = most[0]
                    best[task // parts, task % parts] = token[0]

    return func


def choose(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.choose_ops.choose`."""
    (rows, vocab_size), state_words = work.shapes[0], work.shapes[3][0]
    parts, part = work.shapes[5][1], work.settings["part"]
    words = words_of(work)

    def samples(at):
        targets = at.state[words.row_pending] + at.state[words.row_drafts]
        return T.And(at.row < targets, setting(at.state, words.temperature) > T.float32(0))

    def scaled(value, at):
        """y: how far below the maximum, in units of the temperature."""
        return (value - at.peak[0]) * at.inverse[0]

    def logit(at, token):
        wants = T.if_then_else(
            setting(at.state, words.penalty) != T.float32(1),
            at.seen[token] < at.position,
            T.bool(False),
        )
        value = at.logits[at.row, token]
        return T.if_then_else(wants, value * penalty_factor(value, at.state, words), value)

    def gumbel(bits):
        return -log(-log(uniform(bits)))

    @T.macro
    def join(best, total, token, mass, at):
        """The row's maximum, its token and Σ exp(z - maximum)."""
        at.peak[0] = T.float32("-inf")
        mass[0] = T.float32(0)
        for p in range(parts):
            if at.top[at.row, p] > at.peak[0]:
                at.peak[0] = at.top[at.row, p]
                token[0] = best[at.row, p]
        if token[0] >= 0:
            for p in range(parts):
                mass[0] = mass[0] + total[at.row, p] * exp(at.top[at.row, p] - at.peak[0], 1)

    @T.macro
    def measure(count, mass, z, at, threshold):
        """Tokens from the threshold on, and their mass in units of the largest token's."""
        count[0] = 0
        mass[0] = T.float32(0)
        for p in range(parts):
            if at.top[at.row, p] >= threshold:
                for k in range(T.min(part, vocab_size - p * part)):
                    z[0] = logit(at, p * part + k)
                    if z[0] >= threshold:
                        count[0] = count[0] + 1
                        mass[0] = mass[0] + exp(scaled(z[0], at), 1)

    @T.macro
    def filter_tokens(least, z, at):
        """least: the smallest logit that top_k, and then top_p, keep."""
        search = T.sblock_alloc_buffer((6,), "int32")
        distance = T.sblock_alloc_buffer((1,), "float32")
        count = T.sblock_alloc_buffer((1,), "int32")
        mass = T.sblock_alloc_buffer((1,), "float32")
        bound = T.sblock_alloc_buffer((1,), "float32")
        least[0] = T.min_value("float32")
        for stage in range(2):
            if is_active(at.state, words, stage, vocab_size):
                start_search(
                    search, distance, least[0], at.peak[0], setting(at.state, words.temperature)
                )
                while is_open(search, wanted(at.state, words, stage)):
                    next_threshold(search, distance, at.peak[0])
                    measure(count, mass, z, at, value_of(search[TRY]))
                    if search[STEPS] == 0:
                        bound[0] = mass[0] * share(at.state, words, stage)
                    narrow(
                        search,
                        count[0],
                        T.And(count[0] >= wanted(at.state, words, stage), mass[0] >= bound[0]),
                    )
                least[0] = value_of(search[ENOUGH])

    @T.macro
    def draw(score, token, z, least, floor, at):
        """The best score of all; nothing is asked of tokens that no noise would lift so far."""
        bits = T.sblock_alloc_buffer((4,), "uint32")
        keys = T.sblock_alloc_buffer((2,), "uint32")
        product = T.sblock_alloc_buffer((2,), "uint64")
        drawn = T.sblock_alloc_buffer((1,), "int32")
        noisy = T.sblock_alloc_buffer((1,), "float32")
        score[0] = T.float32("-inf")
        for p in range(parts):
            if (at.top[at.row, p] >= least) and (
                scaled(at.top[at.row, p], at) + T.float32(REACH) >= score[0]
            ):
                drawn[0] = -1
                for k in range(T.min(part, vocab_size - p * part)):
                    z[0] = logit(at, p * part + k)
                    if (z[0] >= least) and (scaled(z[0], at) >= floor):
                        if scaled(z[0], at) + T.float32(REACH) >= score[0]:
                            # Four neighbours share their random bits.
                            if drawn[0] != (p * part + k) // 4:
                                drawn[0] = (p * part + k) // 4
                                philox(bits, keys, product, at.state, words, drawn[0], at.position)
                            noisy[0] = scaled(z[0], at) + gumbel(bits[(p * part + k) % 4])
                            if noisy[0] > score[0]:
                                score[0] = noisy[0]
                                token[0] = p * part + k

    @T.macro
    def serve(best, total, token, confidence, logprob, at):
        """What a row that asks gets; token stays -1 where it has no finite logit."""
        z = T.sblock_alloc_buffer((1,), "float32")
        mass = T.sblock_alloc_buffer((1,), "float32")
        least = T.sblock_alloc_buffer((1,), "float32")
        floor = T.sblock_alloc_buffer((1,), "float32")
        score = T.sblock_alloc_buffer((1,), "float32")
        join(best, total, token, mass, at)
        if token[0] >= 0:
            if samples(at):
                at.inverse[0] = T.float32(1) / setting(at.state, words.temperature)
                filter_tokens(least, z, at)
                floor[0] = T.float32("-inf")
                if setting(at.state, words.min_p) > T.float32(0):
                    floor[0] = log(setting(at.state, words.min_p))
                draw(score, token, z, least[0], floor[0], at)
            confidence[at.row] = T.float32(1) / mass[0]
            logprob[at.row] = logit(at, token[0]) - at.peak[0] - log(mass[0])

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
        for i in T.parallel(rows):
            with T.sblock("choose"):
                row = T.axis.spatial(rows, i)
                peak = T.sblock_alloc_buffer((1,), "float32")
                inverse = T.sblock_alloc_buffer((1,), "float32")
                chosen = T.sblock_alloc_buffer((1,), "int32")
                chosen[0] = -1
                confidence[row] = T.float32(0)
                logprob[row] = T.float32(0)
                if logit_rows[row] >= 0:
                    serve(
                        best,
                        total,
                        chosen,
                        confidence,
                        logprob,
                        Row(logits, seen, state, top, horizon[row], row, peak, inverse),
                    )
                token[row] = chosen[0]

    return func
