"""The two ends of a decode step as TensorIR: the rows that it runs, and what becomes of them.

Both work on the state of `relax_models.state`, in place, and are stamped like the operations of
`relax_models.ops`. Between them stand the model and `relax_models.choose_ops`. Their numpy twin is
the definition that people read: bitmtp_tvm/reference/step.py.
"""

from tvm import tirx
from tvm.script import tirx as T

from relax_models.ops import stamp
from relax_models.state import (
    MOST_STOPS,
    NEVER,
    RING,
    RING_ROWS,
    STATE_WORDS,
    Finish,
    Kind,
    Layout,
    Mode,
    Ring,
    Word,
)

ONE = 0x3F800000
"""The bits of 1.0, a penalty that changes nothing."""


def _float(state, word):
    return T.reinterpret("float32", state[word])


def _word_of_first(count, word):
    """Word `word` of 64 bits of which the first `count` are set: uint32."""
    bits = T.min(T.max(count - 32 * word, 0), 32)
    # In 64 bits, where a shift by 32 is defined.
    return T.Cast("uint32", T.shift_left(T.int64(1), T.Cast("int64", bits)) - T.int64(1))


def _word_between(first, end, word):
    """Word `word` of 64 bits of which those from `first` up to `end` are set: uint32."""
    return T.bitwise_xor(_word_of_first(end, word), _word_of_first(first, word))


@T.macro
def _fit(state, fit, width):
    """fit = (pending rows, drafts, masks a block, blocks) of the next step; see `step._fit`."""
    fit[0] = state[Word.LENGTH] - state[Word.BOUNDARY]
    fit[1] = 0
    fit[2] = 0
    fit[3] = 0
    if state[Word.FINISH] != Finish.RUNNING or fit[0] > width:
        fit[0] = 0
    else:
        fit[1] = T.min(
            T.min(state[Word.DRAFTS], state[Word.MOST_DRAFTS]),
            state[Word.LIMIT] - state[Word.LENGTH] - 1,
        )
        # Drafts give way before masks do: they are the cheaper ones to find again.
        fit[2] = width - fit[0] - state[Word.MASKS]
        if state[Word.LAYOUT] == Layout.OUTCOMES:
            fit[2] = T.truncdiv(fit[2], state[Word.MASKS] + 1)
        fit[1] = T.min(fit[1], T.max(fit[2], 0))
        fit[2] = T.min(
            T.min(state[Word.MASKS], width - fit[0] - fit[1]),
            state[Word.LIMIT] - state[Word.LENGTH] - 1 - fit[1],
        )
        if state[Word.BIDIRECTIONAL] != 0 and fit[2] < state[Word.MASKS]:
            fit[2] = 0
        if fit[2] > 0:
            fit[3] = T.Select(state[Word.LAYOUT] == Layout.OUTCOMES, fit[1] + 1, 1)
        else:
            fit[2] = 0


def step_rows() -> tirx.PrimFunc:
    """Lay out the rows of the next step; the numbers of rows by kind go into the state.

    state `(STATE_WORDS,)` int32, in place -> tokens, position `(width,)` int32, boundary `(1,)`
    int32, visible `(width, 2)` uint32, as the model takes them, logit_rows `(width,)` int32 (the
    row itself, or -1), horizon `(width,)` int32 (tokens known to a row). A sequence that has
    finished, or whose pending tokens do not fit, gives padding only.
    """

    @T.prim_func(private=True, s_tir=True)
    def func(
        state: T.Buffer((STATE_WORDS,), "int32"),
        tokens_: T.handle,
        position_: T.handle,
        boundary: T.Buffer((1,), "int32"),
        visible_: T.handle,
        logit_rows_: T.handle,
        horizon_: T.handle,
    ):
        width = T.int64()
        tokens = T.match_buffer(tokens_, (width,), "int32")
        position = T.match_buffer(position_, (width,), "int32")
        visible = T.match_buffer(visible_, (width, 2), "uint32")
        logit_rows = T.match_buffer(logit_rows_, (width,), "int32")
        horizon = T.match_buffer(horizon_, (width,), "int32")
        for i in range(width):
            with T.sblock("rows"):
                vi = T.axis.spatial(width, i)
                T.reads(state[0:STATE_WORDS])
                T.writes(
                    state[Word.ROW_PENDING : Word.ROW_PENDING + 4],
                    tokens[vi],
                    position[vi],
                    boundary[0],
                    visible[vi, 0:2],
                    logit_rows[vi],
                    horizon[vi],
                )
                fit = T.sblock_alloc_buffer((4,), "int32", scope="local")
                # Of a mask row: its place in its block, the block's first row, drafts before it.
                at = T.sblock_alloc_buffer((4,), "int32", scope="local")
                _fit(state, fit, T.Cast("int32", width))
                at[3] = T.Cast("int32", vi)
                if vi == 0:
                    boundary[0] = state[Word.BOUNDARY]
                    for k in T.unroll(4):
                        state[Word.ROW_PENDING + k] = fit[k]
                if at[3] < fit[0] + fit[1]:
                    tokens[vi] = state[Word.TAIL + at[3]]
                    position[vi] = state[Word.BOUNDARY] + at[3]
                    horizon[vi] = state[Word.BOUNDARY] + at[3] + 1
                    for k in T.unroll(2):
                        visible[vi, k] = _word_of_first(at[3] + 1, k)
                elif at[3] < fit[0] + fit[1] + fit[2] * fit[3]:
                    at[0] = T.truncmod(at[3] - fit[0] - fit[1], fit[2])
                    at[1] = at[3] - at[0]
                    at[2] = fit[1]
                    if fit[3] > 1:
                        at[2] = T.truncdiv(at[3] - fit[0] - fit[1], fit[2])
                    tokens[vi] = state[Word.MASK_TOKEN]
                    position[vi] = state[Word.LENGTH] + at[2] + at[0]
                    horizon[vi] = state[Word.LENGTH] + at[2]
                    if state[Word.BIDIRECTIONAL] != 0:
                        at[0] = fit[2] - 1
                    for k in T.unroll(2):
                        visible[vi, k] = T.bitwise_or(
                            _word_of_first(fit[0] + at[2], k),
                            _word_between(at[1], at[1] + at[0] + 1, k),
                        )
                else:
                    tokens[vi] = 0
                    position[vi] = 0
                    horizon[vi] = 0
                    for k in T.unroll(2):
                        visible[vi, k] = _word_between(at[3], at[3] + 1, k)
                logit_rows[vi] = -1
                if fit[0] > 0 and at[3] >= fit[0] - 1 and at[3] < fit[0] + fit[1] + fit[2] * fit[3]:
                    logit_rows[vi] = at[3]

    return stamp(func, "step_rows")


@T.macro
def _find_stop(state, token, found):
    """found[0] = 1 if `token` is an end token, else 0."""
    found[0] = 0
    for k in range(MOST_STOPS):
        if k < state[Word.STOPS] and state[Word.STOP_IDS + k] == token:
            found[0] = 1


@T.macro
def _see(state, seen, token, place):
    """Note that `token` stands at `place`, if a repetition penalty will ask."""
    if state[Word.PENALTY] != ONE:
        seen[token] = T.min(seen[token], place)


@T.macro
def _commit(state, ring, seen, token, logprob, kind):
    ring[Ring.TOKEN, T.truncmod(state[Word.LENGTH], RING)] = token
    ring[Ring.LOGPROB, T.truncmod(state[Word.LENGTH], RING)] = T.reinterpret("int32", logprob)
    ring[Ring.KIND, T.truncmod(state[Word.LENGTH], RING)] = kind
    _see(state, seen, token, state[Word.LENGTH])
    state[Word.TARGET_TOKENS + kind] = state[Word.TARGET_TOKENS + kind] + 1
    state[Word.LENGTH] = state[Word.LENGTH] + 1


@T.macro
def _forget_drafts(state, seen, fit, i, drafts):
    """Take the drafts that wait out of `seen` again."""
    if state[Word.PENALTY] != ONE:
        i[0] = 0
        drafts[0] = state[Word.DRAFTS]
        while i[0] < drafts[0]:
            if seen[state[Word.TAIL + fit[0] + i[0]]] >= state[Word.LENGTH]:
                seen[state[Word.TAIL + fit[0] + i[0]]] = NEVER
            i[0] = i[0] + 1


@T.macro
def _count_accepted(state, token, fit, accepted, going):
    """accepted[0] = leading drafts that equal their targets; the counters follow."""
    accepted[0] = 0
    going[0] = 1
    while going[0] == 1 and accepted[0] < fit[1]:
        state[Word.EVALUATED + accepted[0]] = state[Word.EVALUATED + accepted[0]] + 1
        if token[fit[0] - 1 + accepted[0]] == state[Word.TAIL + fit[0] + accepted[0]]:
            state[Word.ACCEPTED + accepted[0]] = state[Word.ACCEPTED + accepted[0]] + 1
            accepted[0] = accepted[0] + 1
        else:
            going[0] = 0


@T.macro
def _commit_verified(state, ring, seen, token, logprob, fit, accepted, i, going, found):
    """Commit the accepted drafts and the target behind them, up to a stop."""
    i[0] = 0
    going[0] = 1
    while going[0] == 1 and i[0] <= accepted[0]:
        if token[fit[0] - 1 + i[0]] < 0:
            state[Word.FINISH] = Finish.BROKEN
        else:
            _commit(
                state,
                ring,
                seen,
                token[fit[0] - 1 + i[0]],
                logprob[fit[0] - 1 + i[0]],
                T.Select(i[0] < accepted[0], int(Kind.DRAFT), int(Kind.TARGET)),
            )
            # What was committed last is pending; behind a stop inside the drafts all is scratch.
            state[Word.BOUNDARY] = state[Word.LENGTH] - 1
            state[Word.TAIL] = token[fit[0] - 1 + i[0]]
            _find_stop(state, token[fit[0] - 1 + i[0]], found)
            if found[0] == 1:
                state[Word.FINISH] = Finish.STOP
            elif state[Word.LENGTH] >= state[Word.LIMIT]:
                state[Word.FINISH] = Finish.LENGTH
        if state[Word.FINISH] != Finish.RUNNING:
            going[0] = 0
        i[0] = i[0] + 1


@T.macro
def _leading_run(state, token, confidence, masks, base, least, run, going, found, past_end):
    """run[0] = leading mask rows with `confidence` of at least `least`; it ends in front of an end
    token, or behind it with `past_end`."""
    run[0] = 0
    going[0] = 1
    while going[0] == 1 and run[0] < masks:
        if confidence[base + run[0]] >= least and token[base + run[0]] >= 0:
            _find_stop(state, token[base + run[0]], found)
            if found[0] == 1:
                going[0] = 0
                run[0] = run[0] + past_end
            else:
                run[0] = run[0] + 1
        else:
            going[0] = 0


@T.macro
def _count_run(state, first, run, i):
    """Add one to the first `run` counters from word `first` on."""
    i[0] = 0
    while i[0] < run:
        state[first + i[0]] = state[first + i[0]] + 1
        i[0] = i[0] + 1


@T.macro
def _take_block(state, ring, seen, token, confidence, logprob, masks, base, chain, run, i, found):
    """Commit or draft the leading run of the valid block of mask rows from row `base` on."""
    _leading_run(
        state, token, confidence, masks, base, _float(state, Word.THRESHOLD), chain, i, found, 0
    )
    _leading_run(
        state,
        token,
        confidence,
        masks,
        base,
        _float(state, Word.DRAFT_THRESHOLD),
        run,
        i,
        found,
        1,
    )
    _count_run(state, Word.OFFERED, masks, i)
    _count_run(state, Word.PROPOSED, run[0], i)
    _count_run(state, Word.CHAINED, chain[0], i)
    chain[0] = T.min(
        T.min(chain[0], state[Word.MOST_CHAIN]), state[Word.LIMIT] - state[Word.LENGTH]
    )
    if state[Word.MODE] == Mode.CONFIDENCE or (
        state[Word.MODE] == Mode.HYBRID and chain[0] >= state[Word.MIN_CHAIN]
    ):
        i[0] = 0
        while i[0] < chain[0]:
            _commit(
                state, ring, seen, token[base + i[0]], logprob[base + i[0]], int(Kind.UNVERIFIED)
            )
            state[Word.TAIL + 1 + i[0]] = token[base + i[0]]
            i[0] = i[0] + 1
        if state[Word.LENGTH] >= state[Word.LIMIT]:
            state[Word.FINISH] = Finish.LENGTH
    elif state[Word.MODE] == Mode.SPECULATIVE or state[Word.MODE] == Mode.HYBRID:
        # One token of the limit is for the target that follows the last accepted draft.
        run[0] = T.min(
            T.min(run[0], state[Word.MOST_DRAFTS]), state[Word.LIMIT] - state[Word.LENGTH] - 1
        )
        i[0] = 0
        while i[0] < run[0]:
            state[Word.TAIL + 1 + i[0]] = token[base + i[0]]
            _see(state, seen, token[base + i[0]], state[Word.LENGTH] + i[0])
            i[0] = i[0] + 1
        state[Word.DRAFTS] = T.max(run[0], 0)


def accept(vocab_size: int) -> tirx.PrimFunc:
    """Commit what the rows of a step say, and choose what the next one drafts.

    token `(rows,)` int32 (-1: no finite logit), confidence, logprob `(rows,)` float32 of the rows
    that `step_rows` laid out; state `(STATE_WORDS,)`, ring `(3, RING)`, seen `(vocab_size,)` int32,
    all three in place.
    """

    @T.prim_func(private=True, s_tir=True)
    def func(
        token_: T.handle,
        confidence_: T.handle,
        logprob_: T.handle,
        state: T.Buffer((STATE_WORDS,), "int32"),
        ring: T.Buffer((RING_ROWS, RING), "int32"),
        seen: T.Buffer((vocab_size,), "int32"),
    ):
        rows = T.int64()
        token = T.match_buffer(token_, (rows,), "int32")
        confidence = T.match_buffer(confidence_, (rows,), "float32")
        logprob = T.match_buffer(logprob_, (rows,), "float32")
        for t in range(1):
            with T.sblock("accept"):
                _ = T.axis.spatial(1, t)
                T.reads(
                    token[0:rows],
                    confidence[0:rows],
                    logprob[0:rows],
                    state[0:STATE_WORDS],
                    seen[0:vocab_size],
                )
                T.writes(state[0:STATE_WORDS], ring[0:RING_ROWS, 0:RING], seen[0:vocab_size])
                # Rows by kind, as `step_rows` noted them.
                fit = T.sblock_alloc_buffer((4,), "int32", scope="local")
                accepted = T.sblock_alloc_buffer((1,), "int32", scope="local")
                base = T.sblock_alloc_buffer((1,), "int32", scope="local")
                i = T.sblock_alloc_buffer((1,), "int32", scope="local")
                found = T.sblock_alloc_buffer((1,), "int32", scope="local")
                chain = T.sblock_alloc_buffer((1,), "int32", scope="local")
                run = T.sblock_alloc_buffer((1,), "int32", scope="local")
                for w in T.unroll(4):
                    fit[w] = state[Word.ROW_PENDING + w]
                if fit[0] == 0:
                    state[Word.IDLE] = state[Word.IDLE] + 1
                else:
                    state[Word.FORWARDS] = state[Word.FORWARDS] + 1
                    _forget_drafts(state, seen, fit, i, run)
                    _count_accepted(state, token, fit, accepted, i)
                    _commit_verified(
                        state, ring, seen, token, logprob, fit, accepted, i, run, found
                    )
                    state[Word.DRAFTS] = 0
                    if (
                        state[Word.FINISH] == Finish.RUNNING
                        and fit[2] > 0
                        and (fit[3] > 1 or accepted[0] == fit[1])
                    ):
                        base[0] = fit[0] + fit[1]
                        if fit[3] > 1:
                            base[0] = base[0] + accepted[0] * fit[2]
                        _take_block(
                            state,
                            ring,
                            seen,
                            token,
                            confidence,
                            logprob,
                            fit[2],
                            base[0],
                            chain,
                            run,
                            i,
                            found,
                        )

    return stamp(func, "accept")


def running() -> tirx.PrimFunc:
    """Whether a sequence may still grow: state `(STATE_WORDS,)` int32 -> a bool of no dimension."""

    @T.prim_func(private=True, s_tir=True)
    def func(state: T.Buffer((STATE_WORDS,), "int32"), answer: T.Buffer((), "bool")):
        with T.sblock("running"):
            answer[()] = state[Word.FINISH] == Finish.RUNNING

    return stamp(func, "running")
