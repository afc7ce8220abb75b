"""Linear whose weights and activations carry a scale for every 128 columns, on cuda: two rows of
activations and more, on tensor cores.

The float sum is that of low_bit_group_gemv.py to the bit, tree and roundings: the four parts of a
group are summed apart, what a lane is there is a register here. Rows and tokens of a block and the
loads in flight are free to differ from width to width.
"""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.linear import linear_kernel
from schedules.gpu.low_bit_group_mma_tile import candidates, checked, choose
from schedules.gpu.low_bit_group_mma_warp import (
    OUTPUTS,
    PARTS,
    ROWS,
    TOKENS,
    WORDS,
    GroupMmaTile,
    accumulator,
)
from schedules.gpu.packed import GROUP_PACKINGS
from schedules.gpu.thread import (
    WARP,
    add,
    ceil_div,
    let_others_start,
    overlaps,
    wait_for_others,
)
from schedules.space import Card, Template
from schedules.workload import Workload

# With fewer rows most of an mma is idle.
LEAST_WIDTH = 2
# Results of a thread whose addends are read before the products.
MOST_EARLY = 4
# Outputs of a tile stand 33 apart, so that neither writes nor reads collide in a bank.
STRIDE = WARP + 1


def serves(work: Workload, card: Card) -> bool:
    """Whether the tensor cores pay: weights with groups and a few rows."""
    return work.settings["format"] in GROUP_PACKINGS and work.width >= LEAST_WIDTH


def _template(work: Workload, tile: GroupMmaTile, early: bool) -> tirx.PrimFunc:
    """With `early`, the first weights are on their way before the kernel waits for others."""
    checked(work, tile)
    packing = GROUP_PACKINGS[work.settings["format"]]
    width, columns = work.shapes[-1]
    tiles, groups = work.shapes[3][:2]
    row_tiles, token_tiles, warps = tile.row_tiles, tile.token_tiles, tile.warps
    threads = warps * tile.teams * WARP
    # Tiles of 16 rows and 8 tokens: of a warp, and of a block.
    own = row_tiles * packing.tile // ROWS * token_tiles
    blocks = own * tile.teams
    outputs = blocks * ROWS * TOKENS
    turns = ceil_div(outputs, threads)
    begin, accumulate = accumulator(packing, tile, (width, tiles, groups))

    def warp_of(thread):
        return thread // WARP % warps

    def team_of(thread):
        return thread // (warps * WARP)

    def own_tile(first_tile, thread):
        """The first row tile of a thread's team."""
        return first_tile + team_of(thread) * row_tiles

    # Output number `at` of a block: rows inside, then tokens, then tiles.
    def token_of(token, at):
        return token + at // (ROWS * TOKENS) % token_tiles * TOKENS + at // ROWS % TOKENS

    def row_of(first_tile, at):
        within = at // (ROWS * TOKENS * token_tiles) * ROWS + at % ROWS
        return first_tile * packing.tile + within

    def place(warp, block, output, lane):
        return ((warp * blocks + block) * OUTPUTS + output) * STRIDE + lane

    def place_of(warp, block, row, token):
        """Where the mma's lane that has this row and token has put its sum."""
        return place(warp, block, row // 8 * 2 + token % 2, row % 8 * 4 + token // 2)

    def joined(acc, first):
        """The sum over the parts of a group, as a butterfly of four lanes adds."""
        even = add(acc[first], acc[first + 2 * OUTPUTS])
        return add(even, add(acc[first + OUTPUTS], acc[first + 3 * OUTPUTS]))

    def with_residual(value, residual, addend):
        return value if residual is None else add(value, addend)

    @T.macro
    def read_addends(residual, addend, first_tile, token, thread):
        if residual is not None:
            for turn in T.unroll(turns):
                addend[turn] = residual[
                    T.min(token_of(token, turn * threads + thread), width - 1),
                    T.min(row_of(first_tile, turn * threads + thread), columns - 1),
                ]

    @T.macro
    def store(partial, at, residual, addend, y, token, n):
        dot = T.sblock_alloc_buffer((1,), "float32", scope="local")
        if (at < outputs) and (token < width) and (n < columns):
            dot[0] = partial[place_of(0, at // (ROWS * TOKENS), at % ROWS, at // ROWS % TOKENS)]
            for i in T.unroll(warps - 1):
                dot[0] = add(
                    dot[0],
                    partial[place_of(i + 1, at // (ROWS * TOKENS), at % ROWS, at // ROWS % TOKENS)],
                )
            y[token, n] = with_residual(dot[0], residual, addend)

    @T.macro
    def share(partial, acc, thread):
        for block in T.unroll(own):
            for i in T.unroll(OUTPUTS):
                partial[place(warp_of(thread), team_of(thread) * own + block, i, thread % WARP)] = (
                    joined(acc, block * PARTS * OUTPUTS + i)
                )

    @T.macro
    def one_block(q, scale, total, weight, weight_scale, residual, y, first_tile, token, thread):
        acc = T.sblock_alloc_buffer((own * PARTS * OUTPUTS,), "float32", scope="local")
        words = T.sblock_alloc_buffer((tile.ahead * row_tiles * WORDS,), "uint32", scope="local")
        scales = T.sblock_alloc_buffer(
            (tile.ahead * row_tiles * packing.rows,), "uint16", scope="local"
        )
        addend = T.sblock_alloc_buffer((turns,), "float32", scope="local")
        partial = T.sblock_alloc_buffer(
            (warps * blocks * OUTPUTS * STRIDE,), "float32", scope="shared"
        )
        # Without a word on blocks ptxas saves registers for as many as it can, and loads late.
        with T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", tile.resident):
            if early:
                let_others_start()
            begin(
                weight,
                weight_scale,
                words,
                scales,
                own_tile(first_tile, thread),
                warp_of(thread),
                thread % WARP,
            )
            if early:
                wait_for_others()
            if turns <= MOST_EARLY:
                read_addends(residual, addend, first_tile, token, thread)
            accumulate(
                q,
                scale,
                total,
                weight,
                weight_scale,
                words,
                scales,
                acc,
                own_tile(first_tile, thread),
                token,
                warp_of(thread),
                thread % WARP,
            )
            share(partial, acc, thread)
            if turns > MOST_EARLY:
                read_addends(residual, addend, first_tile, token, thread)
            T.tvm_storage_sync("shared")
            # Neighbouring threads have neighbouring rows.
            for turn in T.unroll(turns):
                store(
                    partial,
                    turn * threads + thread,
                    residual,
                    addend[turn],
                    y,
                    token_of(token, turn * threads + thread),
                    row_of(first_tile, turn * threads + thread),
                )

    return linear_kernel(work, threads, tile.block_tiles, tile.tokens, one_block)


TEMPLATE = Template(
    name="low_bit_group_mma",
    tile=GroupMmaTile,
    serves=serves,
    choose=choose,
    candidates=candidates,
    make=lambda work, tile, target: _template(work, tile, overlaps(target)),
)
