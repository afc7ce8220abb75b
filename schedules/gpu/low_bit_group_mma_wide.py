"""Linear whose weights and activations carry a scale for every 128 columns, on cuda's tensor cores
for many activation rows, those of a prompt.

A block's warps go through all of K together, one group a turn; its codes, scales and totals come
into shared memory some turns before. The float sum is that of low_bit_group_gemv.py to the bit: the
groups come in the order of its warps, those of warp 0 first, so that what a warp has there is
finished, and joined to those before it, before that of the next begins.
"""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.linear import linear_kernel
from schedules.gpu.low_bit_group_gemv import warps_for
from schedules.gpu.low_bit_group_mma_warp import OUTPUTS, PARTS, TOKENS
from schedules.gpu.low_bit_group_mma_wide_tile import (
    SUMS,
    GroupWideTile,
    candidates,
    choose,
    halves,
    packing_of,
    pays,
    problem,
    serves,
)
from schedules.gpu.low_bit_group_mma_wide_warp import (
    PIECES,
    multiplier,
    piece_place,
    tile_words,
    token_words,
)
from schedules.gpu.packed import K_BLOCK, WORDS
from schedules.gpu.thread import (
    WARP,
    add,
    ceil_div,
    let_others_start,
    overlaps,
    rolled,
    wait_for_others,
)
from schedules.space import Template
from schedules.workload import Workload

COPY = "cp.async.cg.shared.global.L2::128B"
COPY_WORD = "cp.async.ca.shared.global"


def _template(work: Workload, tile: GroupWideTile, early: bool) -> tirx.PrimFunc:
    """With `early`, the first weights are on their way before the kernel waits for others."""
    packing = packing_of(work)
    if found := problem(tile, packing):
        raise ValueError(f"{found}: {tile}")
    width, columns = work.shapes[-1]
    tiles, groups = work.shapes[3][:2]
    splits, stages, threads = warps_for(groups), tile.stages, tile.threads
    turns = ceil_div(groups, splits)
    own, pairs = halves(tile, packing), tile.token_tiles
    # Of a stage: scales of rows; of a tile: 16-byte pieces of these.
    row_scales_of = tile.block_tiles * packing.tile
    scale_pieces = packing.tile // 8
    add_group, join = multiplier(packing, tile)

    def group_of(turn):
        """The group of a turn of all `splits * turns`; some have none where K is ragged."""
        return turn // turns + turn % turns * splits

    def exists(turn):
        """Whether the turn has a group."""
        inside = turn < splits * turns
        return inside if splits * turns == groups else T.And(inside, group_of(turn) < groups)

    def present(value, end):
        return T.min(value, end - 1)

    def own_tile(thread):
        """The first packed row tile of a thread's warp, within the block."""
        return thread // WARP % tile.row_warps * tile.row_tiles

    def own_token(thread):
        """The first activation row of a thread's warp, within the block."""
        return thread // (WARP * tile.row_warps) * (pairs * TOKENS)

    @T.macro
    def copy_weights(weight, weight_scale, weights, row_scales, first_tile, turn, thread):
        """A group's weights and their scales, on their way to shared memory."""
        if exists(turn):
            for i in T.unroll(ceil_div(tile.block_tiles * WARP, threads)):
                if i * threads + thread < tile.block_tiles * WARP:
                    T.ptx[COPY](
                        T.address_of(
                            weights[
                                turn % stages * tile_words(tile) + (i * threads + thread) * WORDS
                            ]
                        ),
                        T.address_of(
                            weight[
                                present(first_tile + (i * threads + thread) // WARP, tiles),
                                group_of(turn),
                                thread % WARP,
                                0,
                            ]
                        ),
                        16,
                    )
            for i in T.unroll(ceil_div(tile.block_tiles * scale_pieces, threads)):
                if i * threads + thread < tile.block_tiles * scale_pieces:
                    T.ptx[COPY](
                        T.address_of(
                            row_scales[turn % stages * row_scales_of + (i * threads + thread) * 8]
                        ),
                        T.address_of(
                            weight_scale[
                                present(first_tile + (i * threads + thread) // scale_pieces, tiles),
                                group_of(turn),
                                (i * threads + thread) % scale_pieces * 8,
                            ]
                        ),
                        16,
                    )

    @T.macro
    def copy_tokens(q, scale, total, x, token_scales, totals, token, turn, thread):
        """A group's activations, likewise, their scales and their totals."""
        if exists(turn):
            for i in T.unroll(ceil_div(tile.tokens * PIECES, threads)):
                if i * threads + thread < tile.tokens * PIECES:
                    T.ptx[COPY](
                        T.address_of(
                            x[
                                turn % stages * token_words(tile)
                                + piece_place(
                                    (i * threads + thread) // PIECES,
                                    (i * threads + thread) % PIECES,
                                )
                            ]
                        ),
                        T.address_of(
                            q[
                                present(token + (i * threads + thread) // PIECES, width),
                                group_of(turn) * K_BLOCK + (i * threads + thread) % PIECES * 16,
                            ]
                        ),
                        16,
                    )
            for i in T.unroll(ceil_div(tile.tokens, threads)):
                if i * threads + thread < tile.tokens:
                    T.ptx[COPY_WORD](
                        T.address_of(
                            token_scales[turn % stages * tile.tokens + i * threads + thread]
                        ),
                        T.address_of(
                            scale[present(token + i * threads + thread, width), group_of(turn)]
                        ),
                        4,
                    )
                    T.ptx[COPY_WORD](
                        T.address_of(totals[turn % stages * tile.tokens + i * threads + thread]),
                        T.address_of(
                            total[present(token + i * threads + thread, width), group_of(turn)]
                        ),
                        4,
                    )
        T.ptx["cp.async.commit_group"]()

    def token_of(token, thread, j, i):
        return token + own_token(thread) + j * TOKENS + thread % 4 * 2 + i % 2

    def row_of(first_tile, thread, m, i):
        within = m * 16 + thread % WARP // 4 + i // 2 * 8
        return (first_tile + own_tile(thread)) * packing.tile + within

    def with_residual(value, residual, addend):
        return value if residual is None else add(value, addend)

    @T.macro
    def store(acc, residual, y, first_tile, token, thread, m):
        """The results of 16 rows; what is added to them is loaded together."""
        addend = T.sblock_alloc_buffer((pairs * OUTPUTS,), "float32", scope="local")
        if residual is not None:
            for i in T.unroll(pairs * OUTPUTS):
                addend[i] = residual[
                    present(token_of(token, thread, i // OUTPUTS, i % OUTPUTS), width),
                    present(row_of(first_tile, thread, m, i % OUTPUTS), columns),
                ]
        for i in T.unroll(pairs * OUTPUTS):
            if (token_of(token, thread, i // OUTPUTS, i % OUTPUTS) < width) and (
                row_of(first_tile, thread, m, i % OUTPUTS) < columns
            ):
                y[
                    token_of(token, thread, i // OUTPUTS, i % OUTPUTS),
                    row_of(first_tile, thread, m, i % OUTPUTS),
                ] = with_residual(
                    acc[((m * pairs + i // OUTPUTS) * SUMS + PARTS) * OUTPUTS + i % OUTPUTS],
                    residual,
                    addend[i],
                )

    @T.macro
    def one_block(q, scale, total, weight, weight_scale, residual, y, first_tile, token, thread):
        x = T.sblock_alloc_buffer((stages * token_words(tile),), "uint32", scope="shared")
        weights = T.sblock_alloc_buffer((stages * tile_words(tile),), "uint32", scope="shared")
        row_scales = T.sblock_alloc_buffer((stages * row_scales_of,), "uint16", scope="shared")
        token_scales = T.sblock_alloc_buffer((stages * tile.tokens,), "float32", scope="shared")
        totals = T.sblock_alloc_buffer((stages * tile.tokens,), "uint32", scope="shared")
        acc = T.sblock_alloc_buffer((own * pairs * SUMS * OUTPUTS,), "float32", scope="local")
        with T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", tile.resident):
            if early:
                let_others_start()
            for turn in T.unroll(stages - 1):
                copy_weights(weight, weight_scale, weights, row_scales, first_tile, turn, thread)
            if early:
                wait_for_others()
            for turn in T.unroll(stages - 1):
                copy_tokens(q, scale, total, x, token_scales, totals, token, turn, thread)
            for i in T.unroll(own * pairs * SUMS * OUTPUTS):
                # Of sums of splits: what leaves a first addend as it is.
                acc[i] = T.Select(i // OUTPUTS % SUMS == PARTS, T.float32(-0.0), T.float32(0))
            for split in rolled(splits):
                for turn in rolled(turns):
                    T.ptx["cp.async.wait_group"](stages - 2)
                    T.tvm_storage_sync("shared")
                    copy_weights(
                        weight,
                        weight_scale,
                        weights,
                        row_scales,
                        first_tile,
                        split * turns + turn + stages - 1,
                        thread,
                    )
                    copy_tokens(
                        q,
                        scale,
                        total,
                        x,
                        token_scales,
                        totals,
                        token,
                        split * turns + turn + stages - 1,
                        thread,
                    )
                    if exists(split * turns + turn):
                        add_group(
                            x,
                            weights,
                            row_scales,
                            token_scales,
                            totals,
                            acc,
                            (split * turns + turn) % stages,
                            own_tile(thread),
                            own_token(thread),
                            thread % WARP,
                        )
                join(acc)
            for m in T.unroll(own):
                store(acc, residual, y, first_tile, token, thread, m)

    return linear_kernel(work, threads, tile.block_tiles, tile.tokens, one_block)


def _serving(name: str, when) -> Template:
    return Template(
        name=name,
        tile=GroupWideTile,
        serves=when,
        choose=choose,
        candidates=candidates,
        make=lambda work, tile, target: _template(work, tile, overlaps(target)),
    )


TEMPLATE = _serving("low_bit_group_mma_wide", lambda work, card: serves(work) and pays(work, card))
# Behind the template that splits K, whose tile is the rule's.
SOME_ROWS = _serving(
    "low_bit_group_mma_wide_some", lambda work, card: serves(work) and not pays(work, card)
)
