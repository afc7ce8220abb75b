"""A Hugging Face directory with packed BitNet weights: config.json, safetensors, tokenizer.json.

Packed weights are uint8 `(N/4, K)`: bits 2i..2i+1 of row r hold the code of row i * (N/4) + r. With
N = 8, K = 1 and the codes 0 1 2 0 1 1 2 0 of rows 0..7:
- r = 0 holds rows 0, 2, 4, 6: 0 | 2 << 2 | 1 << 4 | 2 << 6 = 0x98;
- r = 1 holds rows 1, 3, 5, 7: 1 | 0 << 2 | 1 << 4 | 0 << 6 = 0x11.
"""

import re
from pathlib import Path

import numpy as np

from bitmtp_tvm.checkpoint.base import Checkpoint, dense_shapes, matrix_shapes
from bitmtp_tvm.checkpoint.hf_config import read_model_config
from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.checkpoint.safetensors_file import SafetensorsFile
from bitmtp_tvm.checkpoint.token_ids import read_token_ids
from bitmtp_tvm.errors import BitMTPError
from relax_models.config import ModelConfig
from relax_models.formats import bf16_bits, bf16_to_float32

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("BF16", "F16", "F32")
_BF16_INFINITY = 0x7F80
_ROWS_AT_ONCE = 4096

_DENSE = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "input_norm": "input_layernorm.weight",
    "attn_sub_norm": "self_attn.attn_sub_norm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "ffn_sub_norm": "mlp.ffn_sub_norm.weight",
}
_MATRIX = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}

# Allowed element types, and the shape.
Wanted = tuple[tuple[str, ...], tuple[int, ...]]


class HFCheckpoint(Checkpoint):
    """See `open_hf_directory`."""

    def __init__(self, directory: Path) -> None:
        self.name = directory.resolve().name
        self.config, raw = read_model_config(directory / "config.json")
        ids = read_token_ids(directory, raw, self.config.vocab_size)
        self.tokenizer = ids.tokenizer
        self.add_bos = ids.add_bos
        self.bos_token_id = ids.bos_token_id
        self.eos_token_ids = ids.eos_token_ids
        self._matrices = matrix_shapes(self.config)
        self._dense = dense_shapes(self.config)
        self._files = _open_files(directory)
        _check_tensors(directory, self._files, _expected(directory, self.config))

    def low_bit(self, name: str) -> tuple[np.ndarray, float]:
        """See `Checkpoint.low_bit`."""
        n, k = self._matrices[name]
        stem = _hf_name(name, _MATRIX)
        packed = self._read(f"{stem}.weight")
        if np.any(packed & (packed >> np.uint8(1)) & np.uint8(0x55)):
            raise self._fault(f"{stem}.weight", "holds the code 3, which is no ternary weight")
        codes = np.empty((4, n // 4, k), np.uint8)
        for i in range(4):
            codes[i] = (packed >> np.uint8(2 * i)) & np.uint8(3)
        scale = float(self._read_float(f"{stem}.weight_scale")[0])
        if scale <= 0:
            raise self._fault(f"{stem}.weight_scale", f"is {scale}; a scale must be positive")
        return codes.reshape(n, k), scale

    def dense(self, name: str) -> np.ndarray:
        """See `Checkpoint.dense`; an embedding of another float type is rounded to bfloat16."""
        if name not in self._dense:
            raise KeyError(name)
        stored = _hf_name(name, _DENSE)
        if name != "embed":
            return self._read_float(stored)
        if self._files[stored].entries[stored].dtype != "BF16":
            return _rounded(self._read_float(stored))
        bits = self._read(stored)
        if np.any(bits & np.uint16(_BF16_INFINITY) == _BF16_INFINITY):
            raise self._fault(stored, "holds a value that is not finite")
        return bits

    def _read(self, stored: str) -> np.ndarray:
        return self._files[stored].read(stored)

    def _read_float(self, stored: str) -> np.ndarray:
        """A finite tensor of one of `_FLOATS` as float32."""
        bf16 = self._files[stored].entries[stored].dtype == "BF16"
        raw = self._read(stored)
        values = bf16_to_float32(raw) if bf16 else raw.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise self._fault(stored, "holds a value that is not finite")
        return values

    def _fault(self, stored: str, what: str) -> BitMTPError:
        return BitMTPError(f"{self._files[stored].path}: tensor {stored} {what}")


def open_hf_directory(directory: Path) -> HFCheckpoint:
    """The checkpoint in `directory`: configuration, ids and headers checked, no tensor read yet.

    Raises BitMTPError, one sentence that names file, tensor or option, for whatever is missing, too
    much, of the wrong shape or type, or not supported.
    """
    if directory.is_file():
        raise BitMTPError(f"{directory} is a file; only Hugging Face directories can be read")
    if not directory.is_dir():
        raise BitMTPError(f"{directory} does not exist")
    if not (directory / "config.json").is_file():
        raise BitMTPError(f"{directory} is not a Hugging Face checkpoint: it has no config.json")
    return HFCheckpoint(directory)


def _rounded(table: np.ndarray) -> np.ndarray:
    """float32 `(V, H)` to bfloat16 bits, block by block: temporaries of a whole table are large."""
    bits = np.empty(table.shape, np.uint16)
    for start in range(0, len(table), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        bits[rows] = bf16_bits(table[rows])
    return bits


def _hf_name(name: str, names: dict[str, str]) -> str:
    """Our name to the one in the file: "layers.3.input_norm" to "model.layers.3.input_layer…"."""
    match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
    return f"model.layers.{match[1]}.{names[match[2]]}" if match else names[name]


def _expected(directory: Path, config: ModelConfig) -> dict[str, Wanted]:
    """Allowed element types and shape of every tensor that the files must hold, and no other."""
    expected: dict[str, Wanted] = {}
    for name, dense_shape in dense_shapes(config).items():
        expected[_hf_name(name, _DENSE)] = (_FLOATS, dense_shape)
    for name, (n, k) in matrix_shapes(config).items():
        stem = _hf_name(name, _MATRIX)
        if n % 4:
            raise BitMTPError(
                f"{directory / 'config.json'} gives {stem} {n} rows; packed BitNet weights need a "
                "multiple of 4"
            )
        expected[f"{stem}.weight"] = (("U8",), (n // 4, k))
        expected[f"{stem}.weight_scale"] = (_FLOATS, (1,))
    return expected


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


def _check_tensors(
    directory: Path, files: dict[str, SafetensorsFile], expected: dict[str, Wanted]
) -> None:
    """Every tensor of the model is there with its shape and type, and there is no other."""
    missing = [name for name in expected if name not in files]
    if missing:
        raise BitMTPError(f"{directory} lacks tensor {missing[0]}{_more(missing)}")
    extra = [name for name in files if name not in expected]
    if extra:
        raise BitMTPError(
            f"{files[extra[0]].path} holds tensor {extra[0]}{_more(extra)}, which the model that "
            "config.json describes has no place for"
        )
    for name, (dtypes, shape) in expected.items():
        entry = files[name].entries[name]
        if entry.dtype not in dtypes:
            raise BitMTPError(
                f"{files[name].path}: tensor {name} is {entry.dtype}, "
                f"expected {' or '.join(dtypes)}"
            )
        if entry.shape != shape:
            raise BitMTPError(
                f"{files[name].path}: tensor {name} has shape {entry.shape}, config.json asks for "
                f"{shape}"
            )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
