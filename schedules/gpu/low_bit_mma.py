"""Ternary linear on cuda's tensor cores: int32 sums.

A warp holds tiles of 16 rows and of 8 tokens (schedules/gpu/low_bit_mma_warp.py). K is split over
the warps of a team and summed in shared memory; all of it is exact, so the split is free to differ
from width to width, and a row's result is that of schedules/gpu/low_bit_gemv.py, bit for bit.

On devices where kernels overlap, a block asks for its first weights before it waits for the kernel
that makes its activations.
"""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.linear import linear_kernel
from schedules.gpu.low_bit_mma_tile import RESULTS, candidates, checked, choose, summed_at_once
from schedules.gpu.low_bit_mma_warp import (
    ROWS,
    SUMS,
    TOKENS,
    WORDS,
    MmaTile,
    accumulator,
    lane_sum,
)
from schedules.gpu.thread import (
    WARP,
    add,
    ceil_div,
    let_others_start,
    mul,
    overlaps,
    wait_for_others,
)
from schedules.space import Template
from schedules.workload import Workload, segment_scale

# From so many rows on: below, dp4a computes no rows that nobody asked for.
LEAST_ROWS = 2
# Results of a thread whose factors and addends are read before the products.
MOST_EARLY = 4


def _is_ternary(work: Workload) -> bool:
    return work.settings["format"] == "bitnet-ternary"


def _template(work: Workload, tile: MmaTile, early: bool) -> tirx.PrimFunc:
    """With `early`, the first weights are on their way before the kernel waits for others."""
    checked(work, tile)
    width, columns = work.shapes[-1]
    tiles, blocks = work.shapes[3][:2]
    segments = work.settings["segments"]
    warps, row_tiles, token_tiles = tile.warps, tile.row_tiles, tile.token_tiles
    threads = warps * tile.teams * WARP
    at_once = summed_at_once(tile)
    parts = token_tiles // at_once
    outputs = tile.block_tiles * at_once * RESULTS
    turns = ceil_div(outputs, threads)
    read_early = parts == 1 and turns <= MOST_EARLY
    begin, accumulate = accumulator(tile, (width, tiles, blocks))

    def team_of(thread):
        return thread // (warps * WARP)

    def warp_of(thread):
        return thread // WARP % warps

    def own_tile(first_tile, thread):
        """The first row tile of a thread's team."""
        return first_tile + team_of(thread) * row_tiles

    def place(r, n, warp, e):
        return ((r * at_once + n) * warps + warp) * SUMS + e

    # Sum number at: tile by tile (rows outside, tokens inside), result by result, lane by lane.
    def token_of(token, part, at):
        within = at // RESULTS % at_once * TOKENS + at % 4 * 2 + at // WARP % 2
        return token + part * at_once * TOKENS + within

    def row_of(first_tile, at):
        within = at // (RESULTS * at_once) * ROWS + at % WARP // 4 + at // (2 * WARP) % 2 * 8
        return first_tile * ROWS + within

    def present(value, end):
        return T.min(value, end - 1)

    @T.macro
    def load_scales(weight_scale, held):
        for i in T.unroll(len(segments)):
            T.ptx["ld.weak.global.f32"](held[i], T.address_of(weight_scale[i]))

    @T.macro
    def read_result(scale, total, residual, held, factor, exact, addend, turn, token, n):
        """What a thread's result number `turn` takes besides the products."""
        exact[turn] = -total[present(token, width)]
        factor[turn] = mul(
            scale[present(token, width)],
            segment_scale(held, present(n, columns), segments),
        )
        if residual is not None:
            addend[turn] = residual[present(token, width), present(n, columns)]

    @T.macro
    def read_results(
        scale, total, residual, held, factor, exact, addend, first_tile, token, part, thread
    ):
        for turn in T.unroll(turns):
            read_result(
                scale,
                total,
                residual,
                held,
                factor,
                exact,
                addend,
                turn,
                token_of(token, part, turn * threads + thread),
                row_of(first_tile, turn * threads + thread),
            )

    @T.macro
    def share(partial, acc, first, team, warp, lane):
        """A warp's sums of `at_once` token tiles, where `store` reads them."""
        for r in T.unroll(row_tiles):
            for n in T.unroll(at_once):
                for e in T.unroll(SUMS):
                    partial[place(team * row_tiles + r, n, warp, e) * WARP + lane] = lane_sum(
                        tile, acc, r, first + n, e
                    )

    def result(exact, factor, residual, addend):
        value = mul(T.Cast("float32", exact), factor)
        return value if residual is None else add(value, addend)

    @T.macro
    def store(partial, exact, factor, residual, addend, y, turn, at, token, n):
        if (at < outputs) and (token < width) and (n < columns):
            for i in T.unroll(warps):
                exact[turn] = (
                    exact[turn] + partial[(at // RESULTS * warps + i) * RESULTS + at % RESULTS]
                )
            y[token, n] = result(exact[turn], factor[turn], residual, addend[turn])

    @T.macro
    def one_block(q, scale, total, weight, weight_scale, residual, y, first_tile, token, thread):
        partial = T.sblock_alloc_buffer((warps * outputs,), "int32", scope="shared")
        words = T.sblock_alloc_buffer((tile.ahead * row_tiles * WORDS,), "uint32", scope="local")
        acc = T.sblock_alloc_buffer((tile.sums,), "uint32", scope="local")
        held = T.sblock_alloc_buffer((len(segments),), "float32", scope="local")
        exact = T.sblock_alloc_buffer((turns,), "int32", scope="local")
        factor = T.sblock_alloc_buffer((turns,), "float32", scope="local")
        addend = T.sblock_alloc_buffer((turns,), "float32", scope="local")
        # Without a word on blocks ptxas saves registers for as many as it can, and loads late.
        with T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", tile.resident):
            if early:
                let_others_start()
            begin(weight, words, own_tile(first_tile, thread), warp_of(thread), thread % WARP)
            load_scales(weight_scale, held)
            if early:
                wait_for_others()
            if read_early:
                read_results(
                    scale,
                    total,
                    residual,
                    held,
                    factor,
                    exact,
                    addend,
                    first_tile,
                    token,
                    0,
                    thread,
                )
            accumulate(
                q,
                weight,
                words,
                acc,
                own_tile(first_tile, thread),
                token,
                warp_of(thread),
                thread % WARP,
            )
            for part in T.unroll(parts):
                if part > 0:
                    T.tvm_storage_sync("shared")
                share(partial, acc, part * at_once, team_of(thread), warp_of(thread), thread % WARP)
                if not read_early:
                    read_results(
                        scale,
                        total,
                        residual,
                        held,
                        factor,
                        exact,
                        addend,
                        first_tile,
                        token,
                        part,
                        thread,
                    )
                T.tvm_storage_sync("shared")
                for turn in T.unroll(turns):
                    store(
                        partial,
                        exact,
                        factor,
                        residual,
                        addend,
                        y,
                        turn,
                        turn * threads + thread,
                        token_of(token, part, turn * threads + thread),
                        row_of(first_tile, turn * threads + thread),
                    )

    return linear_kernel(work, threads, tile.block_tiles, tile.tokens, one_block)


def _serving(name: str, serves) -> Template:
    return Template(
        name=name,
        tile=MmaTile,
        serves=serves,
        choose=choose,
        candidates=candidates,
        make=lambda work, tile, target: _template(work, tile, overlaps(target)),
    )


TEMPLATE = _serving(
    "low_bit_mma", lambda work, card: _is_ternary(work) and work.width >= LEAST_ROWS
)
# Behind the dp4a of schedules/gpu/low_bit_gemv.py: the rule's choice is that.
FEW_ROWS = _serving(
    "low_bit_mma_few", lambda work, card: _is_ternary(work) and work.width < LEAST_ROWS
)
