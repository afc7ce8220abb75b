"""One GGUF file: every tensor placed and checked as a whole, its bytes read some rows at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.checkpoint.gguf_header import Descriptor, read_header
from bitmtp_tvm.checkpoint.gguf_types import TensorType, tensor_types, type_name
from bitmtp_tvm.errors import BitMTPError, shown

_LARGEST_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies; `shape` has the rows first, `begin` and `end` count from the start."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.kind.row_bytes(self.shape[-1])


class GGUFFile:
    """The keys and tensors of one file; BitMTPError names the file and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.keys: dict[str, Any] = header.keys
        _check_whole(path, self.keys)
        alignment = _alignment(path, self.keys)
        start = _padded(header.end, alignment)
        self.entries = _place(path, header.descriptors, start, alignment, header.size)

    def read_rows(self, name: str, at_once: int) -> Iterator[tuple[slice, np.ndarray]]:
        """The stored rows of the tensor `name`, `at_once` at a time: uint8 `(rows, row_bytes)`."""
        entry = self.entries[name]
        for first in range(0, entry.rows, at_once):
            last = min(first + at_once, entry.rows)
            begin = entry.begin + first * entry.row_bytes
            flat = self._bytes(entry, begin, (last - first) * entry.row_bytes)
            yield slice(first, last), flat.reshape(-1, entry.row_bytes)

    def read_tail(self, name: str) -> bytes:
        """What stands behind the rows of a tensor whose type has a tail."""
        entry = self.entries[name]
        return self._bytes(entry, entry.end - entry.kind.tail, entry.kind.tail).tobytes()

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and bytes."""
        one, two = self.entries[name], self.entries[other]
        if (one.kind, one.shape) != (two.kind, two.shape):
            return False
        size, step = one.end - one.begin, 1 << 24
        return all(
            np.array_equal(
                self._bytes(one, one.begin + at, min(step, size - at)),
                self._bytes(two, two.begin + at, min(step, size - at)),
            )
            for at in range(0, size, step)
        )

    def _bytes(self, entry: TensorEntry, begin: int, count: int) -> np.ndarray:
        try:
            flat = np.fromfile(self.path, np.uint8, count, offset=begin)
        except OSError as fault:
            raise BitMTPError(f"{self.path} cannot be read: {fault.strerror}") from fault
        if flat.size != count:
            raise BitMTPError(
                f"{self.path} became shorter while it was read: tensor {entry.name} is cut"
            )
        return flat


def _check_whole(path: Path, keys: dict[str, Any]) -> None:
    parts = keys.get("split.count", 1)
    if type(parts) is not int or parts > 1:
        raise BitMTPError(
            f"{path} is one of {shown(parts)} parts of a model: merge them with "
            "llama-gguf-split --merge"
        )


def _alignment(path: Path, keys: dict[str, Any]) -> int:
    value = keys.get("general.alignment", _DEFAULT_ALIGNMENT)
    whole = type(value) is int and 0 < value <= _LARGEST_ALIGNMENT
    if not whole or value & (value - 1):
        raise BitMTPError(
            f"{path}: general.alignment is {shown(value)}; it must be a power of two up to "
            f"{_LARGEST_ALIGNMENT}"
        )
    return int(value)


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _place(
    path: Path, descriptors: tuple[Descriptor, ...], start: int, alignment: int, size: int
) -> dict[str, TensorEntry]:
    """Every tensor with its type and its place: they must fill the file, but for padding."""
    in_order = sorted(descriptors, key=lambda each: each.offset)
    if in_order and start + in_order[-1].offset > size:
        raise BitMTPError(
            f"{path} is truncated: tensor {in_order[-1].name} begins at byte "
            f"{start + in_order[-1].offset} of {size}"
        )
    kinds = _choose_types(path, in_order, size - start, alignment)
    entries = {}
    position = end = start
    for each in in_order:
        begin, kind = start + each.offset, kinds[each.number]
        _check_rows(path, each, kind)
        end = begin + _bytes_of(each, kind)
        if end > size:
            raise BitMTPError(
                f"{path} is truncated: tensor {each.name} ends at byte {end} of {size}"
            )
        if begin != position:
            raise BitMTPError(
                f"{path}: tensor {each.name} begins at byte {begin}, but {position} is where the "
                "one before it ends"
            )
        entries[each.name] = TensorEntry(each.name, kind, each.shape, begin, end)
        position = _padded(end, alignment)
    if size > position:
        raise BitMTPError(f"{path} has {size - end} bytes that belong to no tensor")
    return entries


def _choose_types(
    path: Path, in_order: list[Descriptor], data_bytes: int, alignment: int
) -> dict[int, TensorType]:
    """The type of each number; of two that share one, that which fits most tensors' bytes.

    One converter wrote the whole file: a tensor that is too small to tell goes with the others.
    """
    nexts = [each.offset for each in in_order[1:]] + [data_bytes]
    spans = [end - each.offset for each, end in zip(in_order, nexts, strict=True)]
    chosen = {}
    for number in dict.fromkeys(each.number for each in in_order):
        own = [(each, span) for each, span in zip(in_order, spans, strict=True)]
        own = [(each, span) for each, span in own if each.number == number]
        kinds = tensor_types(number)
        if not kinds:
            raise BitMTPError(
                f"{path}: tensor {own[0][0].name} has {type_name(number)}, which cannot be read"
            )
        fits = [sum(_fits(*one, kind, alignment) for one in own) for kind in kinds]
        if len(kinds) > 1 and fits.count(max(fits)) > 1:
            raise BitMTPError(
                f"{path}: the sizes of its {kinds[0].title} tensors do not tell whether a block "
                f"holds {' or '.join(str(kind.group) for kind in kinds)} weights"
            )
        chosen[number] = kinds[fits.index(max(fits))]
    return chosen


def _fits(each: Descriptor, span: int, kind: TensorType, alignment: int) -> bool:
    """Whether a tensor of `kind` takes the `span` from its begin to the next one's."""
    size = _bytes_of(each, kind)
    return not each.shape[-1] % kind.group and _padded(size, alignment) == _padded(span, alignment)


def _check_rows(path: Path, each: Descriptor, kind: TensorType) -> None:
    if each.shape[-1] % kind.group:
        raise BitMTPError(
            f"{path}: tensor {each.name} is {kind.title} with rows of {each.shape[-1]} weights, "
            f"which is no multiple of {kind.group}"
        )


def _bytes_of(each: Descriptor, kind: TensorType) -> int:
    return math.prod(each.shape[:-1]) * kind.row_bytes(each.shape[-1]) + kind.tail
