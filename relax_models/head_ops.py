"""The bounded head as TensorIR: logits from an 8-bit copy of the table, the largest exact.

Three operations, stamped like those of `relax_models.ops`: `final_norm_codes` makes 8-bit terms of
the last hidden states, `head_codes` the logits of all tokens from the 8-bit table, and
`head_rescore` computes those again from the bfloat16 table that could be the largest of their row.
Their numpy twin is bitmtp_tvm/reference/head_bound.py.

The bound. Let w be a row of the table and x one of activations, s, w8, t and q their scales and
codes (relax_models/bounded_head.py), and z16, z8 the two logits. In real numbers

    w x - s t w8 q = (w - s w8) x + s w8 (x - t q),

so that |z16 - z8| <= |w - s w8| |x| + |s w8| |x - t q| (Cauchy-Schwarz) + what float32 adds. The
8-bit sum is exact; three roundings of z8 and the sum of z16, whose tree `slack` counts, are at most
`slack` |x| |s w8| together, and a share of the first term below what its length is rounded up by.
So e = ERROR[n] * length + LENGTH[n] * error + LEAST bounds it, with length >= |x| and error >=
`code_error` t + `slack` |x|; lengths are rounded up by more than the products' own rounding, and
LEAST is above all that underflows.

Let low = max over n of (z8 - e). The token with the largest z16 has z8 + e >= z16 >= low, so it is
among the candidates, which have z8 + e >= low; a logit that stays 8-bit is below low, and so below
the largest. This holds for numbers rounded to nearest, because rounding keeps order, and for scores
after the repetition penalty, which keeps order too: it is put on z8 + e and z8 - e. A bound that is
no finite number raises no floor and makes its token a candidate.

Which tokens are candidates hangs on the row alone, not on its bucket. What stays 8-bit counts in
confidences, log-probabilities and draws. Its error is about |x| |w - s w8| / sqrt(K): 0.016 of the
logits' standard deviation for a table of Student weights (6 degrees of freedom, K = 2560), where e
is 0.7 of it. Measured for 32000 such logits of deviation 2 to 4, with a largest probability of 0.1
to 0.7: the argmax's log-probability off by 0.0024 at most, the whole distribution by 0.01 in total
variation; 23 to 100 candidates in the median row, 380 at most.
"""

from tvm import tirx
from tvm.script import tirx as T

from relax_models.bounded_head import (
    CODE,
    ERROR,
    LEAST_ABSMAX,
    LEAST_ERROR,
    LEAST_FLOOR,
    LEAST_LENGTH,
    LENGTH,
    LOW_CODES,
    SCALE,
    bounds_shape,
    code_error,
    codes_shape,
    most_code,
    slack,
)
from relax_models.choose_ops import is_broken, penalised, stamp_words
from relax_models.formats import K_BLOCK, padded_k
from relax_models.ops import stamp
from relax_models.state import STATE_WORDS


def final_norm_codes(size: int, eps: float) -> tirx.PrimFunc:
    """RMSNorm of the rows that ask for logits, and their 8-bit terms.

    x `(width, size)` float32, weight `(size,)` float32, logit_rows `(rows,)` int32 -> normed
    `(rows, size)` float32, q `(rows, 2, padded_k(size))` int8 (q = LOW_CODES * first + second, zero
    behind `size`), spread `(rows, 3)` float32 (t, length, error: see above), floor `(rows,)` int32
    (`LEAST_FLOOR`). What stands in rows that ask for nothing (an entry below 0) is not defined.
    """
    padded, most = padded_k(size), most_code(size)
    up = 1 + 2.0**-12

    @T.macro
    def norm(x, weight, normed, square, row, at):
        square[0] = T.float32(0)
        for k in range(size):
            square[0] += x[at, k] * x[at, k]
        for k in range(size):
            normed[row, k] = (
                x[at, k] / T.sqrt(square[0] / T.float32(size) + T.float32(eps)) * weight[k]
            )

    @T.macro
    def measure(normed, spread, square, row):
        square[0] = T.float32(0)
        spread[row, 0] = T.float32(LEAST_ABSMAX)
        for k in range(size):
            square[0] += normed[row, k] * normed[row, k]
            spread[row, 0] = T.max(spread[row, 0], T.abs(normed[row, k]))
        spread[row, 0] = spread[row, 0] / T.float32(most)
        spread[row, 1] = T.sqrt(square[0]) * T.float32(up) + T.float32(LEAST_LENGTH)
        spread[row, 2] = (
            T.float32(code_error(size)) * spread[row, 0] + T.float32(slack(size)) * spread[row, 1]
        )

    @T.prim_func(private=True, s_tir=True)
    def func(
        x_: T.handle,
        weight: T.Buffer((size,), "float32"),
        logit_rows_: T.handle,
        normed_: T.handle,
        q_: T.handle,
        spread_: T.handle,
        floor_: T.handle,
    ):
        width, rows = T.int64(), T.int64()
        x = T.match_buffer(x_, (width, size), "float32")
        logit_rows = T.match_buffer(logit_rows_, (rows,), "int32")
        normed = T.match_buffer(normed_, (rows, size), "float32")
        q = T.match_buffer(q_, (rows, 2, padded), "int8")
        spread = T.match_buffer(spread_, (rows, 3), "float32")
        floor = T.match_buffer(floor_, (rows,), "int32")
        for i in range(rows):
            with T.sblock("row"):
                row = T.axis.spatial(rows, i)
                square = T.sblock_alloc_buffer((1,), "float32")
                code = T.sblock_alloc_buffer((2,), "int32")
                floor[row] = T.int32(LEAST_FLOOR)
                norm(x, weight, normed, square, row, T.max(logit_rows[row], 0))
                measure(normed, spread, square, row)
                for k in range(padded):
                    code[0] = 0
                    if k < size:
                        code[0] = T.Cast("int32", T.nearbyint(normed[row, k] / spread[row, 0]))
                    code[1] = T.bitwise_and(code[0] + LOW_CODES // 2, LOW_CODES - 1)
                    code[1] = code[1] - LOW_CODES // 2
                    q[row, 0, k] = T.Cast("int8", (code[0] - code[1]) // LOW_CODES)
                    q[row, 1, k] = T.Cast("int8", code[1])

    return stamp(
        func,
        "final_norm_codes",
        eps=eps,
        most_code=most,
        low_codes=LOW_CODES,
        code_error=code_error(size),
        slack=slack(size),
        up=up,
        least_absmax=LEAST_ABSMAX,
        least_length=LEAST_LENGTH,
        least_floor=LEAST_FLOOR,
    )


def _key(value):
    """An int32 that orders like the float32 it comes from."""
    bits = T.reinterpret("int32", value)
    return T.Select(bits >= 0, bits, T.bitwise_xor(bits, 0x7FFFFFFF))


def _bound(bounds, spread, row, n):
    """The most that the exact logit can differ from the 8-bit one."""
    return (
        bounds[ERROR, n] * spread[row, 1]
        + bounds[LENGTH, n] * spread[row, 2]
        + T.float32(LEAST_ERROR)
    )


def _code(codes, n, k):
    """The code of the table's row n, column k: see `bounded_head.pack_codes`."""
    rest = k % K_BLOCK
    word = codes[
        n // 16,
        k // K_BLOCK,
        rest % 32 // 8,
        n % 8 * 4 + rest // 32,
        rest % 8 // 4 * 2 + n % 16 // 8,
    ]
    byte = T.Cast("int32", T.shift_right(word, T.Cast("uint32", k % 4 * 8)))
    return T.shift_right(T.shift_left(byte, 24), 24)


def _without(func: tirx.PrimFunc, *names: str) -> tirx.PrimFunc:
    """`func` without parameters that its body does not read."""
    kept = [param for param in func.params if param.name not in names]
    return tirx.PrimFunc(kept, func.body, func.ret_type, func.attrs)


def _finished(func: tirx.PrimFunc, op: str, with_penalty: bool, **settings) -> tirx.PrimFunc:
    if not with_penalty:
        func = _without(func, "horizon", "state", "seen")
    return stamp_words(
        func.without_attr("global_symbol") if "global_symbol" in func.attrs else func,
        op,
        with_penalty=with_penalty,
        least_error=LEAST_ERROR,
        **settings,
    )


def head_codes(vocab_size: int, size: int, with_penalty: bool) -> tirx.PrimFunc:
    """Logits of the rows that ask for them over the 8-bit table, and the floor of their scores.

    q, spread, floor as `final_norm_codes` gives them, codes and bounds as `pack_codes` does,
    logit_rows `(rows,)` int32, with_penalty: horizon, state and seen as `softmax_parts` takes them
    -> logits `(rows, vocab_size)` float32 = v * (s * t), where v is the exact sum of products of
    codes. floor becomes the largest key of z - e, after the penalty, over the row's finite ones;
    what stands in rows that ask for nothing (an entry below 0) is not defined.

    Parameters: q, spread, codes, bounds, logit_rows [, horizon, state, seen], floor, logits.
    """
    padded = padded_k(size)

    def lowest(logit, bound, seen, n, horizon, state):
        low = logit - bound
        return penalised(low, seen, n, horizon, state) if with_penalty else low

    @T.prim_func(private=True, s_tir=True)
    def func(
        q_: T.handle,
        spread_: T.handle,
        codes: T.Buffer(codes_shape(vocab_size, size), "uint32"),
        bounds: T.Buffer(bounds_shape(vocab_size), "float32"),
        logit_rows_: T.handle,
        horizon_: T.handle,
        state: T.Buffer((STATE_WORDS,), "int32"),
        seen: T.Buffer((vocab_size,), "int32"),
        floor_: T.handle,
        logits_: T.handle,
    ):
        rows = T.int64()
        q = T.match_buffer(q_, (rows, 2, padded), "int8")
        spread = T.match_buffer(spread_, (rows, 3), "float32")
        logit_rows = T.match_buffer(logit_rows_, (rows,), "int32")
        horizon = T.match_buffer(horizon_, (rows,), "int32")
        floor = T.match_buffer(floor_, (rows,), "int32")
        logits = T.match_buffer(logits_, (rows, vocab_size), "float32")
        for i, v in T.grid(rows, vocab_size):
            with T.sblock("logit"):
                row, n = T.axis.remap("SS", [i, v])
                exact = T.sblock_alloc_buffer((1,), "int32")
                low = T.sblock_alloc_buffer((1,), "float32")
                exact[0] = 0
                if logit_rows[row] >= 0:
                    for k in range(padded):
                        exact[0] += _code(codes, n, k) * (
                            LOW_CODES * T.Cast("int32", q[row, 0, k])
                            + T.Cast("int32", q[row, 1, k])
                        )
                    logits[row, n] = T.Cast("float32", exact[0]) * (
                        bounds[SCALE, n] * spread[row, 0]
                    )
                    low[0] = lowest(
                        logits[row, n],
                        _bound(bounds, spread, row, n),
                        seen,
                        n,
                        horizon[row] if with_penalty else 0,
                        state,
                    )
                    if T.Not(is_broken(low[0])):
                        floor[row] = T.max(floor[row], _key(low[0]))

    return _finished(func, "head_codes", with_penalty, low_codes=LOW_CODES, code=CODE)


def head_rescore(vocab_size: int, size: int, with_penalty: bool) -> tirx.PrimFunc:
    """The exact logits of every token that may have the largest score of its row, in place.

    x: `final_norm_codes`' normed, table `(vocab_size, size)` uint16 (bfloat16 bits), spread,
    bounds, logit_rows, horizon, state, seen, floor, logits as `head_codes` takes and gives them.
    A logit is computed again, summed in float32, where the key of z + e, after the penalty, is not
    below the floor, or z + e is not finite.

    Parameters: x, table, spread, bounds, logit_rows [, horizon, state, seen], floor, logits.
    """

    def highest(logit, bound, seen, n, horizon, state):
        high = logit + bound
        return penalised(high, seen, n, horizon, state) if with_penalty else high

    def from_bf16(bits):
        wide = T.shift_left(T.Cast("uint32", bits), T.uint32(16))
        return T.reinterpret("float32", wide)

    @T.prim_func(private=True, s_tir=True)
    def func(
        x_: T.handle,
        table: T.Buffer((vocab_size, size), "uint16"),
        spread_: T.handle,
        bounds: T.Buffer(bounds_shape(vocab_size), "float32"),
        logit_rows_: T.handle,
        horizon_: T.handle,
        state: T.Buffer((STATE_WORDS,), "int32"),
        seen: T.Buffer((vocab_size,), "int32"),
        floor_: T.handle,
        logits_: T.handle,
    ):
        rows = T.int64()
        x = T.match_buffer(x_, (rows, size), "float32")
        spread = T.match_buffer(spread_, (rows, 3), "float32")
        logit_rows = T.match_buffer(logit_rows_, (rows,), "int32")
        horizon = T.match_buffer(horizon_, (rows,), "int32")
        floor = T.match_buffer(floor_, (rows,), "int32")
        logits = T.match_buffer(logits_, (rows, vocab_size), "float32")
        for i, v in T.grid(rows, vocab_size):
            with T.sblock("logit"):
                row, n = T.axis.remap("SS", [i, v])
                high = T.sblock_alloc_buffer((1,), "float32")
                if logit_rows[row] >= 0:
                    high[0] = highest(
                        logits[row, n],
                        _bound(bounds, spread, row, n),
                        seen,
                        n,
                        horizon[row] if with_penalty else 0,
                        state,
                    )
                    if T.Or(
                        T.Or(is_broken(high[0]), high[0] == T.float32("-inf")),
                        _key(high[0]) >= floor[row],
                    ):
                        logits[row, n] = T.float32(0)
                        for k in range(size):
                            logits[row, n] += x[row, k] * from_bf16(table[n, k])

    return _finished(func, "head_rescore", with_penalty)
