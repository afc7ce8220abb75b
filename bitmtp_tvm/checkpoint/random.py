"""A checkpoint of any shape with random weights, for benchmarks: made on demand, nothing stored."""

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from bitmtp_tvm.checkpoint.base import Checkpoint, Scale, dense_shapes, matrix_shapes
from relax_models.config import ModelConfig
from relax_models.formats import K_BLOCK, bf16_bits, get_format

_ROWS_AT_ONCE = 4096


class RandomCheckpoint(Checkpoint):
    """Tensors seeded one by one by (seed, name): the same in any order and on every machine.

    Ternary codes 0, 1, 2 come with probabilities 1/4, 1/2, 1/4, binary ones with 1/2 each. Scales
    differ from matrix to matrix and from group to group, and keep activations of order 1: a row of
    K normalised inputs gives a sum of variance K/2 (ternary) or K (binary).
    """

    tokenizer: Path | None = None
    add_bos = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, name: str = "random", seed: int = 0) -> None:
        config.validate()
        self.name = name
        self.config = replace(config, quantization="random")
        self.seed = seed
        self._format = get_format(config.weight_format)
        self._matrices = matrix_shapes(config)
        self._dense = dense_shapes(config)

    def low_bit(self, name: str) -> tuple[np.ndarray, Scale]:
        """See `Checkpoint.low_bit`."""
        n, k = self._matrices[name]
        generator = self._generator(name)
        # The mean square of a weight is 1/2 for two bits and 1 for one.
        scale = np.float32(generator.uniform(0.75, 1.25) * np.sqrt(self._format.bits / k))
        codes = _random_codes(generator, n * k, self._format.bits).reshape(n, k)
        if self._format.group is None:
            return codes, float(scale)
        spread = generator.uniform(0.75, 1.25, (n, k // K_BLOCK)).astype(np.float32)
        return codes, (scale * spread).astype(np.float16)

    def dense(self, name: str) -> np.ndarray:
        """See `Checkpoint.dense`."""
        shape = self._dense[name]
        generator = self._generator(name)
        if name != "embed":
            return generator.uniform(0.8, 1.2, shape).astype(np.float32)
        bits = np.empty(shape, np.uint16)
        # Logits of order 1: the head multiplies normalised rows by this table.
        spread = np.float32(shape[1] ** -0.5)
        for start in range(0, shape[0], _ROWS_AT_ONCE):
            rows = bits[start : start + _ROWS_AT_ONCE]
            rows[:] = bf16_bits(generator.standard_normal(rows.shape, np.float32) * spread)
        return bits

    def _generator(self, name: str) -> np.random.Generator:
        # SFC64 is the fastest of numpy's generators.
        return np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode())]))


def random_checkpoint(config: ModelConfig, seed: int = 0, name: str = "random") -> RandomCheckpoint:
    """A checkpoint of `config` with random weights and no tokenizer; ValueError if it is bad."""
    return RandomCheckpoint(config, name, seed)


def _random_codes(generator: np.random.Generator, count: int, bits: int) -> np.ndarray:
    """`count` random codes, uint8, from as few random bits as possible.

    A byte gives four ternary codes or eight binary ones, through a table of all 256 bytes; the
    ternary code 3 becomes 1.
    """
    per_byte = 8 // bits
    words = generator.integers(0, 1 << 64, -(-count // (8 * per_byte)), dtype=np.uint64)
    table = np.arange(256, dtype=np.uint8)[:, None] >> (bits * np.arange(per_byte, dtype=np.uint8))
    table &= np.uint8((1 << bits) - 1)
    table[table == 3] = 1
    entries = np.ascontiguousarray(table).view(f"<u{per_byte}")[:, 0]
    return entries[words.view(np.uint8)].view(np.uint8)[:count]
