"""How queries, keys and values come into the registers of fragments (attention_fragments.py)."""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from schedules.gpu.attention_fragments import (
    GROUPS,
    PAIRS,
    STEP,
    STEPS,
    THREADS,
    WARPS,
    WORDS,
    Sizes,
    split,
)
from schedules.gpu.attention_warp import Plan
from schedules.gpu.thread import WARP, constant, mul, span

LOAD = "ld.weak.global"


@dataclass(frozen=True)
class Access:
    """Macros that bring in what a block attends with.

    They take as `inputs` what they read from. fetch: all its queries; keys, values: a lane's keys
    and values of 64 slots of the cache; fresh: those that this launch itself makes, or None.
    """

    fetch: Any
    keys: Any
    values: Any
    fresh: Any = None


@dataclass(frozen=True)
class Memory:
    """The buffers of queries and a cache that are there already."""

    q: Any
    cache: Any


def from_memory(plan: Plan, sizes: Sizes) -> Access:
    """Of a `Memory`."""
    return Access(fetch_queries(plan, sizes), *loads(sizes))


def key_element(step, lane):
    """The first of the four elements that a lane holds of a k-step of queries and keys."""
    return step // 2 * 32 + lane % 4 * 8 + step % 2 * 4


def key_slot(n, warp, lane):
    """Which of 64 slots a lane's keys of group n are of."""
    return warp * STEP + n * PAIRS + lane // 4


def value_slot(step, row, lane):
    """Which of 64 slots a lane's row (of four) of a k-step of values is."""
    return step * STEP + lane % 4 * 2 + row % 2 + row // 2 * PAIRS


def value_element(sizes: Sizes, run, warp, lane):
    """The first of the neighbouring elements that a lane holds of a run of a value."""
    return warp * (sizes.head_dim // WARPS) + (run * PAIRS + lane // 4) * sizes.value


def fetch_queries(plan: Plan, sizes: Sizes, load_query=None):
    """A macro that brings the terms of a block's queries, scaled, into shared memory.

    `load_query` is a macro that loads four elements of one, from where the queries are given.
    """
    factor = plan.head_dim**-0.5

    def step_of(turn, thread):
        return (turn * WARPS + thread // WARP) % sizes.key_steps

    def pair_of(turn, thread):
        tile = (turn * WARPS + thread // WARP) // sizes.key_steps
        return tile * PAIRS + thread % WARP // 4

    @T.macro
    def plain(inputs, loaded, row, head, column):
        loaded[span(0, WORDS)] = inputs.q[row, head, span(column, WORDS)]

    load = plain if load_query is None else load_query

    @T.macro
    def fetch(inputs, queries, kv, first, thread):
        scaled = T.sblock_alloc_buffer((WORDS,), "float32", scope="local")
        terms = T.sblock_alloc_buffer((WORDS,), "uint32", scope="local")
        for turn in T.unroll(sizes.tiles * sizes.key_steps // WARPS):
            load(
                inputs,
                scaled,
                plan.row_of(first, pair_of(turn, thread)),
                plan.head_of(kv, first, pair_of(turn, thread)),
                key_element(step_of(turn, thread), thread % WARP),
            )
            for i in T.unroll(WORDS):
                scaled[i] = mul(scaled[i], constant(factor))
            split(scaled, terms, 0)
            queries[span((turn * THREADS + thread) * WORDS, WORDS)] = terms[span(0, WORDS)]

    return fetch


def loads(sizes: Sizes):
    """Macros that load a lane's keys, and values, of the 64 slots from `slot` on.

    Slots behind the last one hold nothing yet: such lanes read the last one, unseen.
    """
    pieces = sizes.head_dim // 32

    @T.macro
    def load_keys(inputs, keys, kv, slot, last, warp, lane):
        for n in T.unroll(GROUPS):
            for j in T.unroll(pieces):
                T.ptx[f"{LOAD}.v4.u32"](
                    keys[(n * pieces + j) * 4],
                    keys[(n * pieces + j) * 4 + 1],
                    keys[(n * pieces + j) * 4 + 2],
                    keys[(n * pieces + j) * 4 + 3],
                    T.address_of(
                        inputs.cache[
                            0,
                            kv,
                            T.min(slot + key_slot(n, warp, lane), last),
                            j * 32 + lane % 4 * 8,
                        ]
                    ),
                )

    def value_at(cache, kv, slot, last, warp, lane, run, step, row):
        at = T.min(slot + value_slot(step, row, lane), last)
        return T.address_of(cache[1, kv, at, value_element(sizes, run, warp, lane)])

    @T.macro
    def load_value(values, at, address):
        if sizes.value == 4:
            T.ptx[f"{LOAD}.v2.u32"](values[at], values[at + 1], address)
        else:
            T.ptx[f"{LOAD}.u32"](values[at], address)

    @T.macro
    def load_values(inputs, values, kv, slot, last, warp, lane):
        for step in T.unroll(STEPS):
            for row in T.unroll(4):
                for run in T.unroll(sizes.runs):
                    load_value(
                        values,
                        sizes.word(run, step, row),
                        value_at(inputs.cache, kv, slot, last, warp, lane, run, step, row),
                    )

    return load_keys, load_values
