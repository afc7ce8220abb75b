"""Low-bit weight formats and the packed layouts that the kernels read; numpy only.

A weight travels as its code: ternary w in {-1, 0, 1} as w + 1 in {0, 1, 2}, two bits each; binary
w in {-1, 1} as (w + 1) / 2 in {0, 1}, one bit each. Every layout pads K to a multiple of `K_BLOCK`
and N to a multiple of its row tile, with code 1 (ternary, weight 0) or 0 (binary, under scale 0).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

K_BLOCK = 128
# The code of the padding, by the bits of a code.
PADDING_CODE = {2: 1, 1: 0}
# A multiple of every row tile.
_ROWS_AT_ONCE = 4096
# Part of the artifact's manifest: raise it whenever a layout below, or that of
# relax_models/bounded_head.py, changes.
LAYOUT_VERSION = 2


@dataclass(frozen=True)
class Format:
    """How a matrix is quantised: bits of a code, and the weights that share one scale."""

    name: str
    bits: int
    # Weights along K that share a scale; None: one scale per original matrix.
    group: int | None


@dataclass(frozen=True)
class Layout:
    """The order of the codes in memory for one kind of target and one size of code.

    `packed[tile, k_block, *block]` of `dtype` holds `row_tile` rows of `K_BLOCK` codes; the group
    scales of those rows stand at `scales[tile, k_block, row_in_tile]`, float16.
    """

    kind: str
    bits: int
    dtype: str
    row_tile: int
    block: tuple[int, int]


FORMATS = {
    "bitnet-ternary": Format("bitnet-ternary", 2, None),
    "ternary-g128": Format("ternary-g128", 2, K_BLOCK),
    "binary-g128": Format("binary-g128", 1, K_BLOCK),
}

KINDS = ("cuda", "llvm")
LAYOUTS = {
    ("cuda", 2): Layout("cuda", 2, "uint32", 16, (32, 4)),
    ("llvm", 2): Layout("llvm", 2, "uint8", 8, (8, 32)),
    ("cuda", 1): Layout("cuda", 1, "uint32", 32, (32, 4)),
    ("llvm", 1): Layout("llvm", 1, "uint8", 8, (4, 32)),
}


def get_format(name: str) -> Format:
    """The format of a name; an unknown name is a ValueError."""
    if name not in FORMATS:
        raise ValueError(f"no low-bit format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def get_layout(kind: str, bits: int = 2) -> Layout:
    """The layout of codes of `bits` bits for a target kind; an unknown one is a ValueError."""
    if kind not in KINDS:
        raise ValueError(f"no packed layout for target kind {kind!r}; known: {', '.join(KINDS)}")
    if (kind, bits) not in LAYOUTS:
        raise ValueError(f"no packed layout for codes of {bits} bits; known: 1, 2")
    return LAYOUTS[kind, bits]


def padded_k(k: int) -> int:
    """`k` rounded up to a multiple of `K_BLOCK`."""
    return -(-k // K_BLOCK) * K_BLOCK


def row_tile(kind: str, bits: int = 2) -> int:
    """Rows of one tile in the layout of `kind`."""
    return get_layout(kind, bits).row_tile


def packed_shape(kind: str, n: int, k: int, bits: int = 2) -> tuple[int, int, int, int]:
    """Shape of an `(n, k)` matrix in the layout of `kind`."""
    layout = get_layout(kind, bits)
    return (-(-n // layout.row_tile), padded_k(k) // K_BLOCK, *layout.block)


def packed_dtype(kind: str) -> str:
    """Element type of the layouts of `kind`."""
    return get_layout(kind).dtype


def scales_shape(kind: str, n: int, k: int, bits: int = 2) -> tuple[int, int, int]:
    """Shape of the group scales of an `(n, k)` matrix: (tiles, groups, rows of a tile)."""
    tile = row_tile(kind, bits)
    return (-(-n // tile), padded_k(k) // K_BLOCK, tile)


def pack(codes: np.ndarray, kind: str, bits: int = 2) -> np.ndarray:
    """Codes `(N, K)` uint8 to `packed_shape(kind, N, K, bits)` of `packed_dtype(kind)`.

    Two bits. "cuda" is the A operand of mma m16n8k32 for four k-steps: lane l = 4g + t, word
    2 * khalf + rowhalf, byte b, bits 2s..2s+1 hold the code of row 8 * rowhalf + g,
    k = 32t + 8s + 4 * khalf + b of the tile. "llvm": word j, byte 4r + b, bits 2s..2s+1 hold the
    code of row r, k = 16j + 4s + b of the tile.

    One bit. "cuda": lane l = 4g + t, word i, byte b, bit 2s + khalf holds the code of row 8i + g,
    k = 32t + 8s + 4 * khalf + b of the tile. "llvm": word j, byte 4r + b, bit s holds the code of
    row r, k = 32j + 4s + b of the tile.

    Eight elements, one row, codes 0 1 2 0 1 1 2 0 (padding is code 1, hence the fives):
    - "cuda", lane 0: word 0 has c0..c3 in its bytes, at bits 0..1: 54 55 56 54, so 0x54565554;
      word 2 has c4..c7: 55 55 56 54, so 0x54565555; all other words are 0x55555555.
    - "llvm", word 0: byte b has c_b at bits 0..1 and c_(4+b) at bits 2..3: 54 55 5A 50; all other
      bytes are 55.
    And one-bit codes 0 1 1 0 1 1 0 0 (padding is code 0): byte b has c_b at bit 0 and c_(4+b) at
    bit 1, so the bytes are 02 03 01 00, all others 00.
    - "cuda", lane 0, word 0 is 0x00010302; "llvm", word 0, bytes 0..3 are 02 03 01 00.

    Raises ValueError for another dtype or rank, and for a code above 2 (two bits) or 1 (one bit).
    """
    n, k = _checked(codes, bits).shape
    packed = np.empty(packed_shape(kind, n, k, bits), packed_dtype(kind))
    # Block by block: the temporaries of a large embedding would be larger than the result.
    tiles = _ROWS_AT_ONCE // row_tile(kind, bits)
    for i in range(-(-n // _ROWS_AT_ONCE)):
        rows = codes[i * _ROWS_AT_ONCE : (i + 1) * _ROWS_AT_ONCE]
        packed[i * tiles : (i + 1) * tiles] = _pack_rows(rows, kind, bits)
    return packed


def _pack_rows(codes: np.ndarray, kind: str, bits: int) -> np.ndarray:
    n, k = codes.shape
    tiles, blocks = packed_shape(kind, n, k, bits)[:2]
    layout = get_layout(kind, bits)
    full = _padded(codes, tiles * layout.row_tile, blocks * K_BLOCK, PADDING_CODE[bits])
    if (kind, bits) == ("cuda", 2):
        # Eight consecutive codes are (khalf, b): one 64-bit word holds both halves of a k-step.
        merged = _merge(full.view("<u8").reshape(-1, blocks, 4, 4), bits).view("<u4")
        parts = merged.reshape(tiles, 2, 8, blocks, 4, 2)  # tile, rowhalf, g, block, t, khalf
        return parts.transpose(0, 3, 2, 4, 5, 1).reshape(tiles, blocks, 32, 4)
    words = layout.block[0] if kind == "llvm" else 4
    merged = _merge(full.view("<u4").reshape(-1, blocks, words, 8 // bits), bits)
    if kind == "cuda":
        parts = merged.reshape(tiles, 4, 8, blocks, 4)  # tile, i, g, block, t
        return parts.transpose(0, 3, 2, 4, 1).reshape(tiles, blocks, 32, 4)
    parts = merged.reshape(tiles, 8, blocks, words)  # tile, r, block, j
    moved = np.ascontiguousarray(parts.transpose(0, 2, 3, 1))
    return moved.view(np.uint8).reshape(tiles, blocks, words, 32)


def unpack(packed: np.ndarray, n: int, k: int, kind: str, bits: int = 2) -> np.ndarray:
    """The inverse of `pack`: codes `(n, k)` uint8, padding cut off.

    Raises ValueError when `packed` does not have the shape and dtype of an `(n, k)` matrix.
    """
    shape = packed_shape(kind, n, k, bits)
    _check_array(packed, shape, packed_dtype(kind))
    tiles, blocks = shape[:2]
    if (kind, bits) == ("cuda", 2):
        parts = packed.reshape(tiles, blocks, 8, 4, 2, 2)  # tile, block, g, t, khalf, rowhalf
        merged = np.ascontiguousarray(parts.transpose(0, 5, 2, 1, 3, 4)).view("<u8")
    elif kind == "cuda":
        parts = packed.reshape(tiles, blocks, 8, 4, 4)  # tile, block, g, t, i
        merged = np.ascontiguousarray(parts.transpose(0, 4, 2, 1, 3))
    else:
        parts = np.ascontiguousarray(packed).view("<u4").reshape(tiles, blocks, -1, 8)
        merged = np.ascontiguousarray(parts.transpose(0, 3, 1, 2))  # tile, r, block, j
    codes = _split(merged, bits).view(np.uint8)
    return np.ascontiguousarray(codes.reshape(-1, blocks * K_BLOCK)[:n, :k])


def pack_scales(scales: np.ndarray, kind: str, bits: int = 2) -> np.ndarray:
    """Group scales `(N, groups)` float16 to `scales_shape` of the layout; padding rows get 0.

    The scale of row n, group g stands at [n // tile, g, n % tile]. With a tile of 8 and two groups,
    N = 3, scales 1 2 / 3 4 / 5 6: 1 3 5 0 0 0 0 0, then 2 4 6 0 0 0 0 0.

    Raises ValueError for another dtype or rank.
    """
    if scales.dtype != np.float16 or scales.ndim != 2:
        raise ValueError(f"expected a float16 matrix of scales, got {scales.dtype} {scales.shape}")
    n, groups = scales.shape
    shape = scales_shape(kind, n, groups * K_BLOCK, bits)
    full = np.zeros((shape[0] * shape[2], groups), np.float16)
    full[:n] = scales
    return np.ascontiguousarray(full.reshape(shape[0], shape[2], groups).transpose(0, 2, 1))


def unpack_scales(packed: np.ndarray, n: int, k: int, kind: str, bits: int = 2) -> np.ndarray:
    """The inverse of `pack_scales` for an `(n, k)` matrix: `(n, padded_k(k) / K_BLOCK)` float16.

    Raises ValueError when `packed` does not have the shape and dtype of its scales.
    """
    shape = scales_shape(kind, n, k, bits)
    _check_array(packed, shape, "float16")
    return np.ascontiguousarray(packed.transpose(0, 2, 1).reshape(-1, shape[1])[:n])


def locate(kind: str, n: Any, k: Any, bits: int = 2) -> tuple[tuple[Any, ...], Any]:
    """Where the code of weight `(n, k)` stands: index of the element, shift of its lowest bit.

    Plain arithmetic, so it serves integers, arrays and TVM's symbolic expressions alike.
    """
    layout = get_layout(kind, bits)
    tile, block, rest = n // layout.row_tile, k // K_BLOCK, k % K_BLOCK
    if kind == "cuda":
        lane = n % 8 * 4 + rest // 32
        if bits == 1:
            return (tile, block, lane, n % 32 // 8), k % 4 * 8 + rest % 32 // 4
        word = rest % 8 // 4 * 2 + n % 16 // 8
        return (tile, block, lane, word), k % 4 * 8 + rest % 32 // 8 * 2
    span = K_BLOCK // layout.block[0]
    return (tile, block, rest // span, n % 8 * 4 + k % 4), rest % span // 4 * bits


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


def _checked(codes: np.ndarray, bits: int) -> np.ndarray:
    if codes.dtype != np.uint8 or codes.ndim != 2 or 0 in codes.shape:
        raise ValueError(f"expected a uint8 matrix of codes, got {codes.dtype} {codes.shape}")
    if codes.max() > bits:  # 2 for ternary codes, 1 for binary ones
        known = "0, 1 or 2" if bits == 2 else "0 or 1"
        raise ValueError(f"codes must be {known}, got {codes.max()}")
    return codes


def _check_array(packed: np.ndarray, shape: tuple[int, ...], dtype: str) -> None:
    if packed.shape != shape or packed.dtype != np.dtype(dtype):
        raise ValueError(f"expected {dtype} {shape}, got {packed.dtype} {packed.shape}")


def _padded(codes: np.ndarray, rows: int, columns: int, padding: int) -> np.ndarray:
    n, k = codes.shape
    if (n, k) == (rows, columns):
        return np.ascontiguousarray(codes)
    full = np.full((rows, columns), padding, np.uint8)
    full[:n, :k] = codes
    return full


def _merge(words: np.ndarray, bits: int) -> np.ndarray:
    """The words along the last axis to one: byte by byte, code s goes to bits from bits * s on."""
    merged = words[..., 0].copy()
    for s in range(1, words.shape[-1]):
        merged |= words[..., s] << words.dtype.type(bits * s)
    return merged


def _split(merged: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `_merge`: a new last axis of words, one code in each byte."""
    word = merged.dtype.type
    mask = word(int.from_bytes(bytes([(1 << bits) - 1]) * merged.dtype.itemsize, "little"))
    return np.stack([(merged >> word(bits * s)) & mask for s in range(8 // bits)], axis=-1)
