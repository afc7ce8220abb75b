"""Rotary embeddings of a config.json: the base, and YaRN where the file asks for it."""

import math
from pathlib import Path
from typing import Any, TypeVar

from bitmtp_tvm.errors import BitMTPError

T = TypeVar("T")

_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Keys of transformers' YaRN that are passed on as they are.
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
_MSCALE = ("mscale", "mscale_all_dim")
# YaRN options that change the table, and the only value that it is computed for (or null).
_NEUTRAL = {"truncate": True}
_PLACES = ("rope_parameters", "rope_scaling")


def read_rope(path: Path, raw: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """The base, and the fields of a YarnConfig or None, from config.json (`raw`).

    Files of all ages are read: the base stands beside the other keys or in `rope_parameters`, YaRN
    in `rope_scaling` or `rope_parameters`. Raises BitMTPError for another kind of rotary embedding,
    an unknown key, and places that contradict each other.
    """
    bases = {"rope_theta": raw["rope_theta"]} if raw.get("rope_theta") is not None else {}
    scalings: dict[str, dict[str, Any] | None] = {}
    for place in _PLACES:
        rope = raw.get(place)
        if rope is None:
            continue
        scalings[place] = _scaling(path, place, rope)
        if rope.get("rope_theta") is not None:
            bases[place] = rope["rope_theta"]
    if not bases:
        raise BitMTPError(f"{path} lacks rope_theta")
    base = _agreed(path, "rope_theta", bases)
    yarn = _agreed(path, "the rotary scaling", scalings) if scalings else None
    return base, _with_length(path, raw, yarn)


def _scaling(path: Path, place: str, rope: Any) -> dict[str, Any] | None:
    """The fields of a YarnConfig from one of `_PLACES`, or None for plain rotary embeddings."""
    if not isinstance(rope, dict):
        raise _unsupported(path, place, rope)
    kinds = [kind for kind in (rope.get("rope_type"), rope.get("type")) if kind is not None]
    known = _ALWAYS if kinds in ([], ["default"], ["default"] * 2) else set()
    if kinds in (["yarn"], ["yarn"] * 2):
        known = _ALWAYS | {*_YARN, *_MSCALE, *_NEUTRAL}
    neutral = {"partial_rotary_factor": 1, **_NEUTRAL}
    if not rope.keys() <= known or any(
        rope.get(key) not in (None, value) for key, value in neutral.items()
    ):
        raise _unsupported(path, place, rope)
    if "yarn" not in kinds:
        return None
    yarn = {key: rope[key] for key in _YARN if rope.get(key) is not None}
    if "attention_factor" not in yarn and all(rope.get(key) for key in _MSCALE):
        yarn["attention_factor"] = _attention_factor(path, place, rope)
    if "factor" not in yarn:
        raise BitMTPError(f"{path}: {place} asks for YaRN and lacks its factor")
    return yarn


def _attention_factor(path: Path, place: str, rope: dict[str, Any]) -> float:
    """What transformers makes of mscale and mscale_all_dim."""
    values: list[Any] = [rope.get(key) for key in ("factor", *_MSCALE)]
    if not all(type(value) in (int, float) and 0 < value < 1e6 for value in values):
        raise _unsupported(path, place, rope)
    factor, mscale, all_dim = values
    if factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)


def _with_length(
    path: Path, raw: dict[str, Any], yarn: dict[str, Any] | None
) -> dict[str, Any] | None:
    """`yarn` with the trained length, which must stand somewhere."""
    if yarn is None:
        return None
    key = "original_max_position_embeddings"
    lengths = {
        place: values[key]
        for place, values in (("config", raw), ("the rotary scaling", yarn))
        if values.get(key) is not None
    }
    if not lengths:
        raise BitMTPError(f"{path}: rope_scaling asks for YaRN and lacks {key}")
    return yarn | {key: _agreed(path, key, lengths)}


def _unsupported(path: Path, place: str, rope: Any) -> BitMTPError:
    return BitMTPError(
        f"{path}: {place} is {rope!r}; only default rotary embeddings and YaRN are supported"
    )


def _agreed(path: Path, what: str, values: dict[str, T]) -> T:
    """The one value that stands in every place."""
    first, *others = values.values()
    if any(other != first for other in others):
        raise BitMTPError(
            f"{path}: {what} differs between its places: "
            f"{', '.join(f'{value!r} in {place}' for place, value in values.items())}"
        )
    return first
