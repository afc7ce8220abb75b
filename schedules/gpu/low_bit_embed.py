"""Rows of a low-bit embedding table with group scales on cuda: a thread unpacks four columns."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.packed import GROUP_PACKINGS, K_BLOCK, LANE_K
from schedules.gpu.thread import ceil_div, span
from schedules.workload import Workload

THREADS = 128
COLUMNS = 4


def low_bit_embed(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.ops.low_bit_embed`."""
    packing = GROUP_PACKINGS[work.settings["format"]]
    (width,), weight_shape, scales_shape, (_, size) = work.shapes
    if size % COLUMNS:
        raise ValueError(f"an embedding row of {size} elements: no multiple of {COLUMNS}")
    items = width * size // COLUMNS

    def weight_at(word, j):
        byte = T.bitwise_and(T.shift_right(word, T.Cast("uint32", 8 * j)), T.uint32(0xFF))
        return T.Cast("float32", T.Cast("int32", byte) - 1)

    @T.macro
    def unpack(weight, weight_scale, hidden, row, n, k):
        word = T.sblock_alloc_buffer((1,), "uint32", scope="local")
        factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
        values = T.sblock_alloc_buffer((COLUMNS,), "float32", scope="local")
        word[0] = packing.plus_one(
            weight[
                n // packing.tile,
                k // K_BLOCK,
                n % 8 * 4 + k % K_BLOCK // LANE_K,
                packing.word(n % packing.tile // 8, k % LANE_K // COLUMNS),
            ],
            k % LANE_K // COLUMNS,
        )
        factor[0] = T.Cast(
            "float32", weight_scale[n // packing.tile, k // K_BLOCK, n % packing.tile]
        )
        for j in T.unroll(COLUMNS):
            values[j] = weight_at(word[0], j) * factor[0]
        hidden[row, span(k, COLUMNS)] = values[span(0, COLUMNS)]

    @T.prim_func(private=True, s_tir=True)
    def func(
        tokens: T.Buffer((width,), "int32"),
        weight: T.Buffer(weight_shape, "uint32"),
        weight_scale: T.Buffer(scales_shape, "float16"),
        hidden: T.Buffer((width, size), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(items, THREADS), thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("columns"):
                    item = T.axis.spatial(items, bx * THREADS + tx)
                    T.where(bx * THREADS + tx < items)
                    unpack(
                        weight,
                        weight_scale,
                        hidden,
                        item // (size // COLUMNS),
                        tokens[item // (size // COLUMNS)],
                        item % (size // COLUMNS) * COLUMNS,
                    )

    return func
