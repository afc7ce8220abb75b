"""RMSNorm with and without int8 quantisation on cuda: one block a row, the row held in registers.

The number of threads, and with it the tree of the sum of squares, depends on the row's size alone.
"""

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.int8 import (
    GROUP,
    LANE_COLUMNS,
    LEAST_ABSMAX,
    code,
    code_factor,
    code_scale,
    magnitude,
    packed_bytes,
    quantize_group,
)
from schedules.gpu.thread import (
    MAX_THREADS,
    WARP,
    block_max,
    block_sum,
    ceil_div,
    constant,
    fma,
    silu,
    span,
    splat,
    vector_width,
)
from schedules.workload import Workload

MOST_HELD = 32


@dataclass(frozen=True)
class RowTile:
    """How a row lies over a block: in turn i thread t holds `vector` elements from `first` on."""

    threads: int
    vector: int
    turns: int

    @property
    def warps(self) -> int:
        return self.threads // WARP

    def first(self, turn, thread):
        """The first element of a thread's vector in a turn."""
        return (turn * self.threads + thread) * self.vector


def choose_tile(size: int, padded: int) -> RowTile:
    """The tile of rows of `size` elements, written out to `padded`."""
    vector = vector_width(size, 4)
    threads = WARP
    while threads < MAX_THREADS and threads * vector * 4 < padded:
        threads *= 2
    tile = RowTile(threads, vector, ceil_div(padded, threads * vector))
    if tile.turns * tile.vector > MOST_HELD:
        raise ValueError(f"a row of {size} elements is too long for the registers of one block")
    return tile


def norm_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.norm_quantize`."""
    tile = choose_tile(work.shapes[1][0], work.shapes[2][1])

    def load(x, row, k):
        return x[row, span(k, tile.vector)]

    return _quantizing(work, tile, load)


def gated_norm_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.gated_norm_quantize`."""
    size = work.shapes[1][0]
    tile = choose_tile(size, work.shapes[2][1])
    zero = splat(T.float32(0), tile.vector)

    def activate(gate):
        if work.settings["activation"] == "silu":
            return silu(gate, tile.vector)
        # Unlike a maximum, this lets a NaN pass.
        positive = T.Select(gate < zero, zero, gate)
        return positive * positive

    def load(gate_up, row, k):
        gate = gate_up[row, span(k, tile.vector)]
        return activate(gate) * gate_up[row, span(size + k, tile.vector)]

    return _quantizing(work, tile, load)


def normalizer(tile: RowTile, size: int, eps: float, load):
    """A macro that leaves the normalised row in `held`, element `tile.first(turn, thread)` + j at
    `turn` * vector + j, and zeros behind the row's end."""
    vector = tile.vector
    zeros = splat(T.float32(0), vector)

    @T.macro
    def normalize(held, x, row, weight, thread):
        square = T.sblock_alloc_buffer((1,), "float32", scope="local")
        squares = T.sblock_alloc_buffer((tile.warps,), "float32", scope="shared")
        for turn in T.unroll(tile.turns):
            held[span(turn * vector, vector)] = T.if_then_else(
                tile.first(turn, thread) < size, load(x, row, tile.first(turn, thread)), zeros
            )
        square[0] = T.float32(0)
        for i in T.unroll(tile.turns * vector):
            square[0] = fma(held[i], held[i], square[0])
        block_sum(square, squares, tile.warps, thread)
        square[0] = T.float32(1) / T.sqrt(square[0] / T.float32(size) + constant(eps))
        for turn in T.unroll(tile.turns):
            held[span(turn * vector, vector)] = T.if_then_else(
                tile.first(turn, thread) < size,
                held[span(turn * vector, vector)]
                * splat(square[0], vector)
                * weight[span(tile.first(turn, thread), vector)],
                zeros,
            )

    return normalize


def _quantizer(tile: RowTile, padded: int):
    """A macro that writes a row held in registers as int8."""
    vector, elements = tile.vector, tile.turns * tile.vector

    @T.macro
    def quantize(held, q, scale, total, row, thread):
        largest = T.sblock_alloc_buffer((1,), "int32", scope="local")
        factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
        codes = T.sblock_alloc_buffer((elements,), "int32", scope="local")
        count = T.sblock_alloc_buffer((1,), "int32", scope="local")
        magnitudes = T.sblock_alloc_buffer((tile.warps,), "int32", scope="shared")
        counts = T.sblock_alloc_buffer((tile.warps,), "int32", scope="shared")
        largest[0] = LEAST_ABSMAX
        for i in T.unroll(elements):
            largest[0] = T.max(largest[0], magnitude(held[i]))
        block_max(largest, magnitudes, tile.warps, thread)
        factor[0] = code_factor(largest[0])
        count[0] = 0
        for i in T.unroll(elements):
            codes[i] = code(held[i], factor[0])
            count[0] = count[0] + codes[i]
        for turn in T.unroll(tile.turns):
            if tile.first(turn, thread) < padded:
                q[row, span(tile.first(turn, thread), vector)] = packed_bytes(
                    codes, turn * vector, vector
                )
        block_sum(count, counts, tile.warps, thread)
        if thread == 0:
            scale[row] = code_scale(largest[0])
            total[row] = count[0]

    return quantize


def _group_quantizer(tile: RowTile, padded: int):
    """A macro that writes a row held in registers as int8 by groups: in a turn a warp holds one."""
    if tile.vector != LANE_COLUMNS:
        raise ValueError(f"groups of a row whose size is no multiple of {LANE_COLUMNS}")

    @T.macro
    def quantize(held, q, scale, total, row, thread):
        for turn in T.unroll(tile.turns):
            if turn * tile.warps + thread // WARP < padded // GROUP:
                quantize_group(
                    held,
                    turn * LANE_COLUMNS,
                    q,
                    scale,
                    total,
                    row,
                    turn * tile.warps + thread // WARP,
                    thread % WARP,
                )

    return quantize


def _quantizing(work: Workload, tile: RowTile, load) -> tirx.PrimFunc:
    (width, columns), (size,), (_, padded) = work.shapes[:3]
    normalize = normalizer(tile, size, work.settings["eps"], load)
    grouped = work.settings.get("group")
    quantize = _group_quantizer(tile, padded) if grouped else _quantizer(tile, padded)
    scales = work.shapes[3]

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, columns), "float32"),
        weight: T.Buffer((size,), "float32"),
        q: T.Buffer((width, padded), "int8"),
        scale: T.Buffer(scales, "float32"),
        total: T.Buffer(scales, "int32"),
    ):
        for bx in T.thread_binding(width, thread="blockIdx.x"):
            for tx in T.thread_binding(tile.threads, thread="threadIdx.x"):
                with T.sblock("row"):
                    row = T.axis.spatial(width, bx)
                    thread = T.axis.spatial(tile.threads, tx)
                    held = T.sblock_alloc_buffer(
                        (tile.turns * tile.vector,), "float32", scope="local"
                    )
                    normalize(held, x, row, weight, thread)
                    quantize(held, q, scale, total, row, thread)

    return func


def final_norm(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.final_norm`."""
    (width, size), _, (rows,) = work.shapes[:3]
    tile = choose_tile(size, size)
    vector = tile.vector

    def load(x, row, k):
        return x[row, span(k, vector)]

    normalize = normalizer(tile, size, work.settings["eps"], load)

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, size), "float32"),
        weight: T.Buffer((size,), "float32"),
        logit_rows: T.Buffer((rows,), "int32"),
        normed: T.Buffer((rows, size), "float32"),
    ):
        for bx in T.thread_binding(rows, thread="blockIdx.x"):
            for tx in T.thread_binding(tile.threads, thread="threadIdx.x"):
                with T.sblock("row"):
                    row = T.axis.spatial(rows, bx)
                    thread = T.axis.spatial(tile.threads, tx)
                    held = T.sblock_alloc_buffer((tile.turns * vector,), "float32", scope="local")
                    # A row that asks for nothing goes through row 0, so that all threads meet.
                    normalize(held, x, T.max(logit_rows[row], 0), weight, thread)
                    for turn in T.unroll(tile.turns):
                        if tile.first(turn, thread) < size:
                            normed[row, span(tile.first(turn, thread), vector)] = T.if_then_else(
                                logit_rows[row] >= 0,
                                held[span(turn * vector, vector)],
                                splat(T.float32(0), vector),
                            )

    return func
