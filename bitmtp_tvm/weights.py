"""Named tensors of a checkpoint to the packed parameters of the compiled model.

This module is the one place for parameter names; the model in `relax_models` uses the same ones.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from bitmtp_tvm.checkpoint.base import Checkpoint, matrix_shapes
from bitmtp_tvm.errors import BitMTPError
from relax_models.config import ModelConfig
from relax_models.formats import pack, packed_dtype, packed_shape

# Matrices that are multiplied by the same activations are stored as one; each part keeps its scale.
FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
# The parameters of a layer in the order of use.
_LAYER = (
    "input_norm",
    "qkv",
    "attn_sub_norm",
    "o",
    "post_attention_norm",
    "gate_up",
    "ffn_sub_norm",
    "down",
)
SHARD_BYTES = 256 * 2**20
_HASH_BLOCK = 2**20
Spec = tuple[tuple[int, ...], str]


def segments(config: ModelConfig, matrix: str) -> tuple[int, ...]:
    """Rows of each part of a fused matrix ("qkv", "o", "gate_up", "down"): one scale for each."""
    shapes = matrix_shapes(config)
    return tuple(shapes[f"layers.0.{part}"][0] for part in FUSED[matrix])


def parameter_specs(config: ModelConfig, kind: str, context_slots: int) -> dict[str, Spec]:
    """Name to (shape, dtype) of every parameter, in the order that `pack_parameters` gives them.

    `kind` is the target kind, a key of LAYOUTS; `context_slots` the number of rotary positions.
    """
    hidden, shapes = config.hidden_size, matrix_shapes(config)
    norms = {
        "input_norm": hidden,
        "attn_sub_norm": config.query_width,
        "post_attention_norm": hidden,
        "ffn_sub_norm": config.intermediate_size,
    }
    specs: dict[str, Spec] = {"embed.weight": ((config.vocab_size, hidden), "uint16")}
    for i in range(config.num_hidden_layers):
        for name in _LAYER:
            stem = f"layers.{i}.{name}"
            if name in norms:
                specs[f"{stem}.weight"] = ((norms[name],), "float32")
                continue
            rows, k = sum(segments(config, name)), shapes[f"layers.{i}.{FUSED[name][0]}"][1]
            specs[f"{stem}.weight"] = (packed_shape(kind, rows, k), packed_dtype(kind))
            specs[f"{stem}.scale"] = ((len(FUSED[name]),), "float32")
    specs["norm.weight"] = ((hidden,), "float32")
    specs["rope.table"] = ((context_slots, config.head_dim // 2, 2), "float32")
    return specs


def pack_parameters(
    checkpoint: Checkpoint, kind: str, rope_positions: int
) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters of `parameter_specs`, in that order, one at a time in memory.

    Raises BitMTPError when the checkpoint cannot give a tensor.
    """
    config = checkpoint.config
    yield "embed.weight", checkpoint.dense("embed")
    for i in range(config.num_hidden_layers):
        for name in _LAYER:
            stem = f"layers.{i}.{name}"
            if name not in FUSED:
                yield f"{stem}.weight", checkpoint.dense(stem)
                continue
            codes, scales = fused_matrix(checkpoint, i, name)
            yield f"{stem}.weight", pack(codes, kind)
            yield f"{stem}.scale", scales
    yield "norm.weight", checkpoint.dense("norm")
    yield "rope.table", rope_table(config, rope_positions)


def fused_matrix(checkpoint: Checkpoint, layer: int, matrix: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes `(N, K)` uint8, the parts' rows in turn, and the parts' scales float32 `(parts,)`.

    The rows keep this plain order whatever the tile: only the end of the whole is padded.
    """
    parts = [checkpoint.low_bit(f"layers.{layer}.{part}") for part in FUSED[matrix]]
    codes = parts[0][0] if len(parts) == 1 else np.concatenate([part[0] for part in parts])
    return codes, np.array([scale for _, scale in parts], np.float32)


def rope_table(config: ModelConfig, positions: int) -> np.ndarray:
    """Cosine and sine of position * inv_freq: float32 `(positions, head_dim / 2, 2)`.

    inv_freq_i = 1 / theta^(2i / head_dim) and the angle are rounded to float32, as in transformers,
    so that far positions turn by the same angle; cosine and sine themselves are taken in float64.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.power(np.float64(config.rope_theta), exponents).astype(np.float32)
    inverse = np.float32(1) / powers
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse
    wide = angles.astype(np.float64)
    return np.stack([np.cos(wide), np.sin(wide)], axis=-1).astype(np.float32)


def write_parameters(
    directory: Path, parameters: Iterable[tuple[str, np.ndarray]]
) -> list[dict[str, str | int]]:
    """Write safetensors shards `params-00001.safetensors`, … into `directory`, which exists.

    A shard is full at `SHARD_BYTES`; a larger tensor gets one of its own. Returns
    `{"file", "bytes", "sha256"}` of each. Raises BitMTPError when a file cannot be written.
    """
    records: list[dict[str, str | int]] = []
    waiting: dict[str, np.ndarray] = {}
    for name, tensor in parameters:
        size = sum(part.nbytes for part in waiting.values())
        if waiting and size + tensor.nbytes > SHARD_BYTES:
            records.append(_write_shard(directory, len(records) + 1, waiting))
            waiting = {}
        waiting[name] = np.ascontiguousarray(tensor)
    if waiting:
        records.append(_write_shard(directory, len(records) + 1, waiting))
    return records


def _write_shard(
    directory: Path, number: int, tensors: dict[str, np.ndarray]
) -> dict[str, str | int]:
    path = directory / f"params-{number:05d}.safetensors"
    try:
        # The library makes files that only their owner can read; keep what the umask says instead.
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path)
        path.chmod(mode)
        digest = _sha256(path)
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}
    except (OSError, SafetensorError) as fault:
        raise BitMTPError(f"{path} cannot be written: {fault}") from fault


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
