"""The choice of a step's tokens in numpy: the judge of the kernels `softmax_parts` and `choose`.

W rows of logits over V tokens; the settings are words of the state (relax_models/state.py). Sums
are taken in float64 here: the kernels' have a tree of their own, so a token may differ where two
candidates, or the mass at the edge of `top_p`, are closer than float32 tells apart.
"""

import numpy as np

from relax_models.state import Word

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def choose(
    logits: np.ndarray,
    logit_rows: np.ndarray,
    horizon: np.ndarray,
    state: np.ndarray,
    seen: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The token that every row of a step says, its confidence and its log-probability.

    logits `(W, V)` float32, logit_rows and horizon `(W,)` int32, state `(STATE_WORDS,)` int32, seen
    `(V,)` int32 -> token `(W,)` int32, confidence and logprob `(W,)` float32. A row with logit_rows
    below 0, with a NaN or +inf, or without a finite logit gives -1, 0, 0. confidence: the largest
    softmax probability; logprob: the token's; both at temperature 1, after the penalty.
    """
    rows = len(logits)
    token = np.full(rows, -1, np.int32)
    confidence, logprob = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    targets = int(state[Word.ROW_PENDING]) + int(state[Word.ROW_DRAFTS])
    for row in np.flatnonzero(logit_rows >= 0):
        z = penalised(logits[row], horizon[row], state, seen)
        top = z.max()
        if not np.isfinite(top):  # NaN wins over every maximum.
            continue
        log_total = np.log(np.exp(z - top).sum(dtype=np.float64))
        drawn = row < targets and setting(state, Word.TEMPERATURE) > 0
        token[row] = np.argmax(scores(z, int(horizon[row]), state)) if drawn else np.argmax(z)
        confidence[row] = np.exp(-log_total)
        logprob[row] = z[token[row]] - top - log_total
    return token, confidence, logprob


def softmax_parts(
    logits: np.ndarray,
    logit_rows: np.ndarray,
    horizon: np.ndarray,
    state: np.ndarray,
    seen: np.ndarray,
    part: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximum, its token and Σ exp(z - maximum) of every `part` tokens of a row.

    Arguments as for `choose` -> top `(W, parts)` float32, best `(W, parts)` int32, total
    `(W, parts)` float32. A part with a NaN or +inf gives +inf, -1, 0; one with nothing finite gives
    -inf, -1, 0, and so does every part of a row that asks for nothing.
    """
    rows, vocab_size = logits.shape
    parts = -(-vocab_size // part)
    top = np.full((rows, parts), -np.inf, np.float32)
    best, total = np.full((rows, parts), -1, np.int32), np.zeros((rows, parts), np.float32)
    for row in np.flatnonzero(logit_rows >= 0):
        z = penalised(logits[row], horizon[row], state, seen)
        for i in range(parts):
            mine = z[i * part : (i + 1) * part]
            most = mine.max()
            top[row, i] = np.inf if np.isnan(most) else most
            if np.isfinite(most):
                best[row, i] = i * part + np.argmax(mine)
                total[row, i] = np.exp(mine - most).sum(dtype=np.float64)
    return top, best, total


def setting(state: np.ndarray, word: Word) -> np.float32:
    """A float of the state."""
    return state[[word]].view(np.float32)[0]


def penalised(logits: np.ndarray, horizon: int, state: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Logits `(V,)` float32, with the repetition penalty on tokens that stand before `horizon`."""
    penalty = setting(state, Word.PENALTY)
    if penalty == 1:
        return logits
    with np.errstate(over="ignore"):
        changed = logits * np.where(logits > 0, np.float32(1) / penalty, penalty)
    return np.where(seen < horizon, changed, logits)


def scores(z: np.ndarray, horizon: int, state: np.ndarray) -> np.ndarray:
    """What the sample at position `horizon` is the argmax of: `(V,)` float32, -inf for a token that
    a filter drops.

    z `(V,)` float32, its largest finite. y = (z - max z) / temperature, plus Gumbel noise.
    """
    y = (z - z.max()) * (np.float32(1) / setting(state, Word.TEMPERATURE))
    seed = (int(state[Word.SEED_LOW]), int(state[Word.SEED_HIGH]))
    return np.where(kept(z, y, state), y + gumbel(len(z), horizon, seed), np.float32(-np.inf))


def kept(z: np.ndarray, y: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Tokens `(V,)` bool that pass top_k, then top_p among those, then min_p; ties are kept."""
    top_k, top_p = int(state[Word.TOP_K]), setting(state, Word.TOP_P)
    ordered = np.sort(z)[::-1]
    least = ordered[top_k - 1] if 0 < top_k < len(z) else ordered[-1]
    if top_p < 1:
        ordered = ordered[ordered >= least]
        mass = np.cumsum(np.exp(np.sort(y[z >= least])[::-1]), dtype=np.float64)
        least = ordered[np.argmax(mass >= np.float64(top_p) * mass[-1])]
    with np.errstate(divide="ignore"):
        near = y >= np.log(setting(state, Word.MIN_P))
    return (z >= least) & near & (z > -np.inf)


def gumbel(vocab_size: int, horizon: int, seed: tuple[int, int]) -> np.ndarray:
    """The noise of every token at position `horizon`: `(V,)` float32, -log(-log(u)).

    seed: low and high word. Four tokens share a block of Philox; u is a multiple of 2^-24, never 0
    nor 1.
    """
    blocks = -(-vocab_size // 4)
    counter = np.zeros((blocks, 4), np.uint32)
    counter[:, 0] = np.arange(blocks)
    counter[:, 1] = horizon
    key = np.array([word & 0xFFFFFFFF for word in seed], np.uint32)
    bits = philox4x32(counter, key).reshape(-1)[:vocab_size]
    u = ((bits >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
    return -np.log(-np.log(u))


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    counter `(…, 4)` uint32, key `(2,)` uint32 -> `(…, 4)` uint32.
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    keys = [int(word) for word in key]
    first, second = (np.uint64(multiplier) for multiplier in _MULTIPLIERS)
    for turn in range(_ROUNDS):
        k0, k1 = (
            np.uint64((word + turn * step) & 0xFFFFFFFF)
            for word, step in zip(keys, _KEY_STEPS, strict=True)
        )
        a, b = c0 * first, c2 * second
        c0, c1, c2, c3 = (b >> _HALF) ^ c1 ^ k0, b & _LOW, (a >> _HALF) ^ c3 ^ k1, a & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)
