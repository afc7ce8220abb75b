"""Rows of floats over the warps of a block on cuda: RMSNorm and int8 codes of a linear's input.

A row is cut into spans of 256 columns, each the work of one warp: lane l has the columns 4l..4l+3
of both halves. The tree of the sum of squares hangs on the row's size alone: a lane adds its eight
columns in their order, the lanes of a span meet in a butterfly, and span s joins the chain s % 4,
of which (0 + 2) + (1 + 3) is the sum. So a block of any number of warps gets the same bits, and so
does a linear that norms its own input.

The weight is multiplied in before the norm's factor: rounding keeps order, so that the largest
|x · weight| times the factor is the largest result, and one exchange among the warps tells both.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from schedules.gpu.int8 import (
    GROUP,
    LANE_COLUMNS,
    LEAST_ABSMAX,
    code_factor,
    code_scale,
    code_sum,
    code_word,
    magnitude,
    quantize_group,
)
from schedules.gpu.thread import (
    WARP,
    add,
    ceil_div,
    constant,
    fma,
    integer_max,
    integer_sum,
    mul,
    span,
    splat,
    vector_width,
    warp_sum,
)

HALVES = 2
SPAN = HALVES * GROUP
HELD = HALVES * LANE_COLUMNS
CHAINS = 4


@dataclass(frozen=True)
class RowTile:
    """How `rows` rows of `size` columns, written out to `padded`, lie over the warps of a block.

    In turn i of a row, warp w has the span i * warps + w. A lane holds `HELD` floats a turn.
    """

    size: int
    padded: int
    rows: int
    warps: int

    @property
    def spans(self) -> int:
        return ceil_div(self.size, SPAN)

    @property
    def turns(self) -> int:
        """Turns of one row."""
        return ceil_div(self.spans, self.warps)

    @property
    def held(self) -> int:
        """Floats that a lane holds of all rows."""
        return self.rows * self.turns * HELD

    @property
    def vector(self) -> int:
        """Columns of one load."""
        return vector_width(self.size, LANE_COLUMNS)

    def at(self, row, turn) -> int:
        """Where a lane's floats of a turn begin."""
        return (row * self.turns + turn) * HELD

    def span_of(self, turn, warp):
        return turn * self.warps + warp

    def column(self, turn, half, warp, lane):
        """The first of a lane's four columns."""
        return self.span_of(turn, warp) * SPAN + half * GROUP + lane * LANE_COLUMNS

    def within(self, column, end: int):
        """Whether a column is one of the first `end`; True where all are."""
        return True if self.warps * self.turns * SPAN <= end else column < end


def loader(tile: RowTile, load, rows: bool):
    """A macro that puts `load(x, row, column)` of the tile's rows, or of one for all, into `held`,
    with zeros behind a row's end."""
    vector = tile.vector
    zeros = splat(T.float32(0), vector)

    def value(x, row, column):
        inside = tile.within(column, tile.size)
        found = load(x, row, column)
        return found if inside is True else T.if_then_else(inside, found, zeros)

    @T.macro
    def load_rows(x, held, row, warp, lane):
        for r in T.unroll(tile.rows if rows else 1):
            for turn in T.unroll(tile.turns):
                for half in T.unroll(HALVES):
                    for v in T.unroll(LANE_COLUMNS // vector):
                        held[span(tile.at(r, turn) + half * LANE_COLUMNS + v * vector, vector)] = (
                            value(x, row + r, tile.column(turn, half, warp, lane) + v * vector)
                        )

    return load_rows


def normalizer(tile: RowTile, eps: float):
    """A macro that leaves x · weight in `held`, the norm's factor of every row in `inverse` and the
    bits of the largest |x · weight| in `largest`; the shared `total` of each row is set to 0, where
    it is not None. All threads meet once."""
    spans = tile.spans
    stride = ceil_div(spans, CHAINS) * CHAINS

    @T.macro
    def reduce(held, weights, squares, magnitudes, r, warp, lane):
        square = T.sblock_alloc_buffer((1,), "float32", scope="local")
        most = T.sblock_alloc_buffer((1,), "int32", scope="local")
        for turn in T.unroll(tile.turns):
            square[0] = T.float32(0)
            most[0] = 0
            for i in T.unroll(HELD):
                square[0] = fma(held[tile.at(r, turn) + i], held[tile.at(r, turn) + i], square[0])
                held[tile.at(r, turn) + i] = mul(
                    held[tile.at(r, turn) + i], weights[turn * HELD + i]
                )
                most[0] = T.max(most[0], magnitude(held[tile.at(r, turn) + i]))
            warp_sum(square, 0, WARP)
            most[0] = integer_max(most[0])
            if lane == 0:
                if tile.within(tile.span_of(turn, warp) * SPAN, tile.size):
                    squares[r * stride + tile.span_of(turn, warp)] = square[0]
                    magnitudes[r * stride + tile.span_of(turn, warp)] = most[0]

    @T.macro
    def join(squares, magnitudes, inverse, largest, r, lane):
        parts = T.sblock_alloc_buffer((stride,), "float32", scope="local")
        sums = T.sblock_alloc_buffer((CHAINS,), "float32", scope="local")
        for i in T.unroll(spans // CHAINS):
            parts[span(i * CHAINS, CHAINS)] = squares[span(r * stride + i * CHAINS, CHAINS)]
        for i in T.unroll(spans % CHAINS):
            parts[spans - 1 - i] = squares[r * stride + spans - 1 - i]
        for i in T.unroll(CHAINS):
            sums[i] = T.float32(0)
        for i in T.unroll(spans):
            sums[i % CHAINS] = add(sums[i % CHAINS], parts[i])
        sums[0] = add(add(sums[0], sums[2]), add(sums[1], sums[3]))
        inverse[r] = T.float32(1) / T.sqrt(sums[0] / T.float32(tile.size) + constant(eps))
        largest[r] = 0
        for i in T.unroll(ceil_div(spans, WARP)):
            largest[r] = T.max(
                largest[r], magnitudes[r * stride + T.min(i * WARP + lane, spans - 1)]
            )
        largest[r] = integer_max(largest[r])

    @T.macro
    def normalize(held, weights, inverse, largest, total, warp, lane):
        squares = T.sblock_alloc_buffer((tile.rows * stride,), "float32", scope="shared")
        magnitudes = T.sblock_alloc_buffer((tile.rows * stride,), "int32", scope="shared")
        for r in T.unroll(tile.rows):
            reduce(held, weights, squares, magnitudes, r, warp, lane)
            if total is not None:
                if warp * WARP + lane == 0:
                    total[r] = 0
        T.tvm_storage_sync("shared")
        for r in T.unroll(tile.rows):
            join(squares, magnitudes, inverse, largest, r, lane)

    return normalize


def encoder(tile: RowTile):
    """A macro that writes rows that a `normalizer` left as int8, with one scale a row.

    `q` gets them from row `first` on; `scale` the tile's scales, for every thread; the shared
    `total` the sums of their codes, once all threads met.
    """

    @T.macro
    def encode(held, inverse, largest, q, scale, total, first, warp, lane):
        bound = T.sblock_alloc_buffer((1,), "int32", scope="local")
        factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
        count = T.sblock_alloc_buffer((1,), "int32", scope="local")
        word = T.sblock_alloc_buffer((1,), "int32", scope="local")
        for r in T.unroll(tile.rows):
            bound[0] = magnitude(mul(T.reinterpret("float32", largest[r]), inverse[r]))
            bound[0] = T.max(bound[0], LEAST_ABSMAX)
            factor[0] = code_factor(bound[0])
            scale[r] = code_scale(bound[0])
            count[0] = 0
            for turn in T.unroll(tile.turns):
                for half in T.unroll(HALVES):
                    for i in T.unroll(LANE_COLUMNS):
                        held[tile.at(r, turn) + half * LANE_COLUMNS + i] = mul(
                            held[tile.at(r, turn) + half * LANE_COLUMNS + i], inverse[r]
                        )
                    word[0] = code_word(held, tile.at(r, turn) + half * LANE_COLUMNS, factor[0])
                    if tile.within(tile.column(turn, half, warp, lane), tile.padded):
                        q[first + r, span(tile.column(turn, half, warp, lane), LANE_COLUMNS)] = (
                            T.reinterpret("int8x4", word[0])
                        )
                        count[0] = code_sum(word[0], count[0])
            count[0] = integer_sum(count[0])
            if lane == 0:
                T.evaluate(T.call_extern("int32", "atomicAdd", T.address_of(total[r]), count[0]))

    return encode


def group_encoder(tile: RowTile):
    """A macro that writes rows as int8 with a scale for every 128 columns: what is in `held`, times
    a row's `inverse` where that is not None. Each warp writes its groups' scales and sums."""
    if tile.vector != LANE_COLUMNS:
        raise ValueError(f"groups of a row whose size is no multiple of {LANE_COLUMNS}")

    @T.macro
    def encode(held, inverse, q, scale, total, first, warp, lane):
        for r in T.unroll(tile.rows):
            for turn in T.unroll(tile.turns):
                for half in T.unroll(HALVES):
                    if inverse is not None:
                        for i in T.unroll(LANE_COLUMNS):
                            held[tile.at(r, turn) + half * LANE_COLUMNS + i] = mul(
                                held[tile.at(r, turn) + half * LANE_COLUMNS + i], inverse[r]
                            )
                    if tile.within(tile.span_of(turn, warp) * SPAN + half * GROUP, tile.padded):
                        quantize_group(
                            held,
                            tile.at(r, turn) + half * LANE_COLUMNS,
                            q,
                            scale,
                            total,
                            first + r,
                            tile.span_of(turn, warp) * HALVES + half,
                            lane,
                        )

    return encode
