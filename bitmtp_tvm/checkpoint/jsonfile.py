"""JSON objects of a checkpoint, with faults named by file."""

import json
from pathlib import Path
from typing import Any

from bitmtp_tvm.errors import BitMTPError, shown


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`; BitMTPError when it is missing or not one."""
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be read: {fault.strerror}") from fault
    return parse_json(data, str(path))


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`, but a missing file is an empty object."""
    return read_json(path) if path.exists() else {}


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; `where` names it in the BitMTPError about anything else.

    A key that stands twice in one object is a fault too: which of the two is meant is a guess.
    """
    try:
        value = json.loads(data, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as fault:
        raise BitMTPError(f"{where} is not valid JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise BitMTPError(f"{where} must hold a JSON object, not a {type(value).__name__}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shown(twice)} stands twice in one object")
    return result
