"""The bounded head in numpy: the judge of the kernels in `relax_models.head_ops`.

R rows of activations over K columns, a table of V rows; codes, bounds, spread and floor are as
`relax_models.bounded_head` and `relax_models.head_ops` describe them. Integers, 8-bit logits and
which tokens are candidates come out to the last bit; sums in float32 have a tree of their own.
"""

from dataclasses import dataclass

import numpy as np

from bitmtp_tvm.reference.choose import penalised
from bitmtp_tvm.reference.ops import head, rms_norm
from relax_models.bounded_head import (
    ERROR,
    LEAST_ABSMAX,
    LEAST_ERROR,
    LEAST_FLOOR,
    LEAST_LENGTH,
    LENGTH,
    SCALE,
    code_error,
    most_code,
    slack,
    unpack_codes,
)
from relax_models.formats import padded_k
from relax_models.state import STATE_WORDS, Word

_HALF = 64


@dataclass(frozen=True)
class Request:
    """What the repetition penalty hangs on: see `bitmtp_tvm.reference.choose.choose`."""

    horizon: np.ndarray
    state: np.ndarray
    seen: np.ndarray


def plain_request(rows: int, vocab_size: int) -> Request:
    """One without a penalty."""
    state = np.zeros(STATE_WORDS, np.int32)
    state[Word.PENALTY] = np.float32(1).view(np.int32)
    return Request(np.zeros(rows, np.int32), state, np.zeros(vocab_size, np.int32))


def bounded_head(
    x: np.ndarray, table: np.ndarray, codes: np.ndarray, bounds: np.ndarray, request: Request
) -> np.ndarray:
    """Logits `(R, V)` float32 of x `(R, K)` float32: exact for every token that may have the
    largest score of its row, 8-bit for the others."""
    q, spread = activation_codes(x)
    logits, floor = code_head(q, spread, codes, bounds, x.shape[1], request)
    chosen = candidates(logits, spread, bounds, floor, request)
    return np.where(chosen, head(x, table), logits)


def final_norm_codes(
    x: np.ndarray, weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """normed, q, spread and floor of rows that all ask: x `(R, K)`, weight `(K,)` float32."""
    normed = rms_norm(x, weight, eps)
    return normed, *activation_codes(normed), np.full(len(x), LEAST_FLOOR, np.int32)


def activation_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q `(R, 2, padded_k(K))` int8 and spread `(R, 3)` float32 of x `(R, K)` float32."""
    rows, k = x.shape
    largest = np.maximum(np.abs(x).max(axis=1), np.float32(LEAST_ABSMAX))
    factor = np.float32(most_code(k)) / largest
    scale = largest / np.float32(most_code(k))
    with np.errstate(invalid="ignore"):
        code = np.rint(x * factor[:, None]).astype(np.int32)
    q = np.zeros((rows, 2, padded_k(k)), np.int8)
    q[:, 1, :k] = (code + _HALF) % (2 * _HALF) - _HALF
    q[:, 0, :k] = (code - q[:, 1, :k]) >> 7
    with np.errstate(over="ignore"):
        length = np.sqrt((x * x).sum(axis=1)) * np.float32(1 + 2.0**-12) + np.float32(LEAST_LENGTH)
    error = np.float32(code_error(k)) * scale + np.float32(slack(k)) * length
    return q, np.stack([scale, length, error], axis=1).astype(np.float32)


def code_head(
    q: np.ndarray,
    spread: np.ndarray,
    codes: np.ndarray,
    bounds: np.ndarray,
    k: int,
    request: Request,
) -> tuple[np.ndarray, np.ndarray]:
    """8-bit logits `(R, V)` float32 and floor `(R,)` int32 of rows that all ask."""
    vocab_size = len(request.seen)
    w8 = unpack_codes(codes, vocab_size, k).astype(np.float64)
    x8 = 2.0 * _HALF * q[:, 0, :k] + q[:, 1, :k]
    # Whole numbers below 2^53: float64 adds them up exactly.
    exact = (x8 @ w8.T).astype(np.int32).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        logits = exact * (bounds[SCALE, :vocab_size] * spread[:, :1])
        low = _scores(logits - bound(spread, bounds, vocab_size), request)
    keys = np.where(np.isfinite(low), key(low), LEAST_FLOOR)
    return logits, keys.max(axis=1).astype(np.int32)


def candidates(
    logits: np.ndarray,
    spread: np.ndarray,
    bounds: np.ndarray,
    floor: np.ndarray,
    request: Request,
) -> np.ndarray:
    """Which tokens are computed again: `(R, V)` bool."""
    with np.errstate(over="ignore", invalid="ignore"):
        high = _scores(logits + bound(spread, bounds, logits.shape[1]), request)
    return ~np.isfinite(high) | (key(high) >= floor[:, None])


def bound(spread: np.ndarray, bounds: np.ndarray, vocab_size: int) -> np.ndarray:
    """e `(R, V)` float32: fma(ERROR, length, fma(LENGTH, error, LEAST_ERROR))."""
    with np.errstate(over="ignore", invalid="ignore"):
        inner = _fma(bounds[LENGTH, :vocab_size], spread[:, 2:], np.float32(LEAST_ERROR))
        return _fma(bounds[ERROR, :vocab_size], spread[:, 1:2], inner)


def key(values: np.ndarray) -> np.ndarray:
    """int32 that order like the float32 they come from."""
    bits = np.ascontiguousarray(values, np.float32).view(np.int32)
    return np.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once, but for the rare sum that float64 rounds onto a tie of float32."""
    product = a.astype(np.float64) * b.astype(np.float64)
    return (product + np.asarray(c, np.float64)).astype(np.float32)


def _scores(values: np.ndarray, request: Request) -> np.ndarray:
    rows = [
        penalised(row, int(horizon), request.state, request.seen)
        for row, horizon in zip(values, request.horizon, strict=True)
    ]
    return np.stack(rows)
