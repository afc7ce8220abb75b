"""RMSNorm with and without int8 quantisation on cuda: one block a row, the row held in registers.

The tree of the sum of squares is that of schedules/gpu/row.py, which knows nothing of the block.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.row import (
    HALVES,
    HELD,
    LANE_COLUMNS,
    SPAN,
    RowTile,
    encoder,
    group_encoder,
    loader,
    normalizer,
)
from schedules.gpu.thread import (
    MAX_THREADS,
    WARP,
    ceil_div,
    let_others_start,
    mul,
    overlaps,
    silu,
    span,
    splat,
    wait_for_others,
)
from schedules.workload import Workload

MOST_HELD = 32


def choose_tile(size: int, padded: int) -> RowTile:
    """The tile of one row of `size` elements, written out to `padded`: a warp a span, if it can."""
    tile = RowTile(size, padded, 1, min(ceil_div(size, SPAN), MAX_THREADS // WARP))
    if tile.held > MOST_HELD:
        raise ValueError(f"a row of {size} elements is too long for the registers of one block")
    return tile


def plain(tile: RowTile):
    """How a row is read as it stands."""

    def load(x, row, k):
        return x[row, span(k, tile.vector)]

    return load


def gated(tile: RowTile, activation: str):
    """How activation(gate) · up is read, both halves of one row."""

    def load(gate_up, row, k):
        gate = gate_up[row, span(k, tile.vector)]
        up = gate_up[row, span(tile.size + k, tile.vector)]
        return activated(gate, activation, tile.vector) * up

    return load


def asking(tile: RowTile):
    """How the row is read that a place of `logit_rows` asks for, of (x, logit_rows): row 0 where it
    asks for nothing, so that all threads meet."""

    def load(of, row, k):
        x, logit_rows = of
        return x[T.max(logit_rows[row], 0), span(k, tile.vector)]

    return load


def activated(gate, activation: str, lanes: int = 1):
    """silu(gate) or relu(gate)² ("relu2") of `lanes` floats."""
    if activation == "silu":
        return silu(gate, lanes)
    # Unlike a maximum, this lets a NaN pass.
    positive = T.Select(gate < splat(T.float32(0), lanes), splat(T.float32(0), lanes), gate)
    return positive * positive


def norm_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.norm_quantize`."""
    tile = choose_tile(work.shapes[1][0], work.shapes[2][1])
    return _quantizing(work, tile, plain(tile), overlaps(target))


def gated_norm_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.gated_norm_quantize`."""
    tile = choose_tile(work.shapes[1][0], work.shapes[2][1])
    return _quantizing(work, tile, gated(tile, work.settings["activation"]), overlaps(target))


def normed_rows(tile: RowTile, eps: float, load, early: bool):
    """A macro that leaves a row as a `normalizer` does; with `early`, the weight is on its way
    before the kernel waits for others."""
    load_row = loader(tile, load, rows=True)
    load_weight = loader(tile, lambda weight, row, k: weight[span(k, tile.vector)], rows=False)
    normalize = normalizer(tile, eps)

    @T.macro
    def normed_row(x, weight, held, inverse, largest, sums, row, warp, lane):
        weights = T.sblock_alloc_buffer((tile.turns * HELD,), "float32", scope="local")
        load_weight(weight, weights, 0, warp, lane)
        if early:
            wait_for_others()
        load_row(x, held, row, warp, lane)
        normalize(held, weights, inverse, largest, sums, warp, lane)

    return normed_row


def _quantizing(work: Workload, tile: RowTile, load, early: bool) -> tirx.PrimFunc:
    (width, columns), (size,), (_, padded) = work.shapes[:3]
    normed_row = normed_rows(tile, work.settings["eps"], load, early)
    finish = _by_group(tile) if work.settings.get("group") else _by_row(tile)
    scales, threads = work.shapes[3], tile.warps * WARP

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, columns), "float32"),
        weight: T.Buffer((size,), "float32"),
        q: T.Buffer((width, padded), "int8"),
        scale: T.Buffer(scales, "float32"),
        total: T.Buffer(scales, "int32"),
    ):
        for bx in T.thread_binding(width, thread="blockIdx.x"):
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("row"):
                    row = T.axis.spatial(width, bx)
                    thread = T.axis.spatial(threads, tx)
                    held = T.sblock_alloc_buffer((tile.held,), "float32", scope="local")
                    inverse = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    largest = T.sblock_alloc_buffer((1,), "int32", scope="local")
                    sums = T.sblock_alloc_buffer((1,), "int32", scope="shared")
                    if early:
                        let_others_start()
                    normed_row(
                        x, weight, held, inverse, largest, sums, row, thread // WARP, thread % WARP
                    )
                    finish(held, inverse, largest, sums, q, scale, total, row, thread)

    return func


def _by_row(tile: RowTile):
    encode = encoder(tile)

    @T.macro
    def finish(held, inverse, largest, sums, q, scale, total, row, thread):
        scales = T.sblock_alloc_buffer((1,), "float32", scope="local")
        encode(held, inverse, largest, q, scales, sums, row, thread // WARP, thread % WARP)
        T.tvm_storage_sync("shared")
        if thread == 0:
            scale[row] = scales[0]
            total[row] = sums[0]

    return finish


def _by_group(tile: RowTile):
    encode = group_encoder(tile)

    @T.macro
    def finish(held, inverse, largest, sums, q, scale, total, row, thread):
        encode(held, inverse, q, scale, total, row, thread // WARP, thread % WARP)

    return finish


def final_norm(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.final_norm`."""
    (width, size), _, (rows,) = work.shapes[:3]
    tile = choose_tile(size, size)
    early, vector = overlaps(target), tile.vector
    normed_row = normed_rows(tile, work.settings["eps"], asking(tile), early)

    @T.macro
    def store(held, inverse, logit_rows, normed, row, warp, lane):
        for turn in T.unroll(tile.turns):
            for half in T.unroll(HALVES):
                for i in T.unroll(LANE_COLUMNS):
                    held[tile.at(0, turn) + half * LANE_COLUMNS + i] = T.if_then_else(
                        logit_rows[row] >= 0,
                        mul(held[tile.at(0, turn) + half * LANE_COLUMNS + i], inverse[0]),
                        T.float32(0),
                    )
                for v in T.unroll(LANE_COLUMNS // vector):
                    if tile.within(tile.column(turn, half, warp, lane) + v * vector, size):
                        normed[
                            row, span(tile.column(turn, half, warp, lane) + v * vector, vector)
                        ] = held[span(tile.at(0, turn) + half * LANE_COLUMNS + v * vector, vector)]

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, size), "float32"),
        weight: T.Buffer((size,), "float32"),
        logit_rows: T.Buffer((rows,), "int32"),
        normed: T.Buffer((rows, size), "float32"),
    ):
        for bx in T.thread_binding(rows, thread="blockIdx.x"):
            for tx in T.thread_binding(tile.warps * WARP, thread="threadIdx.x"):
                with T.sblock("row"):
                    row = T.axis.spatial(rows, bx)
                    thread = T.axis.spatial(tile.warps * WARP, tx)
                    held = T.sblock_alloc_buffer((tile.held,), "float32", scope="local")
                    inverse = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    largest = T.sblock_alloc_buffer((1,), "int32", scope="local")
                    if early:
                        let_others_start()
                    normed_row(
                        (x, logit_rows),
                        weight,
                        held,
                        inverse,
                        largest,
                        None,
                        row,
                        thread // WARP,
                        thread % WARP,
                    )
                    store(held, inverse, logit_rows, normed, row, thread // WARP, thread % WARP)

    return func
