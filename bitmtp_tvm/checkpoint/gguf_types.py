"""Element types of GGUF tensors: their blocks, and how a block becomes codes or numbers.

A block holds `group` neighbouring weights of one row in `bytes` bytes; `d` is its scale, float16.

| type | block | weight j of the block |
|---|---|---|
| Q1_0 | d, 16 bytes | bit j % 8 of byte j / 8: 1 is +d, 0 is -d |
| Q2_0, PQ2_0 | d, group / 4 bytes | bits 2 * (j % 4) of byte j / 4: (code - 1) * d |
| TQ1_0, TQ2_0 | as the `gguf` package reads them, d last | (code - 1) * d |
| I2_S | 32 bytes | bits 6 - 2 * (j / 32) of byte j % 32: (code - 1) * scale |

The scale of I2_S is one float32 for the whole tensor, behind its last block. Eight weights of a
Q2_0 block with the codes 0 1 2 0 1 1 2 0: 0 | 1 << 2 | 2 << 4 | 0 << 6 = 0x24, then 0x25.
"""

from dataclasses import dataclass
from functools import cache

import gguf
import numpy as np


@dataclass(frozen=True)
class TensorType:
    """An element type: `group` weights of a row take `bytes` bytes, the tensor `tail` more."""

    name: str
    number: int
    group: int
    bytes: int
    tail: int = 0

    @property
    def title(self) -> str:
        """The name and number that messages show."""
        return f"{self.name} ({self.number})"

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights, a multiple of `group`."""
        return columns // self.group * self.bytes


F32 = TensorType("F32", 0, 1, 4)
F16 = TensorType("F16", 1, 1, 2)
BF16 = TensorType("BF16", 30, 1, 2)
TQ1_0 = TensorType("TQ1_0", 34, 256, 54)
TQ2_0 = TensorType("TQ2_0", 35, 256, 66)
I2_S = TensorType("I2_S", 36, 128, 32, tail=32)
Q1_0 = TensorType("Q1_0", 41, 128, 18)
Q2_0 = TensorType("Q2_0", 42, 64, 18)
# Files of an older converter use the same number for a larger block.
Q2_0_WIDE = TensorType("Q2_0", 42, 128, 34)
PQ2_0 = TensorType("PQ2_0", 142, 128, 34)

OWN_TYPES = (F32, F16, BF16, TQ1_0, TQ2_0, I2_S, Q1_0, Q2_0, Q2_0_WIDE, PQ2_0)
# Types whose blocks are codes and a float16 scale; those of `TWO_BITS` start with the scale.
TWO_BITS = (Q2_0, Q2_0_WIDE, PQ2_0)
GROUPED = (Q1_0, *TWO_BITS, TQ1_0, TQ2_0)
# Known by name, and refused.
FOREIGN = {4: "Q4_2", 5: "Q4_3", 37: "I8_S", 38: "TL1", 143: "PTQ1_0"}
_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)


@cache
def tensor_types(number: int) -> tuple[TensorType, ...]:
    """The types that go by a number: none that can be read, one, or the two of number 42."""
    own = tuple(kind for kind in OWN_TYPES if kind.number == number)
    if own or number in FOREIGN:
        return own
    try:
        kind = gguf.GGMLQuantizationType(number)
        group, size = gguf.GGML_QUANT_SIZES[kind]
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return ()
    return (TensorType(kind.name, number, group, size),)


def type_name(number: int) -> str:
    """What messages call a type that cannot be read: its number, and a name if it has one."""
    try:
        name = FOREIGN.get(number) or gguf.GGMLQuantizationType(number).name
    except ValueError:
        return f"the unknown type {number}"
    return f"type {number} ({name})"


def split(kind: TensorType, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes `(N, K)` uint8 and block scales `(N, K / group)` float16 of a type of `GROUPED`.

    `rows`: the stored bytes, `(N, row_bytes)` uint8. The code is (w + 1) / 2 for Q1_0 and w + 1 for
    the others, where a damaged file may hold a 3.
    """
    count = len(rows)
    blocks = rows.reshape(count, -1, kind.bytes)
    scale_first = kind is Q1_0 or kind in TWO_BITS
    place = slice(0, 2) if scale_first else slice(kind.bytes - 2, kind.bytes)
    scales = np.ascontiguousarray(blocks[..., place]).view("<f2")[..., 0]
    if kind is Q1_0:
        codes = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little")
    elif scale_first:
        codes = _four_to_a_byte(blocks[..., 2:])
    else:
        plain = blocks.copy()
        plain[..., place] = _ONE
        weights = gguf.dequantize(plain.reshape(-1, kind.bytes), _packaged(kind))
        codes = (weights + 1).astype(np.uint8)
    return codes.reshape(count, -1), scales.astype(np.float16)


def split_i2_s(rows: np.ndarray) -> np.ndarray:
    """Codes `(N, K)` uint8 of I2_S rows `(N, row_bytes)` uint8, in which a 3 is damage."""
    shifts = np.array([6, 4, 2, 0], np.uint8)[:, None]
    blocks = rows.reshape(-1, 1, I2_S.bytes)
    return ((blocks >> shifts) & np.uint8(3)).reshape(len(rows), -1)


def dequantise(kind: TensorType, rows: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Stored rows `(N, row_bytes)` uint8 to weights `(N, K)` float32; `scale` is that of I2_S."""
    if kind is I2_S:
        return (split_i2_s(rows).astype(np.float32) - 1) * np.float32(scale)
    if kind is Q1_0 or kind in TWO_BITS:
        codes, scales = split(kind, rows)
        signs = codes.astype(np.float32) * (2 if kind is Q1_0 else 1) - 1
        return signs * np.repeat(scales.astype(np.float32), kind.group, axis=1)
    if kind in (F32, F16):
        return rows.view("<f4" if kind is F32 else "<f2").astype(np.float32)
    return np.asarray(gguf.dequantize(rows, _packaged(kind)), np.float32)


def _packaged(kind: TensorType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(kind.number)


def _four_to_a_byte(payload: np.ndarray) -> np.ndarray:
    shifts = np.array([0, 2, 4, 6], np.uint8)
    return (payload[..., None] >> shifts) & np.uint8(3)
