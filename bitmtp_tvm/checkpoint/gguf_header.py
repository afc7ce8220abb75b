"""The header of a GGUF file: its keys, and its tensors as it describes them.

Read here and not through the `gguf` package, whose reader knows only that package's tensor types
and trusts the lengths that a file claims. All little-endian: magic, version, number of tensors,
number of keys; then the keys, then the descriptors.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bitmtp_tvm.errors import BitMTPError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_GIT_LFS = b"version https://git-lfs"
# Limits against damaged files; published ones stay far below.
_MOST_BYTES = 64 << 20
_MOST_ITEMS = 1 << 16
_LONGEST_NAME = 256
_MOST_DIMENSIONS = 4

_BOOL, _STRING, _ARRAY = 7, 8, 9
# Value types that are one number: numpy's names.
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True)
class Descriptor:
    """A tensor: `shape` with the rows first, the number of its type, its `offset` in the data."""

    name: str
    number: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Header:
    """`keys`: numbers and text as Python's, arrays of numbers as numpy's, of text as lists.

    `end`: where the header ends, `size`: where the file does.
    """

    keys: dict[str, Any]
    descriptors: tuple[Descriptor, ...]
    end: int
    size: int


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that says it is GGUF, by its name or its first bytes."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be read: {fault.strerror}") from fault


def read_header(path: Path) -> Header:
    """The header of the file at `path`; BitMTPError names the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            reader = _Reader(file, path, path.stat().st_size)
            tensors, keys = reader.begin()
            found = dict(reader.keys(keys))
            descriptors = tuple(reader.descriptors(tensors))
            return Header(found, descriptors, reader.position, reader.size)
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be read: {fault.strerror}") from fault


class _Reader:
    """Reads front to back; nothing is read, and no room made for it, that is not there."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.position = 0
        self.size = size
        self._file = file
        self._path = path

    def begin(self) -> tuple[int, int]:
        """Magic and version; returns the number of tensors and of keys."""
        first = self._file.read(len(_GIT_LFS))
        if first == _GIT_LFS:
            raise BitMTPError(
                f"{self._path} is a Git LFS pointer and not the file itself: download it"
            )
        if first[: len(MAGIC)] != MAGIC:
            raise BitMTPError(f"{self._path} is not a GGUF file: it does not begin with GGUF")
        self._file.seek(0)
        self._take(len(MAGIC), "its magic")
        (version,) = self._numbers("<I", "its version")
        if version and version & 0xFFFF == 0:
            raise BitMTPError(f"{self._path} is a big-endian GGUF file; only little-endian is read")
        if version not in VERSIONS:
            raise BitMTPError(f"{self._path} is GGUF version {version}; versions 2 and 3 are read")
        tensors, keys = self._numbers("<QQ", "the number of its tensors and keys")
        for count, what in ((tensors, "tensors"), (keys, "keys")):
            if count > _MOST_ITEMS:
                raise BitMTPError(f"{self._path} is damaged: it would have {count} {what}")
        return tensors, keys

    def keys(self, count: int) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for place in range(count):
            name = self._text(f"the name of key {place}", _LONGEST_NAME)
            if name in seen:
                raise BitMTPError(f"{self._path}: the key {name!r} stands twice")
            seen.add(name)
            yield name, self._value(f"the key {name!r}")

    def descriptors(self, count: int) -> Iterator[Descriptor]:
        seen: set[str] = set()
        for place in range(count):
            name = self._text(f"the name of tensor {place}", _LONGEST_NAME)
            if name in seen:
                raise BitMTPError(f"{self._path}: tensor {name!r} stands twice")
            seen.add(name)
            yield self._descriptor(name, f"tensor {name!r}")

    def _descriptor(self, name: str, what: str) -> Descriptor:
        (rank,) = self._numbers("<I", what)
        if not 1 <= rank <= _MOST_DIMENSIONS:
            raise BitMTPError(f"{self._path}: {what} has {rank} dimensions")
        # Signed: a negative size is then named as such. The file has the columns first.
        sizes = self._numbers(f"<{rank}q", what)
        if min(sizes) <= 0:
            raise BitMTPError(f"{self._path}: {what} has the impossible dimension {min(sizes)}")
        number, offset = self._numbers("<IQ", what)
        return Descriptor(name, number, tuple(reversed(sizes)), offset)

    def _value(self, what: str) -> Any:
        (kind,) = self._numbers("<I", what)
        if kind == _STRING:
            return self._text(what, _MOST_BYTES)
        if kind == _ARRAY:
            return self._array(what)
        value = self._array_of_numbers(kind, 1, what)[0]
        return bool(value) if kind == _BOOL else value.item()

    def _array(self, what: str) -> Any:
        kind, count = self._numbers("<IQ", what)
        if kind != _STRING:
            return self._array_of_numbers(kind, count, what)
        self._check_room(8 * count, what)
        return [self._text(what, _MOST_BYTES) for _ in range(count)]

    def _array_of_numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        if kind not in _NUMBERS:
            raise BitMTPError(f"{self._path}: {what} has the unknown value type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize, what), dtype)

    def _text(self, what: str, limit: int) -> str:
        (length,) = self._numbers("<Q", what)
        if length > limit:
            raise BitMTPError(f"{self._path}: {what} would be {length} bytes long")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as fault:
            raise BitMTPError(f"{self._path}: {what} is not valid UTF-8") from fault

    def _numbers(self, layout: str, what: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout), what))

    def _take(self, count: int, what: str) -> bytes:
        self._check_room(count, what)
        data = self._file.read(count)
        if len(data) != count:
            raise BitMTPError(f"{self._path} became shorter while it was read")
        self.position += count
        return data

    def _check_room(self, count: int, what: str) -> None:
        end = self.position + count
        if end > self.size:
            raise BitMTPError(
                f"{self._path} is truncated: {what} ends at byte {end} of {self.size}"
            )
        if end > _MOST_BYTES:
            raise BitMTPError(
                f"{self._path} is damaged: its header would be larger than {_MOST_BYTES} bytes"
            )
