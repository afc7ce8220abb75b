"""Low-bit weight formats and the packed layouts that the kernels read; numpy only.

A ternary weight w in {-1, 0, 1} travels as its code w + 1 in {0, 1, 2}, two bits each. Every layout
pads K to a multiple of `K_BLOCK` and N to a multiple of its row tile, with code 1 (weight 0).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

K_BLOCK = 128
ZERO_CODE = 1
# Part of the artifact's manifest: raise it whenever a layout below changes.
LAYOUT_VERSION = 1


@dataclass(frozen=True)
class Format:
    """How a matrix is quantised: bits of a code, and the weights that share one scale."""

    name: str
    bits: int
    # Weights along K that share a scale; None: one scale per original matrix.
    group: int | None


@dataclass(frozen=True)
class Layout:
    """The order of the codes in memory for one kind of target.

    `packed[tile, k_block, *block]` of `dtype` holds `row_tile` rows of `K_BLOCK` codes.
    """

    kind: str
    dtype: str
    row_tile: int
    block: tuple[int, int]


FORMATS = {"bitnet-ternary": Format("bitnet-ternary", 2, None)}

LAYOUTS = {
    "cuda": Layout("cuda", "uint32", 16, (32, 4)),
    "llvm": Layout("llvm", "uint8", 8, (8, 32)),
}


def get_layout(kind: str) -> Layout:
    """The layout of a target kind; an unknown kind is a ValueError."""
    if kind not in LAYOUTS:
        raise ValueError(f"no packed layout for target kind {kind!r}; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[kind]


def padded_k(k: int) -> int:
    """`k` rounded up to a multiple of `K_BLOCK`."""
    return -(-k // K_BLOCK) * K_BLOCK


def packed_shape(kind: str, n: int, k: int) -> tuple[int, int, int, int]:
    """Shape of an `(n, k)` matrix in the layout of `kind`."""
    layout = get_layout(kind)
    return (-(-n // layout.row_tile), padded_k(k) // K_BLOCK, *layout.block)


def packed_dtype(kind: str) -> str:
    """Element type of the layout of `kind`."""
    return get_layout(kind).dtype


def pack(codes: np.ndarray, kind: str) -> np.ndarray:
    """Codes `(N, K)` uint8 in {0, 1, 2} to `packed_shape(kind, N, K)` of `packed_dtype(kind)`.

    "cuda" is the A operand of mma m16n8k32 for four k-steps: lane l = 4g + t, word
    2 * khalf + rowhalf, byte b, bits 2s..2s+1 hold the code of row 8 * rowhalf + g,
    k = 32t + 8s + 4 * khalf + b of the tile. "llvm": word j, byte 4r + b, bits 2s..2s+1 hold the
    code of row r, k = 16j + 4s + b of the tile.

    Eight elements, one row, codes 0 1 2 0 1 1 2 0 (padding is code 1, hence the fives):
    - "cuda", lane 0: word 0 has c0..c3 in its bytes, at bits 0..1: 54 55 56 54, so 0x54565554;
      word 2 has c4..c7: 55 55 56 54, so 0x54565555; all other words are 0x55555555.
    - "llvm", word 0: byte b has c_b at bits 0..1 and c_(4+b) at bits 2..3: 54 55 5A 50; all other
      bytes are 55.

    Raises ValueError for another dtype or rank, and for a code above 2.
    """
    layout = get_layout(kind)
    tiles, blocks = packed_shape(kind, *_checked(codes).shape)[:2]
    full = _padded(codes, tiles * layout.row_tile, blocks * K_BLOCK)
    if kind == "cuda":
        # Eight consecutive codes are (khalf, b): one 64-bit word holds both halves of a k-step.
        merged = _merge(full.view("<u8").reshape(-1, blocks, 4, 4)).view("<u4")
        parts = merged.reshape(tiles, 2, 8, blocks, 4, 2)  # tile, rowhalf, g, block, t, khalf
        return np.ascontiguousarray(parts.transpose(0, 3, 2, 4, 5, 1)).reshape(tiles, blocks, 32, 4)
    merged = _merge(full.view("<u4").reshape(-1, blocks, 8, 4))
    parts = merged.reshape(tiles, 8, blocks, 8)  # tile, r, block, j
    moved = np.ascontiguousarray(parts.transpose(0, 2, 3, 1))
    return moved.view(np.uint8).reshape(tiles, blocks, 8, 32)


def unpack(packed: np.ndarray, n: int, k: int, kind: str) -> np.ndarray:
    """The inverse of `pack`: codes `(n, k)` uint8, padding cut off.

    Raises ValueError when `packed` does not have the shape and dtype of an `(n, k)` matrix.
    """
    shape, dtype = packed_shape(kind, n, k), packed_dtype(kind)
    if packed.shape != shape or packed.dtype != np.dtype(dtype):
        raise ValueError(f"expected {dtype} {shape}, got {packed.dtype} {packed.shape}")
    tiles, blocks = shape[:2]
    if kind == "cuda":
        parts = packed.reshape(tiles, blocks, 8, 4, 2, 2)  # tile, block, g, t, khalf, rowhalf
        merged = np.ascontiguousarray(parts.transpose(0, 5, 2, 1, 3, 4)).view("<u8")
    else:
        parts = np.ascontiguousarray(packed).view("<u4").reshape(tiles, blocks, 8, 8)
        merged = np.ascontiguousarray(parts.transpose(0, 3, 1, 2))  # tile, r, block, j
    codes = _split(merged).view(np.uint8)
    return np.ascontiguousarray(codes.reshape(-1, blocks * K_BLOCK)[:n, :k])


def locate(kind: str, n: Any, k: Any) -> tuple[tuple[Any, ...], Any]:
    """Where the code of weight `(n, k)` stands: index of the element, shift of its two bits.

    Plain arithmetic, so it serves integers, arrays and TVM's symbolic expressions alike.
    """
    block, rest = k // K_BLOCK, k % K_BLOCK
    if get_layout(kind).kind == "cuda":
        lane = n % 8 * 4 + rest // 32
        word = rest % 8 // 4 * 2 + n % 16 // 8
        return (n // 16, block, lane, word), k % 4 * 8 + rest % 32 // 8 * 2
    return (n // 8, block, rest // 16, n % 8 * 4 + k % 4), rest % 16 // 4 * 2


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, uint16 of the same shape: to nearest even, NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    # The carry of the rounding would turn a NaN with a full mantissa into a zero.
    quiet = ((bits >> 16) | np.uint32(0x40)).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).reshape(np.shape(x))


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Bits of bfloat16, uint16, to float32 of the same shape; exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _checked(codes: np.ndarray) -> np.ndarray:
    if codes.dtype != np.uint8 or codes.ndim != 2 or 0 in codes.shape:
        raise ValueError(f"expected a uint8 matrix of codes, got {codes.dtype} {codes.shape}")
    if codes.max() > 2:
        raise ValueError(f"codes must be 0, 1 or 2, got {codes.max()}")
    return codes


def _padded(codes: np.ndarray, rows: int, columns: int) -> np.ndarray:
    n, k = codes.shape
    if (n, k) == (rows, columns):
        return np.ascontiguousarray(codes)
    full = np.full((rows, columns), ZERO_CODE, np.uint8)
    full[:n, :k] = codes
    return full


def _merge(words: np.ndarray) -> np.ndarray:
    """Four words along the last axis to one: byte by byte, code s goes to bits 2s..2s+1."""
    merged = words[..., 0].copy()
    for s in range(1, 4):
        merged |= words[..., s] << words.dtype.type(2 * s)
    return merged


def _split(merged: np.ndarray) -> np.ndarray:
    """The inverse of `_merge`: a new last axis of four words, one code in each byte."""
    word = merged.dtype.type
    mask = word(int.from_bytes(b"\x03" * merged.dtype.itemsize, "little"))
    return np.stack([(merged >> word(2 * s)) & mask for s in range(4)], axis=-1)
