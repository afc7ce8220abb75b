"""Logits on cuda's tensor cores: mma m16n8k16 of bfloat16, summed in float32.

B is eight rows of the table, as they lie in memory: of a block of 32 columns, lane 4g + t loads the
eight from 8t on, of row g. Which column an mma takes for which k is free where A and B agree, so
the first four of every lane make the block's first k-step, the others its second. A is the
activation rows, each float32 cut into three bfloat16 terms that add up to it exactly.

An mma truncates its sums. So a block's products with the large terms start from zero and are added
to the lane's sum by an addition that rounds to nearest; those with the small terms have a sum of
their own, in which nothing of weight is lost. A logit is the sum of four warps' sums. That tree
depends on the row's size alone, and a row of A meets no other row.
"""

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu.thread import WARP, add, ceil_div, rolled, span
from schedules.workload import Workload

GROUP = 8
K_BLOCK = 32
LANE_K = 8
PAIRS = LANE_K // 2
HIGH, MIDDLE, LOW = range(3)
MOST_GROUPS = 4
# Both are part of the tree: the warps that share a row, and the blocks side by side of one turn.
PARTS = 4
BLOCKS = 2
# The table is read once, so that it need not push the activations out of the nearest cache.
LOAD = "ld.weak.global.L1::no_allocate.L2::128B.v4.u32"
UPPER_HALF = 0xFFFF0000
# Selects the upper halves of two words.
UPPER_HALVES = 0x7632


@dataclass(frozen=True)
class MmaTile:
    """What a block computes, in groups of eight: of activation rows and of rows of the table.

    groups: 1, whose large and middle terms then share an mma, or an even number; entries: even.
    """

    groups: int
    entries: int


def serves(size: int) -> bool:
    """Whether rows of `size` elements can be read in whole blocks."""
    return size % K_BLOCK == 0


def choose_tile(rows: int) -> MmaTile:
    """The tile for `rows` activation rows; up to 32 of them see the table together."""
    groups = ceil_div(rows, GROUP)
    groups = ceil_div(groups, ceil_div(groups, MOST_GROUPS))
    return MmaTile(1 if groups == 1 else ceil_div(groups, 2) * 2, 4)


def mma_head(work: Workload, tile: MmaTile) -> tirx.PrimFunc:
    """`relax_models.ops.head` for a size that is `serves`d."""
    (width, size), (vocab_size, _) = work.shapes[:2]
    groups, entries, paired = tile.groups, tile.entries, tile.groups > 1
    per_tile = 2 if paired else 1
    tiles, tokens, rows = groups // per_tile, groups * GROUP, entries * GROUP
    blocks, shares = size // K_BLOCK, ceil_div(width, tokens)
    rounds, grid = ceil_div(blocks, PARTS * BLOCKS), ceil_div(vocab_size, rows) * shares
    # A lane's sums of large terms, and the outputs of a block.
    sums, outputs = groups * entries * 2, tokens * rows

    def block_of(warp, turn, i):
        return (turn * PARTS + warp) * BLOCKS + i

    def exists(block):
        return True if rounds * PARTS * BLOCKS == blocks else block < blocks

    def asks(logit_rows, token):
        return logit_rows[T.min(token, width - 1)] >= 0

    def any_asks(logit_rows, first_token):
        result = asks(logit_rows, first_token)
        for i in range(1, tokens):
            result = T.Or(result, asks(logit_rows, first_token + i))
        return result

    def bits(value):
        return T.reinterpret("uint32", value)

    def upper(value):
        """The first term of `value`: its sign, exponent and the first seven bits behind the 1."""
        return T.reinterpret("float32", T.bitwise_and(bits(value), T.uint32(UPPER_HALF)))

    def pair(first, second):
        """Both numbers' first terms, as a register of A holds them."""
        return T.call_pure_extern(
            "uint32", "__byte_perm", bits(first), bits(second), T.uint32(UPPER_HALVES)
        )

    def term_of(group, term):
        """Where `split` has put a term of a lane's row in one of the tile's groups."""
        return (group * 3 + term) * PAIRS

    @T.macro
    def load(table, words, first_row, block, lane, i):
        for e in T.unroll(entries):
            T.ptx[LOAD](
                words[(i * entries + e) * 4],
                words[(i * entries + e) * 4 + 1],
                words[(i * entries + e) * 4 + 2],
                words[(i * entries + e) * 4 + 3],
                T.address_of(
                    table[
                        T.min(first_row + e * GROUP + lane // 4, vocab_size - 1),
                        block * K_BLOCK + lane % 4 * LANE_K,
                    ]
                ),
            )

    @T.macro
    def split(x, terms, group, token, k):
        """The terms of eight neighbours in x."""
        rest = T.sblock_alloc_buffer((LANE_K,), "float32", scope="local")
        for i in T.unroll(LANE_K // 4):
            rest[span(i * 4, 4)] = x[T.min(token, width - 1), span(k + i * 4, 4)]
        for term in T.unroll(3):
            for i in T.unroll(PAIRS):
                terms[term_of(group, term) + i] = pair(rest[2 * i], rest[2 * i + 1])
            if term < LOW:
                for i in T.unroll(LANE_K):
                    rest[i] = add(rest[i], -upper(rest[i]))

    @T.macro
    def mma(dot, terms, words, d, first, second, b):
        T.ptx.mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32(
            dot[d],
            dot[d + 1],
            dot[d + 2],
            dot[d + 3],
            terms[first],
            terms[second],
            terms[first + 1],
            terms[second + 1],
            words[b],
            words[b + 1],
            dot[d],
            dot[d + 1],
            dot[d + 2],
            dot[d + 3],
        )

    @T.macro
    def multiply_terms(dot, terms, words, d, first, second, b):
        """Add a block's products of two groups' terms, first and second, to the sums from d on."""
        for step in T.unroll(2):
            for e in T.unroll(entries):
                mma(
                    dot,
                    terms,
                    words,
                    d + e * 4,
                    first + step * 2,
                    second + step * 2,
                    b + e * 4 + step * 2,
                )

    @T.macro
    def multiply_one(terms, words, acc, small, b):
        """One group: its large terms take the place of the other. Their sums start from zero."""
        for j in T.unroll(PAIRS):
            terms[term_of(1, HIGH) + j] = T.uint32(0)
        multiply_terms(small, terms, words, 0, term_of(1, HIGH), term_of(0, LOW), b)
        multiply_terms(small, terms, words, 0, term_of(0, HIGH), term_of(0, MIDDLE), b)
        for e in T.unroll(entries):
            for j in T.unroll(2):
                acc[e * 2 + j] = add(acc[e * 2 + j], small[e * 4 + j])
                small[e * 4 + j] = T.float32(0)

    @T.macro
    def multiply_two(terms, words, acc, small, first, b):
        large = T.sblock_alloc_buffer((entries * 4,), "float32", scope="local")
        for i in T.unroll(entries * 4):
            large[i] = T.float32(0)
        multiply_terms(large, terms, words, 0, term_of(0, HIGH), term_of(1, HIGH), b)
        for i in T.unroll(entries * 4):
            acc[first + i] = add(acc[first + i], large[i])
        multiply_terms(small, terms, words, first, term_of(0, LOW), term_of(1, LOW), b)
        multiply_terms(small, terms, words, first, term_of(0, MIDDLE), term_of(1, MIDDLE), b)

    @T.macro
    def multiply(x, words, acc, small, token, block, lane, i):
        """Add a block's products to a lane's sums."""
        terms = T.sblock_alloc_buffer((6 * PAIRS,), "uint32", scope="local")
        for n in T.unroll(tiles):
            for group in T.unroll(per_tile):
                split(
                    x,
                    terms,
                    group,
                    token + (n * per_tile + group) * GROUP + lane // 4,
                    block * K_BLOCK + lane % 4 * LANE_K,
                )
            if paired:
                multiply_two(terms, words, acc, small, n * entries * 4, i * entries * 4)
            else:
                multiply_one(terms, words, acc, small, i * entries * 4)

    @T.macro
    def accumulate(x, table, acc, small, first_row, token, warp, lane):
        """A warp's sums over its blocks; a turn loads what the next one needs."""
        words = T.sblock_alloc_buffer((BLOCKS * entries * 4,), "uint32", scope="local")
        for i in T.unroll(BLOCKS):
            if exists(block_of(warp, 0, i)):
                load(table, words, first_row, block_of(warp, 0, i), lane, i)
        for turn in rolled(rounds):
            for i in T.unroll(BLOCKS):
                if exists(block_of(warp, turn, i)):
                    multiply(x, words, acc, small, token, block_of(warp, turn, i), lane, i)
                if block_of(warp, turn + 1, i) < blocks:
                    load(table, words, first_row, block_of(warp, turn + 1, i), lane, i)

    def small_of(i):
        """The sum of small terms that belongs to sum i of large ones."""
        return i if paired else i // 2 * 4 + 2 + i % 2

    def place(i, lane):
        """Where the block keeps sum i of a lane: a group's eight times eight stand together."""
        e, group = i // (2 * per_tile), i // 2 % per_tile
        return ((e // entries * per_tile + group) * entries + e % entries) * 64 + lane * 2 + i % 2

    @T.macro
    def sum_of_warp(x, table, partial, first_row, token, warp, lane):
        acc = T.sblock_alloc_buffer((sums,), "float32", scope="local")
        small = T.sblock_alloc_buffer((tiles * entries * 4,), "float32", scope="local")
        for i in T.unroll(sums):
            acc[i] = T.float32(0)
        for i in T.unroll(tiles * entries * 4):
            small[i] = T.float32(0)
        accumulate(x, table, acc, small, first_row, token, warp, lane)
        for i in T.unroll(sums):
            partial[warp * outputs + place(i, lane)] = add(acc[i], small[small_of(i)])

    @T.macro
    def store(partial, logit_rows, logits, at, token, row):
        dot = T.sblock_alloc_buffer((1,), "float32", scope="local")
        if (row < vocab_size) and (token < width) and asks(logit_rows, token):
            dot[0] = partial[at]
            for part in T.unroll(PARTS - 1):
                dot[0] = add(dot[0], partial[(part + 1) * outputs + at])
            logits[token, row] = dot[0]

    @T.macro
    def one_block(x, table, logit_rows, logits, first_row, token, thread):
        partial = T.sblock_alloc_buffer((PARTS * outputs,), "float32", scope="shared")
        sum_of_warp(x, table, partial, first_row, token, thread // WARP, thread % WARP)
        T.tvm_storage_sync("shared")
        for i in T.unroll(outputs // (PARTS * WARP)):
            store(
                partial,
                logit_rows,
                logits,
                i * PARTS * WARP + thread,
                token + (i * 2 + thread // 64) // entries * GROUP + thread % 64 // 8,
                first_row + (i * 2 + thread // 64) % entries * GROUP + thread % 8,
            )

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((width, size), "float32"),
        table: T.Buffer((vocab_size, size), "uint16"),
        logit_rows: T.Buffer((width,), "int32"),
        logits: T.Buffer((width, vocab_size), "float32"),
    ):
        for bx in T.thread_binding(grid, thread="blockIdx.x"):
            for tx in T.thread_binding(PARTS * WARP, thread="threadIdx.x"):
                with T.sblock("head"):
                    block = T.axis.spatial(grid, bx)
                    thread = T.axis.spatial(PARTS * WARP, tx)
                    # Neighbouring blocks share their part of the table.
                    if any_asks(logit_rows, block % shares * tokens):
                        one_block(
                            x,
                            table,
                            logit_rows,
                            logits,
                            block // shares * rows,
                            block % shares * tokens,
                            thread,
                        )

    return func
