"""The draw of a row's token on cuda: thresholds of the filters, then the noise.

A block serves a row, and a warp looks at a part of it at a time, unless the part's maximum rules it
out. Whatever decides about a branch with a barrier in it is the same in all threads of a block.
"""

from tvm.script import tirx as T

from schedules.gpu.thread import (
    WARP,
    across,
    add,
    ceil_div,
    mul,
    rolled,
    span,
    splat,
    vector_width,
    warp_sum,
)
from schedules.sampling import (
    ENOUGH,
    REACH,
    STEPS,
    TRY,
    Words,
    is_active,
    is_open,
    narrow,
    next_threshold,
    penalty_factor,
    philox,
    setting,
    share,
    start_search,
    uniform,
    value_of,
    wanted,
)

ROW_WARPS = WARP
"""Warps of a row's block: as many as a warp has lanes, so that one butterfly joins them."""

ROW_THREADS = ROW_WARPS * WARP

NEIGHBOURS = 4
"""Tokens side by side that a lane takes at once: those of one block of random bits."""


def exp(x):
    """The accurate exponential: TVM's own becomes __expf."""
    return T.call_pure_extern("float32", "expf", x)


def log(x):
    """The accurate logarithm."""
    return T.call_pure_extern("float32", "logf", x)


def _gumbel(bits):
    return -log(-log(uniform(bits)))


def token_of(i):
    """The token of a lane's value i, counted from its first one."""
    return i // NEIGHBOURS * (WARP * NEIGHBOURS) + i % NEIGHBOURS


@T.macro
def merge(best, token, other, candidate):
    """The larger value wins, the lower id where both are equal."""
    if (other > best[0]) or ((other == best[0]) and (candidate < token[0])):
        best[0] = other
        token[0] = candidate


@T.macro
def merge_across_warp(best, token):
    """Every lane gets the warp's largest value and its token."""
    other = T.sblock_alloc_buffer((1,), "float32", scope="local")
    candidate = T.sblock_alloc_buffer((1,), "int32", scope="local")
    for level in T.unroll(5):
        other[0] = across(best[0], T.shift_right(16, level))
        candidate[0] = across(token[0], T.shift_right(16, level))
        merge(best, token, other[0], candidate[0])


@T.macro
def best_of_block(score, token, at):
    merge_across_warp(score, token)
    T.tvm_storage_sync("shared")
    if at.thread % WARP == 0:
        at.ids[at.thread // WARP] = token[0]
        at.values[at.thread // WARP] = score[0]
    T.tvm_storage_sync("shared")
    token[0] = at.ids[at.thread % WARP]
    score[0] = at.values[at.thread % WARP]
    merge_across_warp(score, token)


@T.macro
def sum_over_block(count, mass, at):
    warp_sum(count, 0, WARP)
    warp_sum(mass, 0, WARP)
    # What the last call left behind is read by now.
    T.tvm_storage_sync("shared")
    if at.thread % WARP == 0:
        at.ids[at.thread // WARP] = count[0]
        at.values[at.thread // WARP] = mass[0]
    T.tvm_storage_sync("shared")
    count[0] = at.ids[at.thread % WARP]
    mass[0] = at.values[at.thread % WARP]
    warp_sum(count, 0, WARP)
    warp_sum(mass, 0, WARP)


def loader(vocab_size: int, part: int, words: Words):
    """A macro that loads a lane's tokens of one part, after the penalty: (part / WARP,) float32."""
    vector, turns = vector_width(vocab_size, NEIGHBOURS), part // (WARP * NEIGHBOURS)

    @T.macro
    def load(values, logits, seen, state, horizon, row, first):
        """first: of the lane's tokens; -inf stands for those behind the vocabulary."""
        for turn in T.unroll(turns):
            for j in T.unroll(NEIGHBOURS // vector):
                if first + turn * (WARP * NEIGHBOURS) + j * vector < vocab_size:
                    values[span(turn * NEIGHBOURS + j * vector, vector)] = logits[
                        row, span(first + turn * (WARP * NEIGHBOURS) + j * vector, vector)
                    ]
                else:
                    values[span(turn * NEIGHBOURS + j * vector, vector)] = splat(
                        T.float32("-inf"), vector
                    )
        if setting(state, words.penalty) != T.float32(1):
            for i in T.unroll(turns * NEIGHBOURS):
                if first + token_of(i) < vocab_size:
                    if seen[first + token_of(i)] < horizon:
                        values[i] = mul(values[i], penalty_factor(values[i], state, words))

    return load


def sampler(vocab_size: int, parts: int, part: int, words: Words):
    """A macro that draws a token where the row and the request ask for it."""
    mine, turns = part // WARP, ceil_div(parts, ROW_WARPS)
    load = loader(vocab_size, part, words)

    def samples(at):
        of_target = (
            T.Cast("int32", at.row) < at.state[words.row_pending] + at.state[words.row_drafts]
        )
        return T.And(of_target, setting(at.state, words.temperature) > T.float32(0))

    def scaled(value, at):
        """y: how far below the maximum, in units of the temperature."""
        return mul(add(value, -at.peak[0]), at.inverse[0])

    @T.macro
    def load_mine(values, at, turn):
        load(
            values,
            at.logits,
            at.seen,
            at.state,
            at.position,
            at.row,
            (turn * ROW_WARPS + at.thread // WARP) * part + at.thread % WARP * NEIGHBOURS,
        )

    @T.macro
    def measure(count, mass, at, threshold):
        """Tokens from the threshold on, and their mass in units of the largest token's."""
        values = T.sblock_alloc_buffer((mine,), "float32", scope="local")
        count[0] = 0
        mass[0] = T.float32(0)
        for turn in rolled(turns):
            if turn * ROW_WARPS + at.thread // WARP < parts:
                if at.top[at.row, turn * ROW_WARPS + at.thread // WARP] >= threshold:
                    load_mine(values, at, turn)
                    for i in T.unroll(mine):
                        if values[i] >= threshold:
                            count[0] = count[0] + 1
                            mass[0] = add(mass[0], exp(scaled(values[i], at)))
        sum_over_block(count, mass, at)

    @T.macro
    def filter_tokens(least, at):
        """least: the smallest logit that top_k, and then top_p, keep."""
        search = T.sblock_alloc_buffer((6,), "int32", scope="local")
        distance = T.sblock_alloc_buffer((1,), "float32", scope="local")
        count = T.sblock_alloc_buffer((1,), "int32", scope="local")
        mass = T.sblock_alloc_buffer((1,), "float32", scope="local")
        bound = T.sblock_alloc_buffer((1,), "float32", scope="local")
        least[0] = T.min_value("float32")
        for stage in rolled(2):
            if is_active(at.state, words, stage, vocab_size):
                start_search(
                    search, distance, least[0], at.peak[0], setting(at.state, words.temperature)
                )
                while is_open(search, wanted(at.state, words, stage)):
                    next_threshold(search, distance, at.peak[0])
                    measure(count, mass, at, value_of(search[TRY]))
                    if search[STEPS] == 0:
                        bound[0] = mul(mass[0], share(at.state, words, stage))
                    narrow(
                        search,
                        count[0],
                        T.And(count[0] >= wanted(at.state, words, stage), mass[0] >= bound[0]),
                    )
                least[0] = value_of(search[ENOUGH])

    @T.macro
    def try_neighbours(score, token, values, i, bits, keys, product, at, least, floor, first):
        """Four tokens from `first` on; nothing where even the largest noise would not do."""
        most = T.sblock_alloc_buffer((1,), "float32", scope="local")
        most[0] = T.max(T.max(values[i], values[i + 1]), T.max(values[i + 2], values[i + 3]))
        if (most[0] >= least) and (add(scaled(most[0], at), T.float32(REACH)) >= score[0]):
            philox(bits, keys, product, at.state, words, first // NEIGHBOURS, at.position)
            for j in T.unroll(NEIGHBOURS):
                if (values[i + j] >= least) and (scaled(values[i + j], at) >= floor):
                    merge(score, token, add(scaled(values[i + j], at), _gumbel(bits[j])), first + j)

    @T.macro
    def draw(score, token, at, least):
        """The best of what this thread looks at. It starts from the row's largest token, which
        every filter keeps, so that little else comes into question."""
        values = T.sblock_alloc_buffer((mine,), "float32", scope="local")
        bits = T.sblock_alloc_buffer((4,), "uint32", scope="local")
        keys = T.sblock_alloc_buffer((2,), "uint32", scope="local")
        product = T.sblock_alloc_buffer((2,), "uint64", scope="local")
        floor = T.sblock_alloc_buffer((1,), "float32", scope="local")
        floor[0] = log(setting(at.state, words.min_p))
        philox(bits, keys, product, at.state, words, token[0] // NEIGHBOURS, at.position)
        for j in T.unroll(NEIGHBOURS - 1):
            bits[0] = T.Select(token[0] % NEIGHBOURS == j + 1, bits[j + 1], bits[0])
        score[0] = _gumbel(bits[0])
        for turn in rolled(turns):
            if turn * ROW_WARPS + at.thread // WARP < parts:
                if at.top[at.row, turn * ROW_WARPS + at.thread // WARP] >= least:
                    load_mine(values, at, turn)
                    for i in T.unroll(mine // NEIGHBOURS):
                        try_neighbours(
                            score,
                            token,
                            values,
                            i * NEIGHBOURS,
                            bits,
                            keys,
                            product,
                            at,
                            least,
                            floor[0],
                            (turn * ROW_WARPS + at.thread // WARP) * part
                            + at.thread % WARP * NEIGHBOURS
                            + i * (WARP * NEIGHBOURS),
                        )

    @T.macro
    def sample(token, z, at):
        """token, z: the row's largest, replaced by what was drawn."""
        least = T.sblock_alloc_buffer((1,), "float32", scope="local")
        score = T.sblock_alloc_buffer((1,), "float32", scope="local")
        if samples(at):
            at.inverse[0] = T.float32(1) / setting(at.state, words.temperature)
            filter_tokens(least, at)
            draw(score, token, at, least[0])
            best_of_block(score, token, at)
            z[0] = at.logits[at.row, token[0]]
            if setting(at.state, words.penalty) != T.float32(1):
                if at.seen[token[0]] < at.position:
                    z[0] = mul(z[0], penalty_factor(z[0], at.state, words))

    return sample
