"""Query, key and value heads on cuda: RMSNorm, RoPE and the cache write, one warp a head.

A lane holds columns of both halves of a head, so that it has the pairs that RoPE turns: in turn i
those from (i * 32 + lane) * vector on, and as far behind the middle. The tree of the norm's sum
hangs on the head's size alone: a lane adds its squares turn by turn, low columns before high ones,
and the lanes meet in a butterfly.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from schedules.gpu.thread import (
    WARP,
    add,
    ceil_div,
    constant,
    fma,
    mul,
    span,
    splat,
    vector_width,
    warp_sum,
)

WARPS = 4
SIDES = 2


@dataclass(frozen=True)
class Heads:
    """The heads of `width` rows: queries, then keys, then values, of `size` columns each."""

    width: int
    queries: int
    keys: int
    size: int

    @property
    def half(self) -> int:
        return self.size // SIDES

    @property
    def first_value(self) -> int:
        return self.queries + self.keys

    @property
    def count(self) -> int:
        """Heads of a row."""
        return self.first_value + self.keys

    @property
    def columns(self) -> int:
        return self.count * self.size

    @property
    def items(self) -> int:
        return self.width * self.count

    @property
    def blocks(self) -> int:
        return ceil_div(self.items, WARPS)

    @property
    def vector(self) -> int:
        """Columns of one load."""
        return vector_width(self.half, 2)

    @property
    def turns(self) -> int:
        return ceil_div(self.half, WARP * self.vector)

    @property
    def held(self) -> int:
        """Floats that a lane holds of a head."""
        return self.turns * SIDES * self.vector

    def low(self, turn, lane):
        """The first of a lane's columns in the lower half."""
        return (turn * WARP + lane) * self.vector

    def column(self, head, turn, side, lane):
        """The same of a row, in either half."""
        return head * self.size + side * self.half + self.low(turn, lane)

    def at(self, turn, side):
        """Where a lane's floats of a turn and half begin."""
        return (turn * SIDES + side) * self.vector

    def exists(self, turn, lane):
        """Whether a lane has columns in a turn; True where all have."""
        full = self.turns * WARP * self.vector == self.half
        return True if full else self.low(turn, lane) < self.half


def loader(heads: Heads):
    """A macro that puts a head into `held`, with zeros where a lane has no columns."""
    vector = heads.vector
    zeros = splat(T.float32(0), vector)

    def value(x, row, column, exists):
        found = x[row, span(column, vector)]
        return found if exists is True else T.if_then_else(exists, found, zeros)

    @T.macro
    def load(x, held, row, head, lane):
        for turn in T.unroll(heads.turns):
            for side in T.unroll(SIDES):
                held[span(heads.at(turn, side), vector)] = value(
                    x,
                    row,
                    heads.column(head, turn, side, lane),
                    heads.exists(turn, lane),
                )

    return load


def weight_loader(heads: Heads):
    """A macro that puts the norm's weight of a query or a key into `weights`."""
    vector = heads.vector

    @T.macro
    def load(q_norm, k_norm, weights, head, lane):
        for turn in T.unroll(heads.turns):
            for side in T.unroll(SIDES):
                if heads.exists(turn, lane):
                    weights[span(heads.at(turn, side), vector)] = T.if_then_else(
                        head < heads.queries,
                        q_norm[span(side * heads.half + heads.low(turn, lane), vector)],
                        k_norm[span(side * heads.half + heads.low(turn, lane), vector)],
                    )

    return load


def normalizer(heads: Heads, eps: float):
    """A macro that norms a head in `held`; all lanes of a warp take part."""

    @T.macro
    def normalize(held, weights):
        square = T.sblock_alloc_buffer((1,), "float32", scope="local")
        square[0] = T.float32(0)
        for i in T.unroll(heads.held):
            square[0] = fma(held[i], held[i], square[0])
        warp_sum(square, 0, WARP)
        square[0] = T.float32(1) / T.sqrt(square[0] / T.float32(heads.size) + constant(eps))
        for i in T.unroll(heads.held):
            held[i] = mul(mul(held[i], weights[i]), square[0])

    return normalize


def rotator(heads: Heads):
    """A macro that turns the pairs of a head by its row's position."""
    vector = heads.vector

    @T.macro
    def rotate(held, position, table, lane):
        turned = T.sblock_alloc_buffer((vector * 2,), "float32", scope="local")
        pair = T.sblock_alloc_buffer((2,), "float32", scope="local")
        for turn in T.unroll(heads.turns):
            if heads.exists(turn, lane):
                for j in T.unroll(vector):
                    turned[span(j * 2, 2)] = table[position, heads.low(turn, lane) + j, span(0, 2)]
            for j in T.unroll(vector):
                pair[0] = held[heads.at(turn, 0) + j]
                pair[1] = held[heads.at(turn, 1) + j]
                held[heads.at(turn, 0) + j] = add(
                    mul(pair[0], turned[j * 2]), -mul(pair[1], turned[j * 2 + 1])
                )
                held[heads.at(turn, 1) + j] = add(
                    mul(pair[1], turned[j * 2]), mul(pair[0], turned[j * 2 + 1])
                )

    return rotate


def key_value_writer(heads: Heads):
    """A macro that writes a key or a value to its slot of the cache."""
    vector = heads.vector
    halves = f"float16x{vector}" if vector > 1 else "float16"

    @T.macro
    def write(held, cache, slot, head, lane):
        for turn in T.unroll(heads.turns):
            for side in T.unroll(SIDES):
                if heads.exists(turn, lane):
                    cache[
                        (head - heads.queries) // heads.keys,
                        (head - heads.queries) % heads.keys,
                        slot,
                        span(side * heads.half + heads.low(turn, lane), vector),
                    ] = T.Cast(halves, held[span(heads.at(turn, side), vector)])

    return write


def cache_writer(heads: Heads):
    """A macro that writes a query to q, and a key or a value to the cache."""
    vector, write_key_value = heads.vector, key_value_writer(heads)

    @T.macro
    def write_query(held, q, row, head, lane):
        for turn in T.unroll(heads.turns):
            for side in T.unroll(SIDES):
                if heads.exists(turn, lane):
                    q[row, head, span(side * heads.half + heads.low(turn, lane), vector)] = held[
                        span(heads.at(turn, side), vector)
                    ]

    @T.macro
    def write(held, cache, q, row, slot, head, lane):
        if head < heads.queries:
            write_query(held, q, row, head, lane)
        else:
            write_key_value(held, cache, slot, head, lane)

    return write
