"""The packed low-bit words of "cuda" as a lane reads them.

Lane 4g + t has, of a tile of rows and a block of 128 columns, rows g, g + 8, … at the columns
32t..32t+31: 16 bytes, which hold two rows of two-bit codes or four rows of one-bit codes. The
layout is that of relax_models/formats.py.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

K_BLOCK = 128
LANE_K = 32
WORDS = 4
STEPS = LANE_K // 4


@dataclass(frozen=True)
class Packing:
    """Codes of `bits` bits. Both kinds are read as bytes of weight + 1: 0, 1, 2 or 0, 2."""

    bits: int

    @property
    def rows(self) -> int:
        """Rows of a tile that one lane holds."""
        return 4 // self.bits

    @property
    def tile(self) -> int:
        return 8 * self.rows

    def word(self, row, step):
        """Which of a lane's words has its row `row` at the columns 4 * step..4 * step + 3."""
        return row if self.bits == 1 else step % 2 * 2 + row

    def plus_one(self, word, step):
        """The four bytes of weight + 1 at the columns of `step`."""
        if self.bits == 2:
            shifted = T.shift_right(word, T.Cast("uint32", step // 2 * 2))
            return T.bitwise_and(shifted, T.uint32(0x03030303))
        # Bit `step` of every byte goes to bit 1, which doubles the code.
        right = T.shift_right(word, T.Cast("uint32", (step + 7) % 8))
        left = T.shift_left(word, T.uint32(1))
        return T.bitwise_and(T.Select(step == 0, left, right), T.uint32(0x02020202))


GROUP_PACKINGS = {"ternary-g128": Packing(2), "binary-g128": Packing(1)}
