"""Named tensors of a checkpoint to the packed parameters of the compiled model.

This module is the one place for parameter names; the model in `relax_models` uses the same ones.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from bitmtp_tvm.checkpoint.base import Checkpoint, dense_shapes, matrix_shapes
from bitmtp_tvm.errors import BitMTPError
from relax_models.bounded_head import bounds_shape, codes_shape, pack_codes, pays
from relax_models.config import ModelConfig, YarnConfig
from relax_models.formats import (
    Format,
    get_format,
    pack,
    pack_scales,
    packed_dtype,
    packed_shape,
    scales_shape,
)

# Matrices that are multiplied by the same activations are stored as one; each part keeps its scale.
FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
# The parts of a layer in the order of use: keys of FUSED, and dense tensors by their parameter.
_LAYERS = {
    "bitnet": (
        "input_norm.weight",
        "qkv",
        "attn_sub_norm.weight",
        "o",
        "post_attention_norm.weight",
        "gate_up",
        "ffn_sub_norm.weight",
        "down",
    ),
    "qwen3": (
        "input_norm.weight",
        "qkv",
        "qk.q_norm",
        "qk.k_norm",
        "o",
        "post_attention_norm.weight",
        "gate_up",
        "down",
    ),
}
SHARD_BYTES = 256 * 2**20
_HASH_BLOCK = 2**20
Spec = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Dense:
    """A tensor that is stored as the checkpoint gives it."""

    parameter: str
    # The name in the checkpoint.
    source: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class LowBit:
    """A matrix of `sum(rows)` x `k`: parameters `{stem}.weight` and `{stem}.scale`."""

    stem: str
    # The names in the checkpoint of the parts, and the rows of each.
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    k: int


def model_tensors(config: ModelConfig) -> Iterator[Dense | LowBit]:
    """What the parameters of a model are made of, in their order, all but the rotary table."""
    matrices, dense = matrix_shapes(config), dense_shapes(config)

    def low_bit(stem: str, *sources: str) -> LowBit:
        rows = tuple(matrices[source][0] for source in sources)
        return LowBit(stem, sources, rows, matrices[sources[0]][1])

    if "embed" in matrices:
        yield low_bit("embed", "embed")
    else:
        yield Dense("embed.weight", "embed", dense["embed"], "uint16")
    if "head" in matrices:
        yield low_bit("head", "head")
    for i in range(config.num_hidden_layers):
        for part in _LAYERS[config.architecture]:
            if part in FUSED:
                yield low_bit(f"layers.{i}.{part}", *(f"layers.{i}.{m}" for m in FUSED[part]))
                continue
            source = f"layers.{i}.{part.removesuffix('.weight').removeprefix('qk.')}"
            yield Dense(f"layers.{i}.{part}", source, dense[source], "float32")
    yield Dense("norm.weight", "norm", dense["norm"], "float32")


def segments(config: ModelConfig, matrix: str) -> tuple[int, ...]:
    """Rows of each part of a fused matrix ("qkv", "o", "gate_up", "down")."""
    shapes = matrix_shapes(config)
    return tuple(shapes[f"layers.0.{part}"][0] for part in FUSED[matrix])


def parameter_specs(config: ModelConfig, kind: str, context_slots: int) -> dict[str, Spec]:
    """Name to (shape, dtype) of every parameter, in the order that `pack_parameters` gives them.

    `kind` is the target kind, one of KINDS; `context_slots` the number of rotary positions.
    """
    form = get_format(config.weight_format)
    specs: dict[str, Spec] = {}
    for tensor in model_tensors(config):
        if isinstance(tensor, Dense):
            specs[tensor.parameter] = (tensor.shape, tensor.dtype)
            if is_coded(tensor, kind):
                specs["embed.codes"] = (codes_shape(*tensor.shape), "uint32")
                specs["embed.bounds"] = (bounds_shape(tensor.shape[0]), "float32")
            continue
        n, k = sum(tensor.rows), tensor.k
        specs[f"{tensor.stem}.weight"] = (packed_shape(kind, n, k, form.bits), packed_dtype(kind))
        specs[f"{tensor.stem}.scale"] = (
            ((len(tensor.rows),), "float32")
            if form.group is None
            else (scales_shape(kind, n, k, form.bits), "float16")
        )
    specs["rope.table"] = ((context_slots, config.head_dim // 2, 2), "float32")
    return specs


def pack_parameters(
    checkpoint: Checkpoint, kind: str, rope_positions: int
) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters of `parameter_specs`, in that order, one at a time in memory.

    Raises BitMTPError when the checkpoint cannot give a tensor.
    """
    config = checkpoint.config
    form = get_format(config.weight_format)
    for tensor in model_tensors(config):
        if isinstance(tensor, Dense):
            yield from _dense_parameters(checkpoint, tensor, kind)
            continue
        codes, scales = read_matrix(checkpoint, tensor, form)
        packed = pack(codes, kind, form.bits)
        del codes
        yield f"{tensor.stem}.weight", packed
        del packed
        if form.group is not None:
            scales = pack_scales(scales, kind, form.bits)
        yield f"{tensor.stem}.scale", scales
    yield "rope.table", rope_table(config, rope_positions)


def is_coded(tensor: Dense, kind: str) -> bool:
    """Whether the head has an 8-bit copy of this tensor on targets of `kind`."""
    return tensor.source == "embed" and pays(kind, *tensor.shape)


def _dense_parameters(
    checkpoint: Checkpoint, tensor: Dense, kind: str
) -> Iterator[tuple[str, np.ndarray]]:
    values = checkpoint.dense(tensor.source)
    yield tensor.parameter, values
    if is_coded(tensor, kind):
        codes, bounds = pack_codes(values)
        del values
        yield "embed.codes", codes
        del codes
        yield "embed.bounds", bounds


def read_matrix(
    checkpoint: Checkpoint, tensor: LowBit, form: Format
) -> tuple[np.ndarray, np.ndarray]:
    """Codes `(N, K)` uint8, the parts' rows in turn, and scales.

    The scales are float32 `(parts,)`, or with groups float16 `(N, K / 128)`. The rows keep this
    plain order whatever the tile: only the end of the whole is padded.
    """
    parts = [checkpoint.low_bit(source) for source in tensor.sources]
    codes = parts[0][0] if len(parts) == 1 else np.concatenate([part[0] for part in parts])
    if form.group is None:
        return codes, np.array([scale for _, scale in parts], np.float32)
    return codes, np.concatenate([np.asarray(scale, np.float16) for _, scale in parts])


def rope_table(config: ModelConfig, positions: int) -> np.ndarray:
    """Cosine and sine of position * inv_freq: float32 `(positions, head_dim / 2, 2)`.

    inv_freq_i = 1 / theta^(2i / head_dim), stretched where the config asks for YaRN, and the angle
    are rounded to float32, as in transformers, so that far positions turn by the same angle; cosine
    and sine themselves are taken in float64. YaRN's attention factor multiplies both.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.power(np.float64(config.rope_theta), exponents).astype(np.float32)
    inverse, factor = np.float32(1) / powers, 1.0
    if config.rope_scaling is not None:
        inverse = _stretched(config, config.rope_scaling, powers)
        factor = _attention_factor(config.rope_scaling)
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse
    wide = angles.astype(np.float64)
    return (np.stack([np.cos(wide), np.sin(wide)], axis=-1) * factor).astype(np.float32)


def _stretched(config: ModelConfig, yarn: YarnConfig, powers: np.ndarray) -> np.ndarray:
    """inv_freq of YaRN, float32 `(head_dim / 2,)`: dimensions that turn more than beta_fast times
    within the trained length stay, those below beta_slow turns are slowed by the factor.

    Source: arXiv 2309.00071, section 3.2, in the form that transformers computes.
    """
    dim, theta = config.head_dim, config.rope_theta

    def dimension(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), dim - 1)
    span = np.float32(high - low if high != low else 1e-3)
    kept = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - low) / span, 0, 1)
    slow = np.float32(1) / (np.float32(yarn.factor) * powers)
    return slow * (1 - kept) + np.float32(1) / powers * kept


def _attention_factor(yarn: YarnConfig) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    return 0.1 * math.log(yarn.factor) + 1


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
