"""config.json of a Hugging Face directory to a ModelConfig; the unsupported is refused."""

from pathlib import Path
from typing import Any

from bitmtp_tvm.checkpoint.hf_rope import read_rope
from bitmtp_tvm.checkpoint.hf_weights import Grouped, Master, Matrices, Packed
from bitmtp_tvm.checkpoint.options import CheckpointOptions
from bitmtp_tvm.errors import BitMTPError
from relax_models.config import ModelConfig

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
)
# The class in config.json, lower case (both BitNet… and Bitnet… are in published files), and the
# architecture, which is its model_type too.
_CLASSES = {"bitnetforcausallm": "bitnet", "qwen3forcausallm": "qwen3"}
# Options that change the forward pass, and the only value that it is written for (or null).
_NEUTRAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1,
}


def read_architecture(path: Path, raw: dict[str, Any]) -> str:
    """The architecture that config.json (`raw`) names; BitMTPError for another one."""
    names = raw.get("architectures")
    found = {_CLASSES.get(str(n).lower()) for n in names} if isinstance(names, list) else set()
    if len(found) != 1 or None in found:
        raise BitMTPError(
            f"{path}: architectures is {names!r}; only BitNetForCausalLM and Qwen3ForCausalLM are "
            "supported"
        )
    architecture = str(found.pop())
    if raw.get("model_type", architecture) != architecture:
        raise BitMTPError(
            f"{path}: model_type is {raw['model_type']!r}; only {architecture!r} is supported"
        )
    return architecture


def read_matrices(
    path: Path, raw: dict[str, Any], architecture: str, options: CheckpointOptions
) -> Matrices:
    """How the matrices are stored, by `quantization_config` and the options and never by guess.

    Raises BitMTPError for another quantisation, and for options that are missing or too much.
    """
    stored = raw.get("quantization_config")
    if architecture == "qwen3":
        for key in ("quantization_config", "quantization"):
            if raw.get(key) is not None:
                raise BitMTPError(
                    f"{path}: {key} is {raw[key]!r}; a Qwen3 checkpoint must hold plain weights"
                )
        return Grouped(options.require_quantizer(path.parent))
    options.refuse_quant(path.parent, "a BitNet has one scale a matrix, and its own rule")
    return Master() if stored is None else _bitnet_matrices(path, stored)


def _bitnet_matrices(path: Path, stored: Any) -> Matrices:
    if not isinstance(stored, dict):
        raise BitMTPError(f"{path}: quantization_config is {stored!r}; it must be an object")

    def refused(key: str, known: str) -> BitMTPError:
        return BitMTPError(
            f"{path}: quantization_config.{key} is {stored.get(key)!r}; only {known} is supported"
        )

    if stored.get("quant_method") != "bitnet":
        raise refused("quant_method", "'bitnet'")
    if stored.get("use_rms_norm"):
        raise BitMTPError(f"{path}: quantization_config.use_rms_norm is set; it is not supported")
    if stored.get("modules_to_not_convert") not in (None, [], ["lm_head"]):
        raise BitMTPError(
            f"{path}: quantization_config.modules_to_not_convert is "
            f"{stored['modules_to_not_convert']!r}; every matrix but lm_head must be low-bit"
        )
    linear, mode = stored.get("linear_class"), stored.get("quantization_mode")
    if linear == "autobitlinear" and mode == "online":
        return Master()
    if linear not in ("autobitlinear", "bitlinear"):
        raise refused("linear_class", "'autobitlinear' or 'bitlinear'")
    # Files from before the modes have none: their weights are packed.
    if mode != "offline" and not (linear == "bitlinear" and mode is None):
        raise refused("quantization_mode", f"'offline' with {linear!r}")
    return Packed(divides=linear == "bitlinear")


def read_model_config(
    path: Path,
    raw: dict[str, Any],
    architecture: str,
    matrices: Matrices,
    rows: int | None,
    options: CheckpointOptions,
) -> ModelConfig:
    """The model configuration in the config.json at `path` (`raw`).

    `rows`: those of the embedding, where they count and not `vocab_size`. Raises BitMTPError for a
    missing key, an impossible value, and every option that the forward pass does not implement.
    """
    _check_options(path, raw, architecture)
    values = {key: _required(path, raw, key) for key in _REQUIRED}
    values["vocab_size"] = _required(path, raw, "vocab_size") if rows is None else rows
    values["architecture"] = architecture
    values["weight_format"] = matrices.weight_format
    values["quantization"] = matrices.quantization
    values["rope_theta"], values["rope_scaling"] = read_rope(path, raw)
    values["num_key_value_heads"] = _or_default(
        raw, "num_key_value_heads", values["num_attention_heads"]
    )
    values["head_dim"] = _or_default(raw, "head_dim", None)
    if values["head_dim"] is None:
        values["head_dim"] = _derived_head_dim(path, values)
    values["mtp"] = options.mtp(path, raw.get("mtp"))
    try:
        return ModelConfig.from_dict(values)
    except ValueError as fault:
        raise BitMTPError(f"{path}: {fault}") from fault


def _check_options(path: Path, raw: dict[str, Any], architecture: str) -> None:
    neutral: dict[str, Any] = dict(_NEUTRAL)
    if architecture == "bitnet":
        neutral["sliding_window"] = None
    for key, value in neutral.items():
        if raw.get(key) not in (None, value):
            raise BitMTPError(f"{path}: {key} is {raw[key]!r}; only {value!r} is supported")
    kinds = raw.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    ):
        raise BitMTPError(f"{path}: layer_types is {kinds!r}; only full_attention is supported")
    for key, value in raw.items():
        if "hadamard" in key.lower() and value not in (None, False):
            raise BitMTPError(f"{path}: {key} asks for a Hadamard rotation, which is not supported")


def _required(path: Path, raw: dict[str, Any], key: str) -> Any:
    if key not in raw:
        raise BitMTPError(f"{path} lacks {key}")
    return raw[key]


def _or_default(raw: dict[str, Any], key: str, default: Any) -> Any:
    return default if raw.get(key) is None else raw[key]


def _derived_head_dim(path: Path, values: dict[str, Any]) -> int:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if type(hidden) is not int or type(heads) is not int or heads <= 0 or hidden % heads:
        raise BitMTPError(
            f"{path} lacks head_dim, and hidden_size {hidden!r} does not divide into "
            f"num_attention_heads {heads!r}"
        )
    return hidden // heads
