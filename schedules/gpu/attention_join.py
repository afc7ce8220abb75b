"""The second half of a decode step's attention on cuda: a warp folds the chains of a row and head.

The chains are folded in their order, each against the largest score so far, as
schedules/gpu/attention_whole.py does; chains behind the last one in use are never read.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.attention_warp import NEG_INF, exp
from schedules.gpu.thread import (
    WARP,
    ceil_div,
    constant,
    fma,
    from_lane,
    mul,
    rolled,
    span,
    vector_width,
)
from schedules.workload import Workload

# Chains whose sums are loaded together.
AHEAD = 16
MOST_WARPS = 4
MANY_PAIRS = 512


def attention_join(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.attention_ops.attention_join`. Raises ValueError for more than 32 chains or
    a number that is no multiple of 16."""
    width, heads, chains, head_dim = work.shapes[2]
    if chains > WARP or chains % AHEAD:
        raise ValueError(f"{chains} chains have no schedule")
    pairs = width * heads
    warps = MOST_WARPS if pairs >= MANY_PAIRS else 1
    vector = vector_width(head_dim, 4)
    while vector > 1 and head_dim < WARP * vector:
        vector //= 2
    turns = ceil_div(head_dim, WARP * vector)
    grid = ceil_div(pairs, warps)
    slots = work.settings["chain_slots"]

    @T.macro
    def factors_of(tops, norms, factors, pair, last, lane):
        """What the sums so far, and those of the lane's chain, are times; and its part of the norm.

        Chains behind the last one change nothing.
        """
        top = T.sblock_alloc_buffer((3,), "float32", scope="local")
        top[0] = constant(NEG_INF)
        factors[2] = T.float32(0)
        if lane <= last:
            top[0] = tops[pair // heads, pair % heads, lane]
            factors[2] = norms[pair // heads, pair % heads, lane]
        top[1] = top[0]
        for level in T.unroll(5):
            top[1] = T.max(top[1], from_lane(top[1], T.max(lane - T.shift_left(1, level), 0)))
        # A shuffle of its own, for every lane has to take part.
        top[2] = from_lane(top[1], T.max(lane - 1, 0))
        top[2] = T.Select(lane > 0, top[2], constant(NEG_INF))
        factors[0] = exp(top[2] - top[1])
        factors[1] = T.Select(lane <= last, exp(top[0] - top[1]), T.float32(0))
        factors[2] = mul(factors[2], factors[1])

    @T.macro
    def load(mixed, values, pair, first, last, lane):
        for c in T.unroll(AHEAD):
            for turn in T.unroll(turns):
                values[span((c * turns + turn) * vector, vector)] = mixed[
                    pair // heads,
                    pair % heads,
                    T.min(first + c, last),
                    span(T.min((turn * WARP + lane) * vector, head_dim - vector), vector),
                ]

    @T.macro
    def fold(values, factors, sums, norm, first):
        factor = T.sblock_alloc_buffer((2,), "float32", scope="local")
        for c in T.unroll(AHEAD):
            factor[0] = from_lane(factors[0], first + c)
            factor[1] = from_lane(factors[1], first + c)
            norm[0] = fma(norm[0], factor[0], from_lane(factors[2], first + c))
            for i in T.unroll(turns * vector):
                sums[i] = fma(sums[i], factor[0], mul(values[c * turns * vector + i], factor[1]))

    @T.macro
    def one_pair(tops, norms, mixed, out, pair, last, lane):
        factors = T.sblock_alloc_buffer((3,), "float32", scope="local")
        values = T.sblock_alloc_buffer((AHEAD * turns * vector,), "float32", scope="local")
        sums = T.sblock_alloc_buffer((turns * vector,), "float32", scope="local")
        norm = T.sblock_alloc_buffer((1,), "float32", scope="local")
        norm[0] = T.float32(0)
        for i in T.unroll(turns * vector):
            sums[i] = T.float32(0)
        load(mixed, values, pair, 0, last, lane)
        factors_of(tops, norms, factors, pair, last, lane)
        fold(values, factors, sums, norm, 0)
        for step in rolled(last // AHEAD):
            load(mixed, values, pair, (step + 1) * AHEAD, last, lane)
            fold(values, factors, sums, norm, (step + 1) * AHEAD)
        for i in T.unroll(turns * vector):
            sums[i] = sums[i] / norm[0]
        for turn in T.unroll(turns):
            if (turn * WARP + lane) * vector < head_dim:
                out[
                    pair // heads,
                    span(pair % heads * head_dim + (turn * WARP + lane) * vector, vector),
                ] = sums[span(turn * vector, vector)]

    @T.prim_func(private=True, s_tir=True)
    def func(
        tops: T.Buffer((width, heads, chains), "float32"),
        norms: T.Buffer((width, heads, chains), "float32"),
        mixed: T.Buffer((width, heads, chains, head_dim), "float32"),
        boundary: T.Buffer((1,), "int32"),
        out: T.Buffer((width, heads * head_dim), "float32"),
    ):
        for bx in T.thread_binding(grid, thread="blockIdx.x"):
            for tx in T.thread_binding(warps * WARP, thread="threadIdx.x"):
                with T.sblock("join"):
                    block = T.axis.spatial(grid, bx)
                    thread = T.axis.spatial(warps * WARP, tx)
                    if block * warps + thread // WARP < pairs:
                        one_pair(
                            tops,
                            norms,
                            mixed,
                            out,
                            block * warps + thread // WARP,
                            T.min((boundary[0] + width - 1) // slots, chains - 1),
                            thread % WARP,
                        )

    return func
