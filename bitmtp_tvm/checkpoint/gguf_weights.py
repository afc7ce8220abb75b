"""Tensors of a GGUF file as the numbers that the compiler packs, read some rows at a time."""

from collections.abc import Iterator

import numpy as np

from bitmtp_tvm.checkpoint.gguf_file import GGUFFile
from bitmtp_tvm.checkpoint.gguf_types import (
    GROUPED,
    I2_S,
    Q1_0,
    TensorType,
    dequantise,
    split,
    split_i2_s,
)
from bitmtp_tvm.errors import BitMTPError
from relax_models.formats import K_BLOCK
from relax_models.quantizers import Quantizer

# Weights held as float32 at a time.
_AT_ONCE = 1 << 22


def blocks(file: GGUFFile, name: str) -> Iterator[tuple[slice, np.ndarray]]:
    """The tensor `name`, of any type, as float32 `(rows, K)`, some rows at a time; all finite."""
    kind = file.entries[name].kind
    scale = _tail_scale(file, name) if kind is I2_S else 1.0
    for rows, stored in _stored(file, name):
        with np.errstate(invalid="ignore", over="ignore"):
            values = dequantise(kind, stored, scale)
        if not np.isfinite(values).all():
            raise fault(file, name, "holds a value that is not finite")
        yield rows, values


def floats(file: GGUFFile, name: str) -> np.ndarray:
    """A whole small tensor as float32 `(elements,)`."""
    return np.concatenate([values.reshape(-1) for _, values in blocks(file, name)])


def one_scale(file: GGUFFile, name: str, shape: tuple[int, int]) -> tuple[np.ndarray, float]:
    """Ternary codes `(N, K)` uint8 and the one scale of a matrix of any type.

    Raises BitMTPError where the weights are not all 0 or plus or minus one positive number.
    """
    kind = file.entries[name].kind
    codes = np.empty(shape, np.uint8)
    if kind is I2_S:
        scale = _tail_scale(file, name)
        check_scale(file, name, scale)
        for rows, stored in _stored(file, name):
            codes[rows] = split_i2_s(stored)
        _check_codes(file, name, codes)
        return codes, scale
    scale = 0.0
    for rows, values in _ternary_rows(file, name):
        sizes = np.abs(values[values != 0])
        scale = scale or float(sizes[0] if sizes.size else 0)
        if np.any(odd := sizes != np.float32(scale)):
            raise fault(
                file,
                name,
                f"has weights of the sizes {scale:g} and {sizes[odd][0]:g}; a BitNet "
                "has one a matrix",
            )
        codes[rows] = 1 + np.sign(values).astype(np.int8)
    # A matrix of zeros: any scale serves.
    return codes, scale or 1.0


def _ternary_rows(file: GGUFFile, name: str) -> Iterator[tuple[slice, np.ndarray]]:
    kind = file.entries[name].kind
    if kind not in GROUPED or kind is Q1_0:
        yield from blocks(file, name)
        return
    for rows, stored in _stored(file, name):
        codes, scales = split(kind, stored)
        _check_codes(file, name, codes)
        _check_scales(file, name, scales)
        repeated = np.repeat(scales.astype(np.float32), kind.group, axis=1)
        yield rows, (codes.astype(np.float32) - 1) * repeated


def group_scales(
    file: GGUFFile, name: str, shape: tuple[int, int], binary: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Codes `(N, K)` uint8 and scales `(N, K / 128)` float16 of a matrix of a type of `GROUPED`.

    `binary`: the codes are (w + 1) / 2, for Q1_0 only; else w + 1, which serves every type.
    """
    kind = file.entries[name].kind
    codes = np.empty(shape, np.uint8)
    scales = np.empty((shape[0], shape[1] // K_BLOCK), np.float16)
    for rows, stored in _stored(file, name):
        part, own = split(kind, stored)
        _check_scales(file, name, own)
        if kind is not Q1_0:
            _check_codes(file, name, part)
        elif not binary:
            part *= np.uint8(2)
        scales[rows] = _regrouped(file, name, kind, part, own)
        codes[rows] = part
    return codes, scales


def quantized(
    file: GGUFFile, name: str, shape: tuple[int, int], quantizer: Quantizer
) -> tuple[np.ndarray, np.ndarray]:
    """As `group_scales`, for a matrix of wider weights that `quantizer` makes low-bit."""
    codes = np.empty(shape, np.uint8)
    scales = np.empty((shape[0], shape[1] // K_BLOCK), np.float16)
    for rows, values in blocks(file, name):
        try:
            codes[rows], scales[rows] = quantizer.quantize(values)
        except ValueError as reason:
            raise fault(file, name, f"cannot be quantised: {reason}") from reason
    return codes, scales


def check_scale(file: GGUFFile, name: str, scale: float) -> None:
    """Raise BitMTPError for a scale of a whole matrix that is not a positive number."""
    if not 0 < scale < float("inf"):
        raise fault(file, name, f"gives the scale {scale:g}; a scale must be positive")


def fault(file: GGUFFile, name: str, what: str) -> BitMTPError:
    return BitMTPError(f"{file.path}: tensor {name} {what}")


def _stored(file: GGUFFile, name: str) -> Iterator[tuple[slice, np.ndarray]]:
    return file.read_rows(name, max(1, _AT_ONCE // file.entries[name].shape[-1]))


def _tail_scale(file: GGUFFile, name: str) -> float:
    return float(np.frombuffer(file.read_tail(name)[:4], "<f4")[0])


def _regrouped(
    file: GGUFFile, name: str, kind: TensorType, codes: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    """Block scales to one for every 128 weights; `codes` under a scale of 0 may become zeros."""
    if kind.group >= K_BLOCK:
        return np.repeat(scales, kind.group // K_BLOCK, axis=1)
    halves = codes.reshape(*scales.shape, kind.group)
    # A block without weights may have any scale: it takes its neighbour's.
    halves[scales == 0] = 1
    used = np.any(halves != 1, axis=-1).reshape(len(codes), -1, K_BLOCK // kind.group)
    grouped = scales.reshape(used.shape)
    chosen = np.where(used[..., 0], grouped[..., 0], grouped[..., 1])
    if np.any(used & (grouped != chosen[..., None])):
        raise fault(
            file, name, f"has different scales in a group of {K_BLOCK} weights; one is supported"
        )
    return chosen


def _check_codes(file: GGUFFile, name: str, codes: np.ndarray) -> None:
    if codes.max() > 2:
        raise fault(file, name, "holds the code 3, which is no ternary weight")


def _check_scales(file: GGUFFile, name: str, scales: np.ndarray) -> None:
    if not np.isfinite(scales).all():
        raise fault(file, name, "holds a scale that is not finite")
