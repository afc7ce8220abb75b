"""Linear whose weights and activations carry a scale for every 128 columns, on cuda: three rows of
activations and more, on tensor cores.

The float sum is that of low_bit_group_gemv.py to the bit, tree and roundings: the four parts of a
group are summed apart, what a lane is there is a register here. Rows and tokens of a block and the
loads in flight are free to differ from width to width.
"""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.linear import linear_kernel
from schedules.gpu.low_bit_group_gemv import MANY_BLOCKS, warps_for
from schedules.gpu.low_bit_group_mma_warp import (
    OUTPUTS,
    PARTS,
    ROWS,
    TOKENS,
    GroupMmaTile,
    accumulator,
)
from schedules.gpu.packed import GROUP_PACKINGS, Packing
from schedules.gpu.thread import WARP, add, ceil_div
from schedules.space import Card, Template
from schedules.workload import Workload

# With fewer rows most of an mma is idle.
LEAST_WIDTH = 3
# Tiles of 16 rows x 8 tokens of a warp: each has 16 sums in a lane.
MOST_TILES = 2
MOST_AHEAD = 4
# Threads of a multiprocessor of which each has 128 registers.
BUSY_THREADS = 512
# Outputs of a tile stand 33 apart, so that neither writes nor reads collide in a bank.
STRIDE = WARP + 1


def choose_tile(width: int, tiles: int, groups: int, packing: Packing) -> GroupMmaTile:
    """The tile for `width` activation rows and `tiles` x `groups` tiles of weights."""
    warps, halves = warps_for(groups), packing.rows // 2
    needed = ceil_div(width, TOKENS)
    # Spread evenly over the fewest blocks.
    token_tiles = ceil_div(needed, ceil_div(needed, MOST_TILES // halves))
    many = tiles * ceil_div(needed, token_tiles) >= MANY_BLOCKS
    # More rows share the loads of the activations.
    row_tiles = 2 if many and 2 * halves * token_tiles <= MOST_TILES else 1
    most_ahead = MOST_AHEAD // (row_tiles * halves * token_tiles)
    rounds = ceil_div(ceil_div(groups, warps), most_ahead)
    return GroupMmaTile(token_tiles, row_tiles, warps, ceil_div(groups, warps * rounds))


def serves(work: Workload, card: Card) -> bool:
    """Whether the tensor cores pay: weights with groups and a few rows."""
    return work.settings["format"] in GROUP_PACKINGS and work.width >= LEAST_WIDTH


def choose(work: Workload, card: Card) -> GroupMmaTile:
    """The rule's tile."""
    tiles, groups = work.shapes[3][:2]
    return choose_tile(work.width, tiles, groups, GROUP_PACKINGS[work.settings["format"]])


def _template(work: Workload, tile: GroupMmaTile) -> tirx.PrimFunc:
    packing = GROUP_PACKINGS[work.settings["format"]]
    width, columns = work.shapes[-1]
    tiles, groups = work.shapes[3][:2]
    row_tiles, token_tiles, warps = tile.row_tiles, tile.token_tiles, tile.warps
    threads = warps * WARP
    blocks = row_tiles * packing.tile // ROWS * token_tiles
    outputs = blocks * ROWS * TOKENS
    accumulate = accumulator(packing, tile, (width, tiles, groups))

    def place(warp, block, output, lane):
        return ((warp * blocks + block) * OUTPUTS + output) * STRIDE + lane

    def place_of(warp, block, row, token):
        """Where the mma's lane that has this row and token has put its sum."""
        return place(warp, block, row // 8 * 2 + token % 2, row % 8 * 4 + token // 2)

    def joined(acc, first):
        """The sum over the parts of a group, as a butterfly of four lanes adds."""
        even = add(acc[first], acc[first + 2 * OUTPUTS])
        return add(even, add(acc[first + OUTPUTS], acc[first + 3 * OUTPUTS]))

    def with_residual(value, residual, token, n):
        return value if residual is None else add(value, residual[token, n])

    @T.macro
    def store(partial, block, row, column, residual, y, token, n):
        dot = T.sblock_alloc_buffer((1,), "float32", scope="local")
        if (block < blocks) and (token < width) and (n < columns):
            dot[0] = partial[place_of(0, block, row, column)]
            for i in T.unroll(warps - 1):
                dot[0] = add(dot[0], partial[place_of(i + 1, block, row, column)])
            y[token, n] = with_residual(dot[0], residual, token, n)

    @T.macro
    def store_all(partial, residual, y, first_row, first_token, thread):
        # Neighbouring threads have neighbouring rows.
        for turn in T.unroll(ceil_div(outputs, threads)):
            store(
                partial,
                (turn * threads + thread) // (ROWS * TOKENS),
                (turn * threads + thread) % ROWS,
                (turn * threads + thread) // ROWS % TOKENS,
                residual,
                y,
                first_token
                + (turn * threads + thread) // (ROWS * TOKENS) % token_tiles * TOKENS
                + (turn * threads + thread) // ROWS % TOKENS,
                first_row
                + (turn * threads + thread) // (ROWS * TOKENS * token_tiles) * ROWS
                + thread % ROWS,
            )

    @T.macro
    def one_block(q, scale, total, weight, weight_scale, residual, y, first_tile, token, thread):
        acc = T.sblock_alloc_buffer((blocks * PARTS * OUTPUTS,), "float32", scope="local")
        partial = T.sblock_alloc_buffer(
            (warps * blocks * OUTPUTS * STRIDE,), "float32", scope="shared"
        )
        # Without a word on blocks ptxas saves registers for as many as it can, and loads late.
        with T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", max(1, BUSY_THREADS // threads)):
            accumulate(
                q,
                scale,
                total,
                weight,
                weight_scale,
                acc,
                first_tile,
                token,
                thread // WARP,
                thread % WARP,
            )
        for block in T.unroll(blocks):
            for i in T.unroll(OUTPUTS):
                partial[place(thread // WARP, block, i, thread % WARP)] = joined(
                    acc, block * PARTS * OUTPUTS + i
                )
        T.tvm_storage_sync("shared")
        store_all(partial, residual, y, first_tile * packing.tile, token, thread)

    return linear_kernel(work, threads, row_tiles, tile.tokens, one_block)


TEMPLATE = Template(
    name="low_bit_group_mma",
    tile=GroupMmaTile,
    serves=serves,
    choose=choose,
    candidates=lambda work, card: [choose(work, card)],
    make=lambda work, tile, target: _template(work, tile),
)
