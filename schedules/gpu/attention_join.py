"""The second half of a decode step's attention on cuda: a warp folds the chains of a row and head.

The chains are folded in their order, each against the largest score so far, as
schedules/gpu/attention_whole.py does; chains behind the last one in use are never read. What comes
out is stored as it is, or as int8 by groups of 128 columns, of which a head has whole ones.
"""

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.attention_warp import NEG_INF, exp
from schedules.gpu.int8 import GROUP, LANE_COLUMNS, quantize_group
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


@dataclass(frozen=True)
class Pairs:
    """How the (row, head) pairs of a step lie over warps, and a head over the lanes of one."""

    width: int
    heads: int
    chains: int
    head_dim: int

    @property
    def count(self) -> int:
        return self.width * self.heads

    @property
    def warps(self) -> int:
        """Warps of a block, each with a pair of its own."""
        return MOST_WARPS if self.count >= MANY_PAIRS else 1

    @property
    def grid(self) -> int:
        return ceil_div(self.count, self.warps)

    @property
    def vector(self) -> int:
        """Elements of one load."""
        vector = vector_width(self.head_dim, 4)
        while vector > 1 and self.head_dim < WARP * vector:
            vector //= 2
        return vector

    @property
    def turns(self) -> int:
        """Loads of a lane for one chain."""
        return ceil_div(self.head_dim, WARP * self.vector)

    @property
    def held(self) -> int:
        """Elements of a head that a lane holds."""
        return self.turns * self.vector


def _pairs(work: Workload) -> Pairs:
    sizes = Pairs(*work.shapes[2])
    if sizes.chains > WARP or sizes.chains % AHEAD:
        raise ValueError(f"{sizes.chains} chains have no schedule")
    return sizes


def _folder(work: Workload, sizes: Pairs):
    """A macro that leaves a lane's elements of a pair's attention in `sums`."""
    heads, chains, head_dim = sizes.heads, sizes.chains, sizes.head_dim
    vector, turns = sizes.vector, sizes.turns
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
    def fold_pair(tops, norms, mixed, sums, pair, last, lane):
        factors = T.sblock_alloc_buffer((3,), "float32", scope="local")
        values = T.sblock_alloc_buffer((AHEAD * turns * vector,), "float32", scope="local")
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

    @T.macro
    def one_pair(tops, norms, mixed, boundary, sums, pair, lane):
        fold_pair(
            tops,
            norms,
            mixed,
            sums,
            pair,
            T.min((boundary[0] + sizes.width - 1) // slots, chains - 1),
            lane,
        )

    return one_pair


def _launcher(work: Workload, sizes: Pairs, finish):
    """A macro for the whole kernel; `finish(results, sums, pair, lane)` is a macro that stores what
    a lane has of a pair's attention."""
    one_pair, warps = _folder(work, sizes), sizes.warps

    @T.macro
    def launch(tops, norms, mixed, boundary, results):
        for bx in T.thread_binding(sizes.grid, thread="blockIdx.x"):
            for tx in T.thread_binding(warps * WARP, thread="threadIdx.x"):
                with T.sblock("join"):
                    block = T.axis.spatial(sizes.grid, bx)
                    thread = T.axis.spatial(warps * WARP, tx)
                    sums = T.sblock_alloc_buffer((sizes.held,), "float32", scope="local")
                    # The same for all lanes of a warp.
                    if block * warps + thread // WARP < sizes.count:
                        one_pair(
                            tops,
                            norms,
                            mixed,
                            boundary,
                            sums,
                            block * warps + thread // WARP,
                            thread % WARP,
                        )
                        finish(results, sums, block * warps + thread // WARP, thread % WARP)

    return launch


def attention_join(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.attention_ops.attention_join`. Raises ValueError for more than 32 chains or
    a number that is no multiple of 16."""
    sizes = _pairs(work)
    heads, head_dim, vector = sizes.heads, sizes.head_dim, sizes.vector

    @T.macro
    def store(out, sums, pair, lane):
        for turn in T.unroll(sizes.turns):
            if (turn * WARP + lane) * vector < head_dim:
                out[
                    pair // heads,
                    span(pair % heads * head_dim + (turn * WARP + lane) * vector, vector),
                ] = sums[span(turn * vector, vector)]

    launch = _launcher(work, sizes, store)

    @T.prim_func(private=True, s_tir=True)
    def func(
        tops: T.Buffer(work.shapes[0], "float32"),
        norms: T.Buffer(work.shapes[1], "float32"),
        mixed: T.Buffer(work.shapes[2], "float32"),
        boundary: T.Buffer((1,), "int32"),
        out: T.Buffer(work.shapes[4], "float32"),
    ):
        launch(tops, norms, mixed, boundary, out)

    return func


def attention_join_quantize(
    func: tirx.PrimFunc, work: Workload, target: tvm.target.Target
) -> tirx.PrimFunc | None:
    """See `relax_models.fused_ops.attention_join_quantize`. Raises ValueError as `attention_join`
    does, and for heads that are no whole groups."""
    sizes = _pairs(work)
    heads = sizes.heads
    if work.settings["group"] != GROUP or sizes.head_dim % GROUP:
        raise ValueError(f"a head of {sizes.head_dim} elements is no whole groups of {GROUP}")

    @T.macro
    def encode(results, sums, pair, lane):
        q, scale, total = results
        for turn in T.unroll(sizes.turns):
            quantize_group(
                sums,
                turn * LANE_COLUMNS,
                q,
                scale,
                total,
                pair // heads,
                pair % heads * sizes.turns + turn,
                lane,
            )

    launch = _launcher(work, sizes, encode)

    @T.prim_func(private=True, s_tir=True)
    def func(
        tops: T.Buffer(work.shapes[0], "float32"),
        norms: T.Buffer(work.shapes[1], "float32"),
        mixed: T.Buffer(work.shapes[2], "float32"),
        boundary: T.Buffer((1,), "int32"),
        q: T.Buffer(work.shapes[4], "int8"),
        scale: T.Buffer(work.shapes[5], "float32"),
        total: T.Buffer(work.shapes[6], "int32"),
    ):
        launch(tops, norms, mixed, boundary, (q, scale, total))

    return func
