"""The decode step in numpy, on the device's own buffers: the judge of the step kernels.

`step_rows`, the model, `choose` (bitmtp_tvm/reference/choose.py) and `accept` make one step. W is
the bucket's width; `state`, `ring` and `seen` are laid out as in relax_models/state.py and changed
in place.
"""

from dataclasses import dataclass

import numpy as np

from relax_models.state import (
    MOST_ROWS,
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


@dataclass(frozen=True)
class StepRows:
    """The rows of one step.

    tokens, position, logit_rows (the row itself, -1 where nobody asks), horizon (tokens known to a
    row: the index of the one that it predicts if it is a target row): `(W,)` int32; boundary `(1,)`
    int32; visible `(W, 2)` uint32.
    """

    tokens: np.ndarray
    position: np.ndarray
    boundary: np.ndarray
    visible: np.ndarray
    logit_rows: np.ndarray
    horizon: np.ndarray


def new_state() -> tuple[np.ndarray, np.ndarray]:
    """An empty state `(STATE_WORDS,)` and ring `(3, RING)`, int32."""
    return np.zeros(STATE_WORDS, np.int32), np.zeros((RING_ROWS, RING), np.int32)


def step_rows(state: np.ndarray, width: int) -> StepRows:
    """Lay out the rows of the next step in a bucket of `width` rows; notes them in `state`.

    A finished sequence, or one whose pending tokens do not fit, gives padding rows only.
    """
    pending, drafts, masks, blocks = _fit(state, width)
    state[Word.ROW_PENDING : Word.ROW_BLOCKS + 1] = pending, drafts, masks, blocks
    boundary, known = int(state[Word.BOUNDARY]), pending + drafts
    length = boundary + pending
    tokens, position = np.zeros(width, np.int32), np.zeros(width, np.int32)
    logit_rows, horizon = np.full(width, -1, np.int32), np.zeros(width, np.int32)
    sees = np.eye(width, MOST_ROWS, dtype=bool)
    for row in range(known):
        tokens[row], position[row] = state[Word.TAIL + row], boundary + row
        horizon[row] = boundary + row + 1
        sees[row, : row + 1] = True
    for block in range(blocks):
        accepted = drafts if blocks == 1 else block
        first = known + block * masks
        for j in range(masks):
            row = first + j
            tokens[row], position[row] = state[Word.MASK_TOKEN], length + accepted + j
            horizon[row] = length + accepted
            sees[row, : pending + accepted] = True
            sees[row, first : first + (masks if state[Word.BIDIRECTIONAL] else j + 1)] = True
    if pending:
        asking = slice(pending - 1, known + blocks * masks)
        logit_rows[asking] = np.arange(width)[asking]
    return StepRows(
        tokens,
        position,
        np.array([boundary], np.int32),
        _words(sees),
        logit_rows,
        horizon,
    )


def _fit(state: np.ndarray, width: int) -> tuple[int, int, int, int]:
    """Pending rows, drafts, masks a block and blocks of the next step."""
    length, pending = int(state[Word.LENGTH]), int(state[Word.LENGTH] - state[Word.BOUNDARY])
    if state[Word.FINISH] != Finish.RUNNING or pending > width:
        return 0, 0, 0, 0
    room, left = width - pending, int(state[Word.LIMIT]) - length
    wanted, drafts = int(state[Word.MASKS]), int(state[Word.DRAFTS])
    drafts = min(drafts, int(state[Word.MOST_DRAFTS]), left - 1)
    outcomes = state[Word.LAYOUT] == Layout.OUTCOMES
    # Drafts give way before masks do: they are the cheaper ones to find again.
    if outcomes:
        drafts = min(drafts, max(0, (room - wanted) // (wanted + 1)))
    else:
        drafts = min(drafts, max(0, room - wanted))
    # A mask row proposes the token behind the one that the step is sure to commit.
    masks = min(wanted, room - drafts, left - 1 - drafts)
    if state[Word.BIDIRECTIONAL] and masks < wanted:
        masks = 0
    if masks <= 0:
        return pending, drafts, 0, 0
    return pending, drafts, masks, drafts + 1 if outcomes else 1


def _words(sees: np.ndarray) -> np.ndarray:
    bits = sees.reshape(len(sees), 2, 32).astype(np.uint64)
    return (bits << np.arange(32, dtype=np.uint64)).sum(axis=-1).astype(np.uint32)


def accept(
    state: np.ndarray,
    ring: np.ndarray,
    seen: np.ndarray,
    token: np.ndarray,
    confidence: np.ndarray,
    logprob: np.ndarray,
) -> None:
    """Commit what the step's rows say, and choose what the next step drafts.

    token `(W,)` int32 (-1: no finite logit), confidence, logprob `(W,)` float32: what `choose` gave
    for the rows that `step_rows` laid out in `state`; seen `(V,)` int32.
    """
    pending, drafts, masks, blocks = (int(w) for w in state[Word.ROW_PENDING : Word.ROW_BLOCKS + 1])
    if not pending:
        state[Word.IDLE] += 1
        return
    state[Word.FORWARDS] += 1
    _forget_drafts(state, seen)
    accepted = _count_accepted(state, token, pending, drafts)
    first = pending - 1
    for i in range(accepted + 1):
        if token[first + i] < 0:
            state[Word.FINISH] = Finish.BROKEN
            break
        kind = Kind.DRAFT if i < accepted else Kind.TARGET
        _commit(state, ring, seen, int(token[first + i]), logprob[first + i], kind)
        # What was committed last is pending; behind a stop inside the drafts all is scratch.
        state[Word.BOUNDARY], state[Word.TAIL] = state[Word.LENGTH] - 1, token[first + i]
        if int(token[first + i]) in _stop_ids(state):
            state[Word.FINISH] = Finish.STOP
        elif state[Word.LENGTH] >= state[Word.LIMIT]:
            state[Word.FINISH] = Finish.LENGTH
        if state[Word.FINISH] != Finish.RUNNING:
            break
    state[Word.DRAFTS] = 0
    if state[Word.FINISH] == Finish.RUNNING and masks and (blocks > 1 or accepted == drafts):
        base = pending + drafts + (accepted * masks if blocks > 1 else 0)
        block = slice(base, base + masks)
        _take_block(state, ring, seen, token[block], confidence[block], logprob[block])


def _penalised(state: np.ndarray) -> bool:
    """Whether anybody will look at `seen`: it is kept for a repetition penalty alone."""
    return bool(state[[Word.PENALTY]].view(np.float32)[0] != 1)


def _forget_drafts(state: np.ndarray, seen: np.ndarray) -> None:
    length, pending = int(state[Word.LENGTH]), int(state[Word.ROW_PENDING])
    for i in range(int(state[Word.DRAFTS]) if _penalised(state) else 0):
        draft = int(state[Word.TAIL + pending + i])
        if seen[draft] >= length:
            seen[draft] = NEVER


def _count_accepted(state: np.ndarray, token: np.ndarray, pending: int, drafts: int) -> int:
    for i in range(drafts):
        state[Word.EVALUATED + i] += 1
        if token[pending - 1 + i] != state[Word.TAIL + pending + i]:
            return i
        state[Word.ACCEPTED + i] += 1
    return drafts


def _stop_ids(state: np.ndarray) -> set[int]:
    return set(state[Word.STOP_IDS : Word.STOP_IDS + state[Word.STOPS]].tolist())


def _commit(
    state: np.ndarray, ring: np.ndarray, seen: np.ndarray, token: int, logprob: float, kind: Kind
) -> None:
    length = int(state[Word.LENGTH])
    column = length % RING
    ring[Ring.TOKEN, column], ring[Ring.KIND, column] = token, kind
    ring[Ring.LOGPROB, column] = np.float32(logprob).view(np.int32)
    if _penalised(state):
        seen[token] = min(int(seen[token]), length)
    state[Word.TARGET_TOKENS + kind] += 1
    state[Word.LENGTH] = length + 1


def _take_block(
    state: np.ndarray,
    ring: np.ndarray,
    seen: np.ndarray,
    token: np.ndarray,
    confidence: np.ndarray,
    logprob: np.ndarray,
) -> None:
    """Commit or draft the leading run of one valid block of mask rows, each argument `(masks,)`."""
    stops, left = _stop_ids(state), int(state[Word.LIMIT] - state[Word.LENGTH])
    chain, run = 0, 0
    threshold, draft_threshold = state[[Word.THRESHOLD, Word.DRAFT_THRESHOLD]].view(np.float32)
    usable = token >= 0
    while chain < len(token) and confidence[chain] >= threshold and usable[chain]:
        # An end token is never committed unverified.
        if int(token[chain]) in stops:
            break
        chain += 1
    while run < len(token) and confidence[run] >= draft_threshold and usable[run]:
        run += 1
        # Nothing behind a draft that ends the sequence can be of use.
        if int(token[run - 1]) in stops:
            break
    state[Word.OFFERED : Word.OFFERED + len(token)] += 1
    state[Word.PROPOSED : Word.PROPOSED + run] += 1
    state[Word.CHAINED : Word.CHAINED + chain] += 1
    mode = state[Word.MODE]
    chain = min(chain, int(state[Word.MOST_CHAIN]), left)
    if mode == Mode.CONFIDENCE or (mode == Mode.HYBRID and chain >= state[Word.MIN_CHAIN]):
        for i in range(chain):
            _commit(state, ring, seen, int(token[i]), logprob[i], Kind.UNVERIFIED)
            state[Word.TAIL + 1 + i] = token[i]
        if state[Word.LENGTH] >= state[Word.LIMIT]:
            state[Word.FINISH] = Finish.LENGTH
    elif mode in (Mode.SPECULATIVE, Mode.HYBRID):
        # One token of the limit is for the target that follows the last accepted draft.
        run = max(0, min(run, int(state[Word.MOST_DRAFTS]), left - 1))
        length = int(state[Word.LENGTH])
        for i in range(run):
            state[Word.TAIL + 1 + i] = token[i]
            if _penalised(state):
                seen[token[i]] = min(int(seen[token[i]]), length + i)
        state[Word.DRAFTS] = run
