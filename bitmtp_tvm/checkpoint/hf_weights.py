"""How the matrices of a Hugging Face directory become low-bit: packed already, or quantised here.

Packed weights are uint8 `(N/4, K)`: bits 2i..2i+1 of row r hold the code of row i * (N/4) + r. With
N = 8, K = 1 and the codes 0 1 2 0 1 1 2 0 of rows 0..7:
- r = 0 holds rows 0, 2, 4, 6: 0 | 2 << 2 | 1 << 4 | 2 << 6 = 0x98;
- r = 1 holds rows 1, 3, 5, 7: 1 | 0 << 2 | 1 << 4 | 0 << 6 = 0x11.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bitmtp_tvm.checkpoint.base import Scale
from bitmtp_tvm.checkpoint.hf_files import FLOATS, HFFiles, Wanted
from bitmtp_tvm.errors import BitMTPError
from relax_models.formats import K_BLOCK
from relax_models.quantizers import Quantizer

_ROWS_AT_ONCE = 2048
_LEAST_MEAN = 1e-5


class Matrices(Protocol):
    """One of the three ways below; `stem` is a tensor's name without its last part."""

    @property
    def weight_format(self) -> str:
        """A key of FORMATS."""

    @property
    def quantization(self) -> str:
        """Where the low-bit values come from, for the manifest."""

    def expected(self, files: HFFiles, stem: str, n: int, k: int) -> dict[str, Wanted]:
        """The tensors that an `(n, k)` matrix consists of; BitMTPError for impossible sizes."""

    def read(self, files: HFFiles, stem: str, n: int, k: int) -> tuple[np.ndarray, Scale]:
        """See `Checkpoint.low_bit`."""


@dataclass(frozen=True)
class Packed:
    """Ternary codes and a scale that multiplies (`autobitlinear`) or divides (`bitlinear`)."""

    divides: bool
    weight_format: str = "bitnet-ternary"
    quantization: str = "packed"

    def expected(self, files: HFFiles, stem: str, n: int, k: int) -> dict[str, Wanted]:
        if n % 4:
            raise BitMTPError(
                f"{files.directory / 'config.json'} gives {stem} {n} rows; packed BitNet weights "
                "need a multiple of 4"
            )
        return {f"{stem}.weight": (("U8",), (n // 4, k)), f"{stem}.weight_scale": (FLOATS, (1,))}

    def read(self, files: HFFiles, stem: str, n: int, k: int) -> tuple[np.ndarray, Scale]:
        packed = files.read(f"{stem}.weight")
        if np.any(packed & (packed >> np.uint8(1)) & np.uint8(0x55)):
            raise files.fault(f"{stem}.weight", "holds the code 3, which is no ternary weight")
        codes = np.empty((4, n // 4, k), np.uint8)
        for i in range(4):
            codes[i] = (packed >> np.uint8(2 * i)) & np.uint8(3)
        return codes.reshape(n, k), self._scale(files, f"{stem}.weight_scale")

    def _scale(self, files: HFFiles, name: str) -> float:
        scale = files.read_float(name)[0]
        if scale <= 0:
            raise files.fault(name, f"is {scale}; a scale must be positive")
        if not self.divides:
            return float(scale)
        with np.errstate(over="ignore"):
            inverse = np.float32(1) / scale
        if not 0 < inverse < np.inf:
            raise files.fault(name, f"is {scale}; one divided by it is no scale")
        return float(inverse)


@dataclass(frozen=True)
class Master:
    """Wider weights of a BitNet: w -> clip(round(w / s), -1, 1), s = mean|w| of the matrix."""

    weight_format: str = "bitnet-ternary"
    quantization: str = "master weights, absmean per matrix"

    def expected(self, files: HFFiles, stem: str, n: int, k: int) -> dict[str, Wanted]:
        return {f"{stem}.weight": (FLOATS, (n, k))}

    def read(self, files: HFFiles, stem: str, n: int, k: int) -> tuple[np.ndarray, Scale]:
        weights = files.read_float(f"{stem}.weight")
        mean = np.float32(max(np.abs(weights).mean(dtype=np.float64), _LEAST_MEAN))
        rounded = np.rint(weights * (np.float32(1) / mean))
        return (np.clip(rounded, -1, 1) + 1).astype(np.uint8), float(mean)


@dataclass(frozen=True)
class Grouped:
    """Wider weights of a Qwen3, by a named rule with one scale for each group of 128 columns."""

    quantizer: Quantizer

    @property
    def weight_format(self) -> str:
        return self.quantizer.format

    @property
    def quantization(self) -> str:
        return self.quantizer.describe()

    def expected(self, files: HFFiles, stem: str, n: int, k: int) -> dict[str, Wanted]:
        return {f"{stem}.weight": (FLOATS, (n, k))}

    def read(self, files: HFFiles, stem: str, n: int, k: int) -> tuple[np.ndarray, Scale]:
        codes = np.empty((n, k), np.uint8)
        scales = np.empty((n, k // K_BLOCK), np.float16)
        # Block by block: the embedding of a large model in float32 would be the largest array.
        for start in range(0, n, _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, n))
            values = files.read_float(f"{stem}.weight", rows.start, rows.stop)
            try:
                codes[rows], scales[rows] = self.quantizer.quantize(values)
            except ValueError as fault:
                raise files.fault(f"{stem}.weight", f"cannot be quantised: {fault}") from fault
        return codes, scales
