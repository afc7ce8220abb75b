"""The safetensors files of a Hugging Face directory as one set of named tensors."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from bitmtp_tvm.errors import BitMTPError
from relax_models.formats import bf16_to_float32

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
FLOATS = ("BF16", "F16", "F32")

# Allowed element types, and the shape.
Wanted = tuple[tuple[str, ...], tuple[int, ...]]


class HFFiles:
    """Every tensor of a directory, whether it is one file or shards with their index."""

    def __init__(self, directory: Path) -> None:
        """Reads all headers; BitMTPError, one sentence, for what does not fit together."""
        self.directory = directory
        self._owners = _open_files(directory)

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def entry(self, name: str) -> TensorEntry:
        """Element type and shape of a tensor that is there."""
        return self._owners[name].entries[name]

    def read(self, name: str) -> np.ndarray:
        """See `SafetensorsFile.read`."""
        return self._owners[name].read(name)

    def read_float(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A tensor of one of `FLOATS`, or its rows [start, stop), as float32.

        Raises BitMTPError when a value is not finite.
        """
        file = self._owners[name]
        raw = file.read(name) if stop is None else file.read_rows(name, start, stop)
        bf16 = file.entries[name].dtype == "BF16"
        values = bf16_to_float32(raw) if bf16 else raw.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise self.fault(name, "holds a value that is not finite")
        return values

    def fault(self, name: str, what: str) -> BitMTPError:
        """The error that says so of a tensor."""
        return BitMTPError(f"{self._owners[name].path}: tensor {name} {what}")

    def check(self, expected: Mapping[str, Wanted], optional: Collection[str] = ()) -> None:
        """Every expected tensor is there with its shape and type, and no other.

        Those of `optional` may be missing. Raises BitMTPError.
        """
        missing = [name for name in expected if name not in self and name not in optional]
        if missing:
            raise BitMTPError(f"{self.directory} lacks tensor {missing[0]}{_more(missing)}")
        extra = [name for name in self._owners if name not in expected]
        if extra:
            raise BitMTPError(
                f"{self._owners[extra[0]].path} holds tensor {extra[0]}{_more(extra)}, which the "
                "model that config.json describes has no place for"
            )
        for name, (dtypes, shape) in expected.items():
            if name not in self:
                continue
            entry = self.entry(name)
            if entry.dtype not in dtypes:
                raise self.fault(name, f"is {entry.dtype}, expected {' or '.join(dtypes)}")
            if entry.shape != shape:
                raise self.fault(name, f"has shape {entry.shape}, config.json asks for {shape}")


def _open_files(directory: Path) -> dict[str, SafetensorsFile]:
    """Tensor name to the file that holds it, for a single file or shards with their index."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists() and index.exists():
        raise BitMTPError(f"{directory} has both {_SINGLE} and {_INDEX}: remove one of them")
    if single.exists():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.entries, file)
    if not index.exists():
        raise BitMTPError(f"{directory} has neither {_SINGLE} nor {_INDEX}")
    return _open_shards(directory, index)


def _open_shards(directory: Path, index: Path) -> dict[str, SafetensorsFile]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise BitMTPError(f"{index} has no weight_map")
    for name, place in places.items():
        plain = isinstance(place, str) and Path(place).name == place
        if not plain or not place.endswith(".safetensors"):
            raise BitMTPError(
                f"{index} puts tensor {name} into {place!r}, which is no safetensors file name"
            )
    owners: dict[str, SafetensorsFile] = {}
    for place in sorted(set(places.values())):
        if not (directory / place).is_file():
            raise BitMTPError(f"{index} names {place}, but {directory} does not hold it")
        file = SafetensorsFile(directory / place)
        for name in file.entries:
            if name in owners:
                raise BitMTPError(f"tensor {name} is in both {owners[name].path} and {file.path}")
            if places.get(name) != place:
                raise BitMTPError(
                    f"{file.path} holds tensor {name}, but {index} puts it into {places.get(name)}"
                )
            owners[name] = file
    for name, place in places.items():
        if name not in owners:
            raise BitMTPError(f"{directory / place} lacks tensor {name}, which {index} puts there")
    return owners


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
