"""A GGUF file with a BitNet or a Bonsai: keys, tensors and vocabulary in one."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.checkpoint import gguf_weights as weights
from bitmtp_tvm.checkpoint.base import Checkpoint, Scale, dense_shapes, matrix_shapes
from bitmtp_tvm.checkpoint.gguf_config import read_gguf_values
from bitmtp_tvm.checkpoint.gguf_file import GGUFFile, TensorEntry
from bitmtp_tvm.checkpoint.gguf_tokenizer import read_gguf_text
from bitmtp_tvm.checkpoint.gguf_types import GROUPED, Q1_0
from bitmtp_tvm.checkpoint.options import CheckpointOptions
from bitmtp_tvm.errors import BitMTPError
from relax_models.config import ModelConfig
from relax_models.formats import bf16_bits

_EMBED, _HEAD = "token_embd", "output"
# Our names to those of the file. Rows of q and k stand in the order of Hugging Face's files: only
# files of the architecture "llama" have theirs permuted.
_NAMES = {
    "embed": _EMBED,
    "head": _HEAD,
    "norm": "output_norm",
    "input_norm": "attn_norm",
    "attn_sub_norm": "attn_sub_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_norm": "ffn_norm",
    "ffn_sub_norm": "ffn_sub_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


class GGUFCheckpoint(Checkpoint):
    """See `open_gguf`."""

    tokenizer: Path | None = None

    def __init__(self, path: Path, options: CheckpointOptions) -> None:
        self.name = path.stem
        self._file = GGUFFile(path)
        self._options = options
        self.config = self._read_config()
        self._matrices = matrix_shapes(self.config)
        self._dense = dense_shapes(self.config)
        self._check_tensors()
        text = read_gguf_text(self._file, self.config.vocab_size)
        self._tokenizer = text.tokenizer
        self.add_bos = text.add_bos
        self.bos_token_id = text.bos_token_id
        self.eos_token_ids = text.eos_token_ids
        self.special_tokens = text.special_tokens
        self.chat_template = text.chat_template

    def tokenizer_json(self) -> bytes | None:
        """See `Checkpoint.tokenizer_json`."""
        return None if self._tokenizer is None else self._tokenizer.encode()

    def low_bit(self, name: str) -> tuple[np.ndarray, Scale]:
        """See `Checkpoint.low_bit`."""
        stored = _gguf_name(name)
        shape = self._matrices[name]
        if self.config.architecture != "qwen3":
            codes, scale = weights.one_scale(self._file, f"{stored}.weight", shape)
            if f"{stored}.scale" in self._file.entries:
                scale *= float(weights.floats(self._file, f"{stored}.scale")[0])
                weights.check_scale(self._file, f"{stored}.scale", scale)
            return codes, scale
        tensor = f"{stored}.weight"
        if self._file.entries[tensor].kind in GROUPED:
            binary = self.config.weight_format == "binary-g128"
            return weights.group_scales(self._file, tensor, shape, binary)
        quantizer = self._options.require_quantizer(self._file.path)
        return weights.quantized(self._file, tensor, shape, quantizer)

    def dense(self, name: str) -> np.ndarray:
        """See `Checkpoint.dense`; an embedding of any type is rounded to bfloat16."""
        shape = self._dense[name]
        tensor = f"{_gguf_name(name)}.weight"
        if name != "embed":
            return weights.floats(self._file, tensor).reshape(shape)
        bits = np.empty(shape, np.uint16)
        for rows, values in weights.blocks(self._file, tensor):
            bits[rows] = bf16_bits(values)
        return bits

    def _read_config(self) -> ModelConfig:
        path = self._file.path
        values = read_gguf_values(self._file)
        values["vocab_size"] = self._entry(f"{_EMBED}.weight").shape[0]
        values["tie_word_embeddings"] = not self._has_head(values["architecture"])
        values |= self._weight_format(values["architecture"])
        values["mtp"] = self._options.mtp(path, None)
        try:
            return ModelConfig.from_dict(values)
        except ValueError as fault:
            raise BitMTPError(f"{path}: {fault}") from fault

    def _has_head(self, architecture: str) -> bool:
        """Whether the head is a matrix of its own; a BitNet's may only be the embedding again."""
        head, embed = f"{_HEAD}.weight", f"{_EMBED}.weight"
        if head not in self._file.entries:
            return False
        if architecture == "qwen3":
            return True
        if not self._file.equal(head, embed):
            raise BitMTPError(
                f"{self._file.path}: tensor {head} differs from {embed}; a BitNet is only "
                "supported with tied embeddings"
            )
        return False

    def _weight_format(self, architecture: str) -> dict[str, Any]:
        """`weight_format` and `quantization`: what the types of the matrices amount to."""
        path, options = self._file.path, self._options
        first = self._entry("blk.0.attn_q.weight").kind
        if architecture != "qwen3":
            options.refuse_quant(path, "a BitNet has its own rule")
            return {"quantization": f"gguf {first.name}"}
        kinds = {entry.kind for entry in self._file.entries.values() if len(entry.shape) == 2}
        grouped = [kind for kind in kinds if kind in GROUPED]
        wide = [kind for kind in kinds if kind not in GROUPED]
        stored = "binary-g128" if set(grouped) == {Q1_0} else "ternary-g128"
        names = " and ".join(sorted({kind.name for kind in grouped}))
        if not wide:
            options.refuse_quant(path, "its weights are low-bit already")
            return {"weight_format": stored, "quantization": f"gguf {names}"}
        quantizer = options.require_quantizer(path)
        if grouped and quantizer.format != stored:
            raise BitMTPError(
                f"{path} has {names} matrices, {stored}, which do not go with --quant "
                f"{quantizer.name}"
            )
        made = f"{' and '.join(sorted({kind.name for kind in wide}))} {quantizer.describe()}"
        whole = f"gguf {names} and {made}" if grouped else f"gguf {made}"
        return {"weight_format": quantizer.format, "quantization": whole}

    def _entry(self, tensor: str) -> TensorEntry:
        if tensor not in self._file.entries:
            raise BitMTPError(f"{self._file.path} lacks tensor {tensor}")
        entry = self._file.entries[tensor]
        if len(entry.shape) != 2:
            raise BitMTPError(f"{self._file.path}: tensor {tensor} has shape {entry.shape}")
        return entry

    def _check_tensors(self) -> None:
        """Every tensor of the model is there with its shape, and there is no other."""
        path, entries = self._file.path, self._file.entries
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in (self._dense | self._matrices).items():
            expected[f"{_gguf_name(name)}.weight"] = shape
        if missing := [name for name in expected if name not in entries]:
            raise BitMTPError(f"{path} lacks tensor {missing[0]}{_more(missing)}")
        if self.config.architecture != "qwen3":
            expected |= {f"{_gguf_name(name)}.scale": (1,) for name in self._matrices}
            expected[f"{_HEAD}.weight"] = entries[f"{_EMBED}.weight"].shape
        if extra := [name for name in entries if name not in expected]:
            raise BitMTPError(
                f"{path} holds tensor {extra[0]}{_more(extra)}, which the model that its keys "
                "describe has no place for"
            )
        for name, entry in entries.items():
            if entry.shape != expected[name]:
                raise BitMTPError(
                    f"{path}: tensor {name} has shape {entry.shape}, its keys ask for "
                    f"{expected[name]}"
                )


def open_gguf(path: Path, options: CheckpointOptions | None = None) -> GGUFCheckpoint:
    """The checkpoint in the GGUF file at `path`: header and vocabulary checked, no tensor read yet.

    Raises BitMTPError, one sentence that names file, key or tensor, for whatever is missing, too
    much, damaged or not supported.
    """
    return GGUFCheckpoint(path, options or CheckpointOptions())


def _gguf_name(name: str) -> str:
    """Our name to the one in the file: "layers.3.input_norm" to "blk.3.attn_norm"."""
    match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
    return f"blk.{match[1]}.{_NAMES[match[2]]}" if match else _NAMES[name]


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
