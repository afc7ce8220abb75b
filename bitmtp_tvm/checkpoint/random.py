"""A checkpoint of any shape with random weights, for benchmarks: made on demand, nothing stored."""

import zlib
from pathlib import Path

import numpy as np

from bitmtp_tvm.checkpoint.base import Checkpoint, dense_shapes, matrix_shapes
from relax_models.config import ModelConfig
from relax_models.formats import bf16_bits

_ROWS_AT_ONCE = 4096


class RandomCheckpoint(Checkpoint):
    """Tensors seeded one by one by (seed, name): the same in any order and on every machine.

    Codes 0, 1, 2 come with probabilities 1/4, 1/2, 1/4. Scales differ from matrix to matrix and
    keep activations of order 1: a row of K normalised inputs gives a sum of variance K/2.
    """

    tokenizer: Path | None = None
    add_bos = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, name: str = "random", seed: int = 0) -> None:
        config.validate()
        self.name = name
        self.config = config
        self.seed = seed
        self._matrices = matrix_shapes(config)
        self._dense = dense_shapes(config)

    def low_bit(self, name: str) -> tuple[np.ndarray, float]:
        """See `Checkpoint.low_bit`."""
        n, k = self._matrices[name]
        generator = self._generator(name)
        scale = np.float32(generator.uniform(0.75, 1.25) * np.sqrt(2.0 / k))
        words = generator.integers(0, 1 << 64, -(-n * k // 32), dtype=np.uint64)
        return _ternary_codes(words)[: n * k].reshape(n, k), float(scale)

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


def _ternary_codes(words: np.ndarray) -> np.ndarray:
    """Random 64-bit words to 32 codes each: every two bits are a code, and 3 becomes 1."""
    low = np.uint64(0x5555555555555555)
    both = words & (words >> np.uint64(1)) & low
    packed = (words & ~(both << np.uint64(1))).view(np.uint8)
    codes = np.empty((packed.size, 4), np.uint8)
    for s in range(4):
        codes[:, s] = (packed >> np.uint8(2 * s)) & np.uint8(3)
    return codes.reshape(-1)
