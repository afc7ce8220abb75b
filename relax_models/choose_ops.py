"""The choice of tokens as TensorIR: from the logits of a step to a token for every row that asks.

Two operations, stamped like those of `relax_models.ops`: `softmax_parts` sums up every part of a
row, so that many blocks can share a row, and `choose` joins the parts and draws where the request
asks for sampling. All settings are words of the state (relax_models/state.py), read at run time;
the stamp tells a rule where they stand. Their numpy twin is bitmtp_tvm/reference/choose.py.
"""

from tvm import tirx
from tvm.script import tirx as T

from relax_models.ops import stamp
from relax_models.state import STATE_WORDS, Word

PART = 256
"""Tokens of a part; the last part of a row may have fewer."""

WORDS = (
    Word.TEMPERATURE,
    Word.TOP_K,
    Word.TOP_P,
    Word.MIN_P,
    Word.PENALTY,
    Word.SEED_LOW,
    Word.SEED_HIGH,
    Word.ROW_PENDING,
    Word.ROW_DRAFTS,
)
"""The words of the state that a rule reads, stamped as `word_temperature` and so on."""

PHILOX_ROUNDS = 10


def parts_of(vocab_size: int) -> int:
    """Parts of a row of logits."""
    return -(-vocab_size // PART)


def stamp_words(func: tirx.PrimFunc, op: str, **settings) -> tirx.PrimFunc:
    """`func` with a stamp that tells where the state's words stand."""
    words = {f"word_{w.name.lower()}": int(w) for w in WORDS}
    return stamp(func, op, **words, **settings)


def _float(state, word):
    return T.reinterpret("float32", state[word])


def _unsigned(word):
    return T.reinterpret("uint32", word)


def penalised(logit, seen, token, horizon, state):
    """The logit after the repetition penalty; `seen` is not read where there is none."""
    penalty = _float(state, Word.PENALTY)
    changed = logit * T.Select(logit > T.float32(0), T.float32(1) / penalty, penalty)
    wanted = T.if_then_else(penalty != T.float32(1), seen[token] < horizon, T.bool(False))
    return T.if_then_else(wanted, changed, logit)


def is_broken(z):
    """NaN or +inf, asked of the bits: TVM takes `x == x` for granted."""
    bits = T.reinterpret("uint32", z)
    beyond = T.bitwise_and(bits, T.uint32(0x7FFFFFFF)) >= T.uint32(0x7F800000)
    return T.And(beyond, bits != T.uint32(0xFF800000))


def softmax_parts(vocab_size: int) -> tirx.PrimFunc:
    """Maximum, argmax and sum of exponentials of every part of `PART` tokens of a row.

    logits `(rows, vocab_size)` float32, logit_rows and horizon `(rows,)` int32, state
    `(STATE_WORDS,)` int32, seen `(vocab_size,)` int32 -> top `(rows, parts)` float32, best
    `(rows, parts)` int32 (the lowest id with that logit), total `(rows, parts)` float32 = Σ exp(z -
    top), where z are the logits after the repetition penalty: those of tokens with seen < horizon
    are multiplied by 1 / PENALTY if positive and by PENALTY if not. A part with a NaN or +inf gives
    +inf, -1, 0; one with nothing finite gives -inf, -1, 0. What stands in rows that ask for nothing
    (logit_rows below 0) is not defined.
    """
    parts = parts_of(vocab_size)

    @T.prim_func(private=True, s_tir=True)
    def func(
        logits_: T.handle,
        logit_rows_: T.handle,
        horizon_: T.handle,
        state: T.Buffer((STATE_WORDS,), "int32"),
        seen: T.Buffer((vocab_size,), "int32"),
        top_: T.handle,
        best_: T.handle,
        total_: T.handle,
    ):
        rows = T.int64()
        logits = T.match_buffer(logits_, (rows, vocab_size), "float32")
        logit_rows = T.match_buffer(logit_rows_, (rows,), "int32")
        horizon = T.match_buffer(horizon_, (rows,), "int32")
        top = T.match_buffer(top_, (rows, parts), "float32")
        best = T.match_buffer(best_, (rows, parts), "int32")
        total = T.match_buffer(total_, (rows, parts), "float32")
        for i, p in T.grid(rows, parts):
            with T.sblock("part"):
                vi, vp = T.axis.remap("SS", [i, p])
                z = T.sblock_alloc_buffer((1,), "float32")
                top[vi, vp] = T.float32("-inf")
                best[vi, vp] = -1
                total[vi, vp] = T.float32(0)
                if logit_rows[vi] >= 0:
                    for k in range(T.min(PART, vocab_size - vp * PART)):
                        z[0] = penalised(
                            logits[vi, vp * PART + k], seen, vp * PART + k, horizon[vi], state
                        )
                        if is_broken(z[0]):
                            top[vi, vp] = T.infinity("float32")
                            best[vi, vp] = -1
                        elif z[0] > top[vi, vp]:
                            top[vi, vp] = z[0]
                            best[vi, vp] = T.Cast("int32", vp * PART + k)
                    for k in range(T.min(PART, vocab_size - vp * PART)):
                        z[0] = penalised(
                            logits[vi, vp * PART + k], seen, vp * PART + k, horizon[vi], state
                        )
                        if best[vi, vp] >= 0:
                            total[vi, vp] += T.exp(z[0] - top[vi, vp])

    return stamp_words(func, "softmax_parts", part=PART)


@T.macro
def _philox(words, keys, wide):
    """Ten rounds on the counter `words (4,)` with `keys (2,)`, uint32; `wide (2,)` uint64."""
    for _ in range(PHILOX_ROUNDS):
        wide[0] = T.Cast("uint64", words[0]) * T.uint64(0xD2511F53)
        wide[1] = T.Cast("uint64", words[2]) * T.uint64(0xCD9E8D57)
        words[0] = T.Cast("uint32", T.shift_right(wide[1], T.uint64(32))) ^ words[1] ^ keys[0]
        words[1] = T.Cast("uint32", wide[1])
        words[2] = T.Cast("uint32", T.shift_right(wide[0], T.uint64(32))) ^ words[3] ^ keys[1]
        words[3] = T.Cast("uint32", wide[0])
        keys[0] = keys[0] + T.uint32(0x9E3779B9)
        keys[1] = keys[1] + T.uint32(0xBB67AE85)


def _gumbel(bits):
    """-log(-log(u)) of u = ((bits >> 9) + 1/2) / 2^23, which is never 0 nor 1."""
    whole = T.Cast("float32", T.shift_right(bits, T.uint32(9)))
    return -T.log(-T.log((whole + T.float32(0.5)) * T.float32(2**-23)))


def choose(vocab_size: int) -> tirx.PrimFunc:
    """The token that every row says, its confidence and its log-probability.

    logits, logit_rows, horizon, state, seen, top, best, total as `softmax_parts` takes and gives
    them -> token `(rows,)` int32, confidence and logprob `(rows,)` float32. A row that asks for
    nothing, one with a NaN or +inf and one without a finite logit give -1, 0, 0. confidence: the
    largest softmax probability; logprob: the token's; both at temperature 1, after the penalty.

    The token of a mask row (row >= ROW_PENDING + ROW_DRAFTS), and of all rows at TEMPERATURE 0, is
    the argmax, the lowest id on ties. Others draw: y = (z - max z) / TEMPERATURE; of the TOP_K
    largest (0: all; ties are kept) the smallest set of largest y whose share of their softmax mass
    reaches TOP_P (1: all; ties are kept), then those with y >= log(MIN_P). Of these the token is
    the argmax of y + g, where g = -log(-log(u)) comes from word v % 4 of Philox4x32-10 with the
    counter (v / 4, horizon, 0, 0) and the key (SEED_LOW, SEED_HIGH).
    """
    parts = parts_of(vocab_size)

    @T.macro
    def join(top, best, total, peak, mass, token, row):
        """peak, mass: the row's maximum and Σ exp(z - peak)."""
        peak[0] = T.float32("-inf")
        mass[0] = T.float32(0)
        for p in range(parts):
            if top[row, p] > peak[0]:
                peak[0] = top[row, p]
                token[row] = best[row, p]
        if token[row] >= 0:
            for p in range(parts):
                mass[0] += total[row, p] * T.exp(top[row, p] - peak[0])

    @T.macro
    def filter_tokens(z, y, kept, sums, state):
        """kept (V,): a token stays while those above it are fewer than TOP_K, then while their mass
        has not reached TOP_P. sums: of all that TOP_K keeps, and of those above a token."""
        sums[0] = T.float32(0)
        for v in range(vocab_size):
            kept[v] = 0
            for other in range(vocab_size):
                kept[v] += T.Cast("int32", z[other] > z[v])
            kept[v] = T.Cast(
                "int32", T.Or(kept[v] < state[Word.TOP_K], state[Word.TOP_K] <= 0)
            ) * T.Cast("int32", z[v] > T.float32("-inf"))
            sums[0] += T.if_then_else(kept[v] == 1, T.exp(y[v]), T.float32(0))
        for v in range(vocab_size):
            sums[1] = T.float32(0)
            # Tokens above a kept one are kept by TOP_K; what TOP_P drops is never above one.
            for other in range(vocab_size):
                sums[1] += T.if_then_else(z[other] > z[v], T.exp(y[other]), T.float32(0))
            if _float(state, Word.TOP_P) < T.float32(1):
                if sums[1] >= _float(state, Word.TOP_P) * sums[0]:
                    kept[v] = 0
            if y[v] < T.log(_float(state, Word.MIN_P)):
                kept[v] = 0

    @T.macro
    def draw(z, y, kept, token, horizon, state, row):
        words = T.sblock_alloc_buffer((4,), "uint32")
        keys = T.sblock_alloc_buffer((2,), "uint32")
        wide = T.sblock_alloc_buffer((2,), "uint64")
        score = T.sblock_alloc_buffer((1,), "float32")
        score[0] = T.float32("-inf")
        for v in range(vocab_size):
            words[0] = T.Cast("uint32", v // 4)
            words[1] = _unsigned(horizon[row])
            words[2] = T.uint32(0)
            words[3] = T.uint32(0)
            keys[0] = _unsigned(state[Word.SEED_LOW])
            keys[1] = _unsigned(state[Word.SEED_HIGH])
            _philox(words, keys, wide)
            if kept[v] == 1 and y[v] + _gumbel(words[v % 4]) > score[0]:
                score[0] = y[v] + _gumbel(words[v % 4])
                token[row] = T.Cast("int32", v)

    @T.prim_func(private=True, s_tir=True)
    def func(
        logits_: T.handle,
        logit_rows_: T.handle,
        horizon_: T.handle,
        state: T.Buffer((STATE_WORDS,), "int32"),
        seen: T.Buffer((vocab_size,), "int32"),
        top_: T.handle,
        best_: T.handle,
        total_: T.handle,
        token_: T.handle,
        confidence_: T.handle,
        logprob_: T.handle,
    ):
        rows = T.int64()
        logits = T.match_buffer(logits_, (rows, vocab_size), "float32")
        logit_rows = T.match_buffer(logit_rows_, (rows,), "int32")
        horizon = T.match_buffer(horizon_, (rows,), "int32")
        top = T.match_buffer(top_, (rows, parts), "float32")
        best = T.match_buffer(best_, (rows, parts), "int32")
        total = T.match_buffer(total_, (rows, parts), "float32")
        token = T.match_buffer(token_, (rows,), "int32")
        confidence = T.match_buffer(confidence_, (rows,), "float32")
        logprob = T.match_buffer(logprob_, (rows,), "float32")
        for i in range(rows):
            with T.sblock("choose"):
                vi = T.axis.spatial(rows, i)
                z = T.sblock_alloc_buffer((vocab_size,), "float32")
                y = T.sblock_alloc_buffer((vocab_size,), "float32")
                kept = T.sblock_alloc_buffer((vocab_size,), "int32")
                sums = T.sblock_alloc_buffer((2,), "float32")
                peak = T.sblock_alloc_buffer((1,), "float32")
                mass = T.sblock_alloc_buffer((1,), "float32")
                token[vi] = -1
                confidence[vi] = T.float32(0)
                logprob[vi] = T.float32(0)
                if logit_rows[vi] >= 0:
                    join(top, best, total, peak, mass, token, vi)
                if token[vi] >= 0:
                    for v in range(vocab_size):
                        z[v] = penalised(logits[vi, v], seen, v, horizon[vi], state)
                        y[v] = (z[v] - peak[0]) * (T.float32(1) / _float(state, Word.TEMPERATURE))
                    if T.Cast("int32", vi) < state[Word.ROW_PENDING] + state[Word.ROW_DRAFTS]:
                        if _float(state, Word.TEMPERATURE) > T.float32(0):
                            filter_tokens(z, y, kept, sums, state)
                            draw(z, y, kept, token, horizon, state, vi)
                    confidence[vi] = T.float32(1) / mass[0]
                    logprob[vi] = z[token[vi]] - peak[0] - T.log(mass[0])

    return stamp_words(func, "choose", part=PART)
