"""A Hugging Face directory with a BitNet or a Qwen3: config.json, safetensors, tokenizer.json."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.checkpoint.base import Checkpoint, Scale, dense_shapes, matrix_shapes
from bitmtp_tvm.checkpoint.hf_config import read_architecture, read_matrices, read_model_config
from bitmtp_tvm.checkpoint.hf_files import FLOATS, HFFiles, Wanted
from bitmtp_tvm.checkpoint.hf_weights import Master
from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.checkpoint.options import CheckpointOptions
from bitmtp_tvm.checkpoint.token_ids import read_token_ids
from bitmtp_tvm.errors import BitMTPError
from relax_models.formats import bf16_bits

_BF16_INFINITY = 0x7F80
_ROWS_AT_ONCE = 4096

_EMBED, _HEAD = "model.embed_tokens", "lm_head"
_NAMES = {
    "embed": _EMBED,
    "head": _HEAD,
    "norm": "model.norm",
    "input_norm": "input_layernorm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}


class HFCheckpoint(Checkpoint):
    """See `open_hf_directory`."""

    def __init__(self, directory: Path, options: CheckpointOptions) -> None:
        path = directory / "config.json"
        raw = read_json(path)
        architecture = read_architecture(path, raw)
        self._how = read_matrices(path, raw, architecture, options)
        self._files = HFFiles(directory)
        # The embedding of a shipped Qwen3 has fewer rows than its config.json says.
        rows = _rows(self._files) if architecture == "qwen3" else None
        self.name = directory.resolve().name
        self.config = read_model_config(path, raw, architecture, self._how, rows, options)
        ids = read_token_ids(directory, raw, self.config.vocab_size, architecture == "bitnet")
        self.tokenizer = ids.tokenizer
        self.add_bos = ids.add_bos
        self.bos_token_id = ids.bos_token_id
        self.eos_token_ids = ids.eos_token_ids
        self.chat_template = ids.chat_template
        self.special_tokens = ids.special_tokens
        self._matrices = matrix_shapes(self.config)
        self._dense = dense_shapes(self.config)
        self._check(raw)

    def low_bit(self, name: str) -> tuple[np.ndarray, Scale]:
        """See `Checkpoint.low_bit`."""
        n, k = self._matrices[name]
        if name == "embed":
            self._check_tied()
        return self._how.read(self._files, hf_name(name), n, k)

    def dense(self, name: str) -> np.ndarray:
        """See `Checkpoint.dense`; an embedding of another float type is rounded to bfloat16."""
        if name not in self._dense:
            raise KeyError(name)
        stored = f"{hf_name(name)}.weight"
        if name != "embed":
            return self._files.read_float(stored)
        self._check_tied()
        if self._files.entry(stored).dtype != "BF16":
            return _rounded(self._files.read_float(stored))
        bits = self._files.read(stored)
        if np.any(bits & np.uint16(_BF16_INFINITY) == _BF16_INFINITY):
            raise self._files.fault(stored, "holds a value that is not finite")
        return bits

    def _check(self, raw: dict[str, Any]) -> None:
        """Headers against the configuration."""
        expected: dict[str, Wanted] = {}
        for name, dense_shape in dense_shapes(self.config).items():
            expected[f"{hf_name(name)}.weight"] = (FLOATS, dense_shape)
        for name, (n, k) in self._matrices.items():
            expected |= self._how.expected(self._files, hf_name(name), n, k)
        head = f"{_HEAD}.weight"
        if self.config.tie_word_embeddings:
            # Some files hold the tied head once more: `_check_tied` makes sure that it is the same.
            expected[head] = (FLOATS, (self.config.vocab_size, self.config.hidden_size))
        elif head not in self._files:
            raise BitMTPError(
                f"{self._files.directory} lacks tensor {head}, but config.json sets "
                "tie_word_embeddings to false"
            )
        self._check_unpacked(raw)
        self._files.check(expected, optional={head} if self.config.tie_word_embeddings else ())

    def _check_unpacked(self, raw: dict[str, Any]) -> None:
        """Packed weights need the quantization_config that says what their scale means."""
        first = f"{hf_name('layers.0.q_proj')}.weight"
        if not isinstance(self._how, Master) or first not in self._files:
            return
        if self._files.entry(first).dtype == "U8":
            stored = raw.get("quantization_config")
            key = "quantization_config" if stored is None else "quantization_mode"
            value = None if stored is None else stored["quantization_mode"]
            raise self._files.fault(first, f"is packed, but in config.json {key} is {value!r}")

    def _check_tied(self) -> None:
        """A head that is stored though it is tied must be the embedding."""
        head, embed = f"{_HEAD}.weight", f"{_EMBED}.weight"
        if not self.config.tie_word_embeddings or head not in self._files:
            return
        for start in range(0, self.config.vocab_size, _ROWS_AT_ONCE):
            stop = start + _ROWS_AT_ONCE
            one, two = (self._files.read_float(name, start, stop) for name in (head, embed))
            if not np.array_equal(one, two):
                raise self._files.fault(
                    head, f"differs from {embed}, but config.json sets tie_word_embeddings to true"
                )


def open_hf_directory(directory: Path, options: CheckpointOptions | None = None) -> HFCheckpoint:
    """The checkpoint in `directory`: configuration, ids and headers checked, no tensor read yet.

    Raises BitMTPError, one sentence that names file, tensor or option, for whatever is missing, too
    much, of the wrong shape or type, or not supported.
    """
    if directory.is_file():
        raise BitMTPError(f"{directory} is a file; give a GGUF file or a Hugging Face directory")
    if not directory.is_dir():
        raise BitMTPError(f"{directory} does not exist")
    if not (directory / "config.json").is_file():
        raise BitMTPError(f"{directory} is not a Hugging Face checkpoint: it has no config.json")
    return HFCheckpoint(directory, options or CheckpointOptions())


def _rows(files: HFFiles) -> int:
    """Rows of the embedding, as its header gives them."""
    name = f"{_EMBED}.weight"
    if name not in files:
        raise BitMTPError(f"{files.directory} lacks tensor {name}")
    shape = files.entry(name).shape
    if len(shape) != 2:
        raise files.fault(name, f"has shape {shape}; an embedding is a matrix")
    return shape[0]


def _rounded(table: np.ndarray) -> np.ndarray:
    """float32 `(V, H)` to bfloat16 bits, block by block: temporaries of a whole table are large."""
    bits = np.empty(table.shape, np.uint16)
    for start in range(0, len(table), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        bits[rows] = bf16_bits(table[rows])
    return bits


def hf_name(name: str) -> str:
    """Our name to a stem in the file: "layers.3.input_norm" to "model.layers.3.input_layernorm"."""
    match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
    return f"model.layers.{match[1]}.{_NAMES[match[2]]}" if match else _NAMES[name]
