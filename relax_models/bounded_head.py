"""The 8-bit copy of an output table, and what bounds the error of its logits; numpy only.

A large table is streamed as int8, half its bytes, for logits that are nearly right; the few that
could be the largest are computed again from bfloat16 (`relax_models.head_ops`). So the argmax is
exact. Row n of the table, w, is stored as w8 = rint(w / s), with s = max |w| / 127; activations x
travel as q = rint(x / t), with t = max |x| / `most_code(K)`.
"""

import math

import numpy as np

from relax_models.formats import K_BLOCK, bf16_to_float32, padded_k

ROW_TILE = 16
STEPS = 4
LEAST_ELEMENTS = 1 << 25
"""From so many elements on a table has an 8-bit copy: below, its logits take a few microseconds,
and the copy saves less than its kernels cost."""

CODE = 127
LOW_CODES = 128
"""An activation's code is `LOW_CODES` times one int8, plus another one in [-64, 64)."""
_MOST_CODE = LOW_CODES * CODE - LOW_CODES // 2

SCALE, ERROR, LENGTH = range(3)
"""Rows of the bounds: s, |w - s * w8| and |s * w8|, the lengths rounded up."""

LEAST_FLOOR = -(2**31)
"""The floor of a row before any of its logits is known: a key below those of all floats."""

LEAST_ABSMAX = 1e-30
LEAST_LENGTH = 2.0**-60
LEAST_ERROR = 2.0**-90
"""Least scale, length and bound: above all that underflows in `relax_models.head_ops`."""

# What the lengths are rounded up by, and to: more than any rounding in the kernels that use them.
_UP, _LEAST = 1 + 2.0**-12, 2.0**-100
_ROWS_AT_ONCE = 4096


def pays(kind: str, vocab_size: int, size: int) -> bool:
    """Whether a `(vocab_size, size)` table has an 8-bit copy on targets of `kind`."""
    return kind == "cuda" and vocab_size * size >= LEAST_ELEMENTS


def codes_shape(n: int, k: int) -> tuple[int, int, int, int, int]:
    """Shape of the packed codes, uint32, of an `(n, k)` table."""
    return (-(-n // ROW_TILE), padded_k(k) // K_BLOCK, STEPS, 32, 4)


def bounds_shape(n: int) -> tuple[int, int]:
    """Shape of the bounds, float32, of a table of `n` rows: padding rows hold zeros."""
    return (3, -(-n // ROW_TILE) * ROW_TILE)


def most_code(k: int) -> int:
    """The largest code of an activation: sums over k of codes fit int32."""
    return min(_MOST_CODE, (2**31 - 1) // (CODE * k))


def code_error(k: int) -> float:
    """|x - t * q| of a row of k activations is at most this times t.

    A code is off by a half, and by the rounding of x * (1 / t), which is below 0.005 of a code.
    """
    return 0.506 * math.sqrt(k)


def slack(k: int) -> float:
    """What float32 may add to a logit's error, as a share of |x| * |s * w8|.

    Rescoring adds k / 32 products in a lane, eight of each 256, and then 32 lanes; the 8-bit logit
    is rounded three times.
    """
    return (8 * -(-k // 256) + 16) * 2.0**-24


def pack_codes(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8-bit copy of a table `(N, K)` uint16 (bfloat16 bits): codes and bounds.

    Codes `codes_shape(N, K)` uint32 are A operands of mma m16n8k32: of tile, block of 128 columns
    and step s, lane l = 4g + t, word 2 * khalf + rowhalf, byte b hold the code of row
    8 * rowhalf + g, column 32t + 8s + 4 * khalf + b. Padding is 0. Bounds `bounds_shape(N)`: see
    `SCALE`. A row that is not finite has codes and scale 0 and infinite lengths.

    One row of eight, 127 -127 1 2 64 0 0 -1 (s = 1): lane 0 of step 0 has 7F 81 01 02 in word 0, so
    0x0201817F, and 40 00 00 FF in word 2, so 0xFF000040; all other words are 0. |w - s * w8| is 0,
    and |s * w8| is sqrt(36360).

    Raises ValueError for another dtype or rank.
    """
    if table.dtype != np.uint16 or table.ndim != 2 or 0 in table.shape:
        raise ValueError(f"expected a uint16 table, got {table.dtype} {table.shape}")
    n, k = table.shape
    codes = np.zeros(codes_shape(n, k), np.uint32)
    bounds = np.zeros(bounds_shape(n), np.float32)
    tiles = _ROWS_AT_ONCE // ROW_TILE
    for i in range(-(-n // _ROWS_AT_ONCE)):
        rows = slice(i * _ROWS_AT_ONCE, min((i + 1) * _ROWS_AT_ONCE, n))
        part, bounds[:, rows] = _quantize(bf16_to_float32(table[rows]))
        codes[i * tiles : (i + 1) * tiles] = _pack_rows(part)
    return codes, bounds


def unpack_codes(codes: np.ndarray, n: int, k: int) -> np.ndarray:
    """The int8 codes `(n, k)` that `pack_codes` has packed.

    Raises ValueError when `codes` does not have the shape and dtype of an `(n, k)` table.
    """
    shape = codes_shape(n, k)
    if codes.shape != shape or codes.dtype != np.uint32:
        raise ValueError(f"expected uint32 {shape}, got {codes.dtype} {codes.shape}")
    tiles, blocks = shape[:2]
    # Tile, block, s, g, t, khalf, rowhalf.
    parts = codes.reshape(tiles, blocks, STEPS, 8, 4, 2, 2).transpose(0, 6, 3, 1, 4, 2, 5)
    return np.ascontiguousarray(parts).view(np.int8).reshape(-1, blocks * K_BLOCK)[:n, :k].copy()


def _quantize(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 and bounds `(3, rows)` float32 of rows of a table, float32."""
    largest = np.abs(w).max(axis=1)
    finite = np.isfinite(largest)
    w = np.where(finite[:, None], w, np.float32(0))
    scale = np.where(finite, largest, np.float32(0)) / np.float32(CODE)
    wide = w.astype(np.float64)
    steps = np.where(scale > 0, scale, 1).astype(np.float64)[:, None]
    w8 = np.clip(np.rint(wide / steps), -CODE, CODE)
    # A scale too small for float32 is 0, and then the rows' own lengths are the errors.
    wide -= w8 * scale.astype(np.float64)[:, None]
    lengths = [np.sqrt(np.einsum("ij,ij->i", wide, wide)), np.sqrt(np.einsum("ij,ij->i", w8, w8))]
    lengths[1] *= scale
    bounds = [
        np.where(finite, length * _UP + _LEAST, np.inf).astype(np.float32) for length in lengths
    ]
    return w8.astype(np.int8), np.stack([scale, *bounds])


def _pack_rows(w8: np.ndarray) -> np.ndarray:
    n, k = w8.shape
    tiles, blocks = codes_shape(n, k)[:2]
    full = np.zeros((tiles * ROW_TILE, blocks * K_BLOCK), np.int8)
    full[:n, :k] = w8
    # Tile, rowhalf, g, block, t, s, khalf.
    parts = full.view("<u4").reshape(tiles, 2, 8, blocks, 4, STEPS, 2)
    return parts.transpose(0, 3, 5, 2, 4, 6, 1).reshape(tiles, blocks, STEPS, 32, 4)
