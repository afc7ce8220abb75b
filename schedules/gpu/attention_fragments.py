"""Attention on cuda's tensor cores: what four warps do with 64 slots at a time.

An mma m16n8k16 holds eight (row, head) pairs of one key/value head: a pair's float32 numbers are
cut into two float16 terms, which are two of the sixteen rows, so that one lane holds both sums and
adds them. First every warp makes the scores of 16 of the slots, then, when all warps know the
largest score and have written their weights, every warp adds up a quarter of the values' elements.
So a block reads keys and values once, each lane straight into the registers of its fragments: which
element an mma takes for which k is free where A and B agree.

A chain's slots go through 64 at a time, and chains are folded one after the other. That tree hangs
on no tile, and a pair of rows of A meets no other pair.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from schedules.gpu.attention_warp import Plan
from schedules.gpu.thread import WARP, across, add, ceil_div, constant, mul, span
from schedules.workload import Workload

PAIRS = 8
WARPS = 4
THREADS = WARPS * WARP
SLOTS = 64
MOST_ELEMENTS = 128
# Slots whose weights are one k-step, and groups of eight of them: what a warp makes scores of.
STEP = 16
GROUPS = STEP // PAIRS
STEPS = SLOTS // STEP
WORDS = 4
LOAD = "ld.weak.global"
ONES = 0x3C003C00
LOWER_HALVES, UPPER_HALVES = 0x5410, 0x7632
# A float16 is no finite number where all bits of its exponent are set: adding one then carries.
EXPONENTS, CARRIES, CARRIED = 0x7C007C00, 0x04000400, 0x80008000


@dataclass(frozen=True)
class MmaTile:
    """What a block takes at once; nothing here is part of the tree.

    tiles: groups of eight (row, head) pairs; at_once: groups whose scores are made together.
    """

    tiles: int
    at_once: int

    @property
    def pairs(self) -> int:
        """(row, head) pairs of a block."""
        return self.tiles * PAIRS


def serves(head_dim: int) -> bool:
    """Whether four warps can share a head of `head_dim` elements in whole fragments.

    Longer heads do not leave a lane registers for its keys and values.
    """
    return head_dim % SLOTS == 0 and head_dim <= MOST_ELEMENTS


def blocks_of(work: Workload, tile: MmaTile) -> int:
    """Blocks for the pairs of all key/value heads."""
    (width, heads, _), kv_heads = work.shapes[0], work.shapes[1][1]
    return kv_heads * ceil_div(width * heads // kv_heads, tile.pairs)


def fitting(work: Workload) -> list[MmaTile]:
    """The tiles for the pairs of a key/value head, the smallest first.

    A division by a group that is no power of two keeps more in registers: tiles that would spill
    some, where three blocks share a multiprocessor, are not among them.
    """
    (width, heads, head_dim), kv_heads = work.shapes[0], work.shapes[1][1]
    group = heads // kv_heads
    found = [
        MmaTile(tiles, min(tiles, 2))
        for tiles in (1, 2, 4)
        if tiles == 1 or tiles // 2 * PAIRS < width * group
    ]
    if group & (group - 1) == 0:
        return found
    if head_dim == SLOTS:
        return [tile for tile in found if tile.tiles < 4]
    return [MmaTile(2, 1) if tile.tiles == 2 else tile for tile in found]


@dataclass(frozen=True)
class Sizes:
    """Where the registers of a lane are."""

    head_dim: int
    tiles: int

    @property
    def key_steps(self) -> int:
        return self.head_dim // STEP

    @property
    def keys(self) -> int:
        """Words of the keys of a lane."""
        return GROUPS * self.key_steps * 2

    @property
    def value(self) -> int:
        """Elements of one load of a lane: 8 lanes of them are the most of a warp's quarter."""
        return next(n for n in (4, 2) if self.head_dim // WARPS % (n * PAIRS) == 0)

    @property
    def runs(self) -> int:
        """Loads of a lane for one slot's value."""
        return self.head_dim // WARPS // (self.value * PAIRS)

    @property
    def values(self) -> int:
        """Words of the values of a lane."""
        return self.runs * SLOTS // WARPS * self.value // 2

    @property
    def held(self) -> int:
        """Elements of the weighted sum of values that a lane holds for each group of pairs."""
        return self.runs * self.value * 2

    def word(self, run, step, row, i=0):
        """Word i of a lane's row (of four) of a k-step."""
        return ((run * STEPS + step) * 4 + row) * (self.value // 2) + i

    def element(self, warp, lane, at):
        """Which element of the head a lane's sum `at` is."""
        per_run = 2 * self.value
        run = at // per_run * self.value * PAIRS
        return warp * (self.head_dim // WARPS) + run + lane % 4 * per_run + at % per_run


def byte_perm(first, second, selector: int):
    return T.call_pure_extern("uint32", "__byte_perm", first, second, T.uint32(selector))


def half_pair(halves, first: int):
    """Two float16 neighbours as a register holds them."""
    return T.reinterpret("uint32", halves[span(first, 2)])


@T.macro
def split(values, words, base):
    """Four float32 to the four registers of A: high, low, high and low terms of two each."""
    high = T.sblock_alloc_buffer((4,), "float16", scope="local")
    low = T.sblock_alloc_buffer((4,), "float16", scope="local")
    for i in T.unroll(4):
        high[i] = T.Cast("float16", values[i])
        low[i] = T.Cast("float16", add(values[i], -T.Cast("float32", high[i])))
    for i in T.unroll(2):
        words[base + 2 * i] = half_pair(high, 2 * i)
        words[base + 2 * i + 1] = half_pair(low, 2 * i)


@T.macro
def multiply(dot, d, a, first, b0, b1):
    """dot[d:d + 4] += the product of a[first:first + 4] and the words b0, b1."""
    T.ptx.mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32(
        dot[d],
        dot[d + 1],
        dot[d + 2],
        dot[d + 3],
        a[first],
        a[first + 1],
        a[first + 2],
        a[first + 3],
        b0,
        b1,
        dot[d],
        dot[d + 1],
        dot[d + 2],
        dot[d + 3],
    )


@T.macro
def clear(dot, count):
    for i in T.unroll(count):
        dot[i] = T.float32(0)


def key_element(step, lane):
    """The first of the four elements that a lane holds of a k-step of queries and keys."""
    return step // 2 * 32 + lane % 4 * 8 + step % 2 * 4


def query_of_row(plan: Plan):
    """How four elements of a pair's query are read from those of all rows."""

    def load(q, kv, first, pair, element):
        row, head = plan.row_of(first, pair), plan.head_of(kv, first, pair)
        return q[row, head, span(element, WORDS)]

    return load


def fetch_queries(plan: Plan, sizes: Sizes, load):
    """A macro that brings the terms of a block's queries, scaled, into shared memory; `load(q, kv,
    first, pair, element)` is how four neighbouring elements of one are read."""
    factor = plan.head_dim**-0.5

    def step_of(turn, thread):
        return (turn * WARPS + thread // WARP) % sizes.key_steps

    def pair_of(turn, thread):
        tile = (turn * WARPS + thread // WARP) // sizes.key_steps
        return tile * PAIRS + thread % WARP // 4

    @T.macro
    def fetch(q, queries, kv, first, thread):
        scaled = T.sblock_alloc_buffer((WORDS,), "float32", scope="local")
        terms = T.sblock_alloc_buffer((WORDS,), "uint32", scope="local")
        for turn in T.unroll(sizes.tiles * sizes.key_steps // WARPS):
            scaled[span(0, WORDS)] = load(
                q,
                kv,
                first,
                pair_of(turn, thread),
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
    def load_keys(cache, keys, kv, slot, last, warp, lane):
        for n in T.unroll(GROUPS):
            for j in T.unroll(pieces):
                T.ptx[f"{LOAD}.v4.u32"](
                    keys[(n * pieces + j) * 4],
                    keys[(n * pieces + j) * 4 + 1],
                    keys[(n * pieces + j) * 4 + 2],
                    keys[(n * pieces + j) * 4 + 3],
                    T.address_of(
                        cache[
                            0,
                            kv,
                            T.min(slot + warp * STEP + n * PAIRS + lane // 4, last),
                            j * 32 + lane % 4 * 8,
                        ]
                    ),
                )

    def value_at(cache, kv, slot, last, warp, lane, run, step, row):
        at = slot + step * STEP + lane % 4 * 2 + row % 2 + row // 2 * PAIRS
        first = warp * (sizes.head_dim // WARPS) + (run * PAIRS + lane // 4) * sizes.value
        return T.address_of(cache[1, kv, T.min(at, last), first])

    @T.macro
    def load_value(values, at, address):
        if sizes.value == 4:
            T.ptx[f"{LOAD}.v2.u32"](values[at], values[at + 1], address)
        else:
            T.ptx[f"{LOAD}.u32"](values[at], address)

    @T.macro
    def load_values(cache, values, kv, slot, last, warp, lane):
        for step in T.unroll(STEPS):
            for row in T.unroll(4):
                for run in T.unroll(sizes.runs):
                    load_value(
                        values,
                        sizes.word(run, step, row),
                        value_at(cache, kv, slot, last, warp, lane, run, step, row),
                    )

    return load_keys, load_values


def finite_values(sizes: Sizes):
    """A macro that takes values which are no finite numbers out, and says of which slots.

    A weight of 0 does not make up for them, and they may be of a row that others do not see.
    marks[0] tells whether the warp has such values; marks[1:] are the k-steps' words of a B that
    has ones for their slots.
    """
    words = sizes.value // 2

    def carried(values, step, row):
        result = T.uint32(0)
        for run in range(sizes.runs):
            for i in range(words):
                word = T.bitwise_and(values[sizes.word(run, step, row, i)], T.uint32(EXPONENTS))
                result = T.bitwise_or(result, word + T.uint32(CARRIES))
        return T.bitwise_and(result, T.uint32(CARRIED))

    @T.macro
    def any_broken(values, marks):
        marks[0] = T.uint32(0)
        for step in T.unroll(STEPS):
            for row in T.unroll(4):
                marks[0] = T.bitwise_or(marks[0], carried(values, step, row))
        for level in T.unroll(5):
            marks[0] = T.bitwise_or(marks[0], across(marks[0], T.shift_left(1, level)))

    @T.macro
    def take_out(values, marks, broken, step, row):
        broken[0] = carried(values, step, row)
        for level in T.unroll(3):
            broken[0] = T.bitwise_or(broken[0], across(broken[0], T.shift_left(4, level)))
        if broken[0] != T.uint32(0):
            marks[1 + step * 2 + row // 2] = T.bitwise_or(
                marks[1 + step * 2 + row // 2],
                T.uint32(ONES & (0xFFFF << (16 * (row % 2)))),
            )
            for run in T.unroll(sizes.runs):
                for i in T.unroll(words):
                    values[sizes.word(run, step, row, i)] = T.uint32(0)

    @T.macro
    def finite(values, marks):
        broken = T.sblock_alloc_buffer((1,), "uint32", scope="local")
        any_broken(values, marks)
        if marks[0] != T.uint32(0):
            for i in T.unroll(2 * STEPS):
                marks[1 + i] = T.uint32(0)
            for step in T.unroll(STEPS):
                take_out(values, marks, broken, step, 0)
                take_out(values, marks, broken, step, 1)
                take_out(values, marks, broken, step, 2)
                take_out(values, marks, broken, step, 3)

    return finite
