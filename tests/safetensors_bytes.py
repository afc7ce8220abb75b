"""Safetensors files as plain bytes, so that tests can write wrong ones."""

import json
from pathlib import Path
from typing import Any

Tensors = dict[str, dict[str, Any]]


def load(path: Path) -> Tensors:
    """Name to {"dtype", "shape", "data"} of each tensor."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            begin, end = entry.pop("data_offsets")
            tensors[name] = {**entry, "data": raw[start + begin : start + end]}
    return tensors


def save(path: Path, tensors: Tensors) -> None:
    """The inverse of `load`; whatever the entries claim is written."""
    header, data = {}, b""
    for name, entry in tensors.items():
        end = len(data) + len(entry["data"])
        header[name] = {
            "dtype": entry["dtype"],
            "shape": entry["shape"],
            "data_offsets": [len(data), end],
        }
        data += entry["data"]
    save_header(path, json.dumps(header).encode(), data)


def save_header(path: Path, header: bytes, data: bytes) -> None:
    """A file with just this header and data."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
