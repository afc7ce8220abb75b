"""GGUF files as plain bytes: any tensor type, and whatever else a test wants to be wrong."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALIGNMENT = 32
_FORMATS = {
    "u8": (0, "<B"),
    "i8": (1, "<b"),
    "u16": (2, "<H"),
    "i16": (3, "<h"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "bool": (7, "<?"),
    "u64": (10, "<Q"),
    "i64": (11, "<q"),
    "f64": (12, "<d"),
}


@dataclass
class Tensor:
    """`shape` has the rows first; `dimensions` and `offset` replace what the file says of it."""

    shape: tuple[int, ...]
    number: int
    data: bytes
    dimensions: tuple[int, ...] | None = None
    offset: int | None = None


@dataclass
class GGUF:
    """`keys`: name to (type, value); a type is one of `_FORMATS`, "str", or ("array", one)."""

    keys: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: int = 3
    magic: bytes = b"GGUF"

    def set(self, name: str, kind: Any, value: Any) -> None:
        self.keys[name] = (kind, value)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path

    def to_bytes(self) -> bytes:
        counts = struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))
        head = self.magic + counts + b"".join(map(self._key, self.keys))
        body = b""
        for name, tensor in self.tensors.items():
            shape = tensor.dimensions or tuple(reversed(tensor.shape))
            place = len(body) if tensor.offset is None else tensor.offset
            head += text(name) + struct.pack(f"<I{len(shape)}q", len(shape), *shape)
            head += struct.pack("<IQ", tensor.number, place)
            body += padded(tensor.data, self.alignment)
        return padded(head, self.alignment) + body

    @property
    def alignment(self) -> int:
        value = self.keys.get("general.alignment", (0, ALIGNMENT))[1]
        return value if isinstance(value, int) and value > 0 else ALIGNMENT

    def _key(self, name: str) -> bytes:
        kind, value = self.keys[name]
        if isinstance(kind, tuple):
            items = b"".join(plain(kind[1], item) for item in value)
            return text(name) + struct.pack("<IIQ", 9, number_of(kind[1]), len(value)) + items
        return text(name) + struct.pack("<I", number_of(kind)) + plain(kind, value)


def number_of(kind: str) -> int:
    return 8 if kind == "str" else _FORMATS[kind][0]


def plain(kind: str, value: Any) -> bytes:
    return text(value) if kind == "str" else struct.pack(_FORMATS[kind][1], value)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)
