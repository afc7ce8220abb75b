"""Models in and out of Hugging Face directories, latent or packed."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from bitmtp_tvm.checkpoint.base import dense_shapes, matrix_shapes
from bitmtp_tvm.checkpoint.hf import HFCheckpoint, hf_name, open_hf_directory
from bitmtp_tvm.checkpoint.hf_files import HFFiles
from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.checkpoint.options import CheckpointOptions
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.training.files import written
from bitmtp_tvm.training.low_bit import ternary_matrix
from bitmtp_tvm.training.model import TrainableDecoder
from relax_models.config import ModelConfig
from relax_models.formats import bf16_bits, bf16_to_float32

_CLASSES = {"bitnet": "BitNetForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Files that belong to a text model and are taken along as they are.
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
# The rule of a Qwen3's weights, which the compiler asks for with --quant.
_RULE = "low_bit"
SHARD_BYTES = 256 << 20
# Rows of a packed matrix are a multiple of this.
_PACKED_ROWS = 4


def load(
    path: Path,
    *,
    quant: str | None = None,
    quant_threshold: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> TrainableDecoder:
    """The model in a Hugging Face directory: BitNet, packed or latent, or latent Qwen3.

    A Qwen3 needs its rule: `quant`, or what `save` wrote into config.json. Packed weights become
    latent ones that give back the same codes and scales. Raises BitMTPError as `open_checkpoint`
    does.
    """
    path = Path(path)
    # For the sentence about a path that holds no checkpoint; the file is read again below.
    stored = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    rule = stored.get(_RULE)
    if quant is None and isinstance(rule, Mapping):
        quant = rule.get("rule")
        quant_threshold = rule.get("threshold") if quant_threshold is None else quant_threshold
    checkpoint = open_hf_directory(path, CheckpointOptions(quant, quant_threshold))
    model = TrainableDecoder(checkpoint.config, quant, quant_threshold, dtype)
    files = HFFiles(path)
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name in dense_shapes(checkpoint.config):
            parameters.pop(f"{hf_name(name)}.weight").copy_(_dense(checkpoint, name))
        for name in matrix_shapes(checkpoint.config):
            parameters.pop(f"{hf_name(name)}.weight").copy_(_latent(checkpoint, files, name))
    assert not parameters
    return model


def _dense(checkpoint: HFCheckpoint, name: str) -> Tensor:
    values = checkpoint.dense(name)
    return torch.from_numpy(bf16_to_float32(values) if name == "embed" else values)


def _latent(checkpoint: HFCheckpoint, files: HFFiles, name: str) -> Tensor:
    stored = f"{hf_name(name)}.weight"
    if files.entry(stored).dtype != "U8":
        return torch.from_numpy(files.read_float(stored))
    codes, scale = checkpoint.low_bit(name)
    return torch.from_numpy(latent_of(codes, float(scale)))  # type: ignore[arg-type]


def latent_of(codes: np.ndarray, scale: float) -> np.ndarray:
    """bfloat16 values, as float32 `(N, K)`, that BitNet's rule turns into these codes and scale.

    With a share f of weights that are not zero, ±scale / f has the mean magnitude `scale`. It lies
    between two neighbours in bfloat16: a mix of them comes near it, and one of the zeros takes what
    is left. Raises BitMTPError for a matrix of zeros alone, which has no scale.
    """
    signs = codes.astype(np.float32) - 1
    kept = np.flatnonzero(signs)
    if not len(kept):
        raise BitMTPError("a packed matrix is all zeros: there is nothing to train in it")
    wanted = np.float64(np.float32(scale)) * signs.size
    low = bf16_bits(np.array([wanted / len(kept)], np.float32))
    if bf16_to_float32(low)[0] * len(kept) > wanted:
        low -= np.uint16(1)
    small, large = (float(bf16_to_float32(bits)[0]) for bits in (low, low + np.uint16(1)))
    more = int((wanted - small * len(kept)) / (large - small))
    values = np.zeros(signs.size, np.float32)
    values[kept] = small
    values[kept[:more]] = large
    rest = wanted - (small * (len(kept) - more) + large * more)
    zeros = np.flatnonzero(signs == 0)
    if len(zeros) and rest > 0:
        filling = float(bf16_to_float32(bf16_bits(np.array([rest], np.float32)))[0])
        values[zeros[0]] = min(filling, 0.25 * scale)
    return values.reshape(signs.shape) * np.where(signs == 0, 1, signs)


def save(
    model: TrainableDecoder,
    path: Path,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    text_files: Path | None = None,
    ids: Mapping[str, Any] | None = None,
    packed: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json with its "mtp", safetensors and the tokenizer's files into `path`.

    Latent weights are bfloat16; `packed` writes a BitNet's codes as uint8 with a float32 scale a
    matrix instead. `tensors`: values that stand for the model's own, by parameter name.
    `text_files`: a directory with a tokenizer.json, or that file; `ids`: entries such as
    bos_token_id. The files appear one by one, each complete; config.json last. Raises UsageError
    for packing anything but a BitNet.
    """
    config = model.config
    if packed:
        check_packable(config)
    values = dict(tensors) if tensors is not None else dict(model.named_parameters())
    stored: dict[str, Tensor] = {}
    for name, value in values.items():
        value = value.detach().cpu()
        if packed and "_proj." in name:
            stored[name], stored[f"{name}_scale"] = packed_matrix(value)
        else:
            stored[name] = value.bfloat16().contiguous()
    path.mkdir(parents=True, exist_ok=True)
    _write_tensors(path, stored, shard_bytes)
    _copy_text_files(path, text_files)
    _replace(path / "config.json", json.dumps(config_json(model, ids or {}, packed), indent=1))


def check_packable(config: ModelConfig) -> None:
    """Raise UsageError for a model that `save` cannot write packed."""
    if config.architecture != "bitnet":
        raise UsageError("only a BitNet can be written packed: its compiler knows the layout")
    sizes = (config.query_width, config.key_value_width, config.hidden_size)
    for rows in (*sizes, config.intermediate_size):
        if rows % _PACKED_ROWS:
            raise UsageError(f"matrices of {rows} rows, not a multiple of {_PACKED_ROWS}")


def packed_matrix(latent: Tensor) -> tuple[Tensor, Tensor]:
    """A latent `(N, K)` as BitNet checkpoints pack it: uint8 `(N / 4, K)` and the scale `(1,)`.

    The layout is that of `bitmtp_tvm.checkpoint.hf_weights`. UsageError where N is no multiple of
    4.
    """
    signs, scale = ternary_matrix(latent)
    if len(signs) % _PACKED_ROWS:
        raise UsageError(f"a matrix of {len(signs)} rows cannot be packed: not a multiple of 4")
    quarters = (signs + 1).to(torch.uint8).view(4, -1, signs.shape[1])
    merged = quarters[0]
    for i in range(1, 4):
        merged = merged | (quarters[i] << (2 * i))
    return merged.contiguous(), scale.reshape(1)


def config_json(model: TrainableDecoder, ids: Mapping[str, Any], packed: bool) -> dict[str, Any]:
    """The config.json that `bitmtp_tvm.checkpoint` and transformers read."""
    config = model.config
    values: dict[str, Any] = {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        **_shape(config),
        "torch_dtype": "bfloat16",
        **{key: value for key, value in ids.items() if value is not None},
    }
    if config.architecture == "bitnet":
        values["quantization_config"] = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline" if packed else "online",
        }
    if model.quantizer is not None:
        values[_RULE] = {"rule": model.quantizer.name, "threshold": model.quantizer.threshold}
    if config.mtp is not None:
        values["mtp"] = dict(vars(config.mtp))
    return values


def _shape(config: ModelConfig) -> dict[str, Any]:
    ours = {"architecture", "mtp", "weight_format", "quantization", "rope_scaling"}
    values = {key: value for key, value in config.to_dict().items() if key not in ours}
    if config.rope_scaling is not None:
        yarn = {k: v for k, v in vars(config.rope_scaling).items() if v is not None}
        values["rope_scaling"] = {"rope_type": "yarn", **yarn}
    return values


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    for name, value in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + value.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = value
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for old in path.glob("model*.safetensors*"):
        if old.name not in names:
            old.unlink()
    for name, shard in zip(names, shards, strict=True):
        with written(path / name) as partial:
            # The library makes files that only their owner can read; keep what the umask says.
            partial.touch()
            mode = partial.stat().st_mode
            save_file(shard, partial, metadata={"format": "pt"})
            partial.chmod(mode)
    if len(shards) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(t.nbytes for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _replace(path / "model.safetensors.index.json", json.dumps(index, indent=1))


def _copy_text_files(path: Path, source: Path | None) -> None:
    if source is None:
        return
    folder = source.parent if source.is_file() else source
    for name in _TEXT_FILES:
        found = source if name == "tokenizer.json" and source.is_file() else folder / name
        if found.is_file() and found.resolve() != (path / name).resolve():
            shutil.copyfile(found, path / name)


def _replace(path: Path, text: str) -> None:
    """Write a file beside its place and rename it."""
    with written(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
