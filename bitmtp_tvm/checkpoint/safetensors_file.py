"""One safetensors file: its header checked as a whole, its tensors read one at a time.

The header is read here and not through the safetensors library so that each fault can be named, and
because numpy has no bfloat16: those tensors come as their bits.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.checkpoint.jsonfile import parse_json
from bitmtp_tvm.errors import BitMTPError, shown

_LENGTH_BYTES = 8
# The limit of the format itself.
_LARGEST_HEADER = 100_000_000
# Limits against damaged files; published ones stay far below.
_LONGEST_NAME = 256
_MOST_DIMENSIONS = 8
_GIT_LFS = b"version https://git-lfs"

# numpy's name of each element type; bfloat16 and float8 as the bits.
DTYPES = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies; `begin` and `end` count from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """The tensors of one file; BitMTPError names the file and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                start, header = _read_header(file, path, size)
        except OSError as fault:
            raise BitMTPError(f"{path} cannot be read: {fault.strerror}") from fault
        header.pop("__metadata__", None)
        self.entries = {name: _entry(path, name, fields, start) for name, fields in header.items()}
        _check_extent(path, list(self.entries.values()), start, size)

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` in the dtype that `DTYPES` gives, copied out of the file."""
        return self._read(name, 0, self.entries[name].shape)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along the first axis of the tensor `name`, as `read` gives them."""
        entry = self.entries[name]
        first, *rest = entry.shape
        start, stop, _ = slice(start, stop).indices(first)
        return self._read(name, start * math.prod(rest), (stop - start, *rest))

    def _read(self, name: str, skipped: int, shape: tuple[int, ...]) -> np.ndarray:
        """An array of `shape` from behind the first `skipped` elements of a tensor."""
        entry = self.entries[name]
        dtype = np.dtype(DTYPES[entry.dtype])
        count = math.prod(shape)
        begin = entry.begin + skipped * dtype.itemsize
        try:
            flat = np.fromfile(self.path, dtype, count, offset=begin)
        except OSError as fault:
            raise BitMTPError(f"{self.path} cannot be read: {fault.strerror}") from fault
        if flat.size != count:
            raise BitMTPError(f"{self.path} became shorter while it was read: tensor {name} is cut")
        return flat.reshape(shape)


def _read_header(file: Any, path: Path, size: int) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the JSON header."""
    first = file.read(len(_GIT_LFS))
    if first == _GIT_LFS:
        raise BitMTPError(f"{path} is a Git LFS pointer and not the file itself: download it")
    if size < _LENGTH_BYTES:
        raise BitMTPError(f"{path} is truncated: it has {size} bytes and no complete header")
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if length > _LARGEST_HEADER:
        raise BitMTPError(f"{path} is not a safetensors file: its header would be {length} bytes")
    start = _LENGTH_BYTES + length
    if start > size:
        raise BitMTPError(f"{path} is truncated: its header ends at byte {start} of {size}")
    file.seek(_LENGTH_BYTES)
    return start, parse_json(file.read(length), f"the header of {path}")


def _entry(path: Path, name: str, fields: object, start: int) -> TensorEntry:
    """One entry of the header, checked on its own."""
    if len(name) > _LONGEST_NAME:
        raise BitMTPError(f"{path} names a tensor with {len(name)} characters")
    if not isinstance(fields, dict):
        raise BitMTPError(f"the header of {path} has no object for tensor {name}")
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BitMTPError(f"{path}: tensor {name} has the unknown element type {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS or max(shape, default=0) >= 1 << 48:
        raise BitMTPError(f"{path}: tensor {name} has the impossible shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise BitMTPError(f"{path}: tensor {name} has the impossible data_offsets {shown(offsets)}")
    begin, end = offsets
    needed = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if end - begin != needed:
        raise BitMTPError(
            f"{path}: tensor {name}, {dtype} {tuple(shape)}, needs {needed} bytes but its "
            f"data_offsets give it {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), start + begin, start + end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_extent(path: Path, entries: list[TensorEntry], start: int, size: int) -> None:
    """The tensors must fill the file behind the header: no overlap, no hole, no rest."""
    position = start
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.end > size:
            raise BitMTPError(
                f"{path} is truncated: tensor {entry.name} ends at byte {entry.end} of {size}"
            )
        if entry.begin != position:
            raise BitMTPError(
                f"{path}: tensor {entry.name} begins at byte {entry.begin}, but the one before it "
                f"ends at {position}"
            )
        position = entry.end
    if position != size:
        raise BitMTPError(f"{path} has {size - position} bytes that belong to no tensor")
