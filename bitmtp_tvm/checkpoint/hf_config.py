"""config.json of a Hugging Face BitNet directory to a ModelConfig; the unsupported is refused."""

from pathlib import Path
from typing import Any

from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.errors import BitMTPError
from relax_models.config import ModelConfig

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
)
# Options that change the forward pass, and the only value that it is written for (or null).
_NEUTRAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "partial_rotary_factor": 1,
}
_QUANTIZATION = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "offline",
}


def read_model_config(path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model configuration in the config.json at `path`, and the raw JSON object.

    Raises BitMTPError for another architecture or quantisation, a missing key, an impossible value,
    and every option that the forward pass does not implement.
    """
    raw = read_json(path)
    _check_architecture(path, raw)
    _check_quantization(path, raw.get("quantization_config"))
    for key, neutral in _NEUTRAL.items():
        if raw.get(key) not in (None, neutral):
            raise BitMTPError(f"{path}: {key} is {raw[key]!r}; only {neutral!r} is supported")
    values = {key: _required(path, raw, key) for key in _REQUIRED}
    values["architecture"] = "bitnet"
    values["rope_theta"] = _rope_theta(path, raw)
    values["num_key_value_heads"] = _or_default(
        raw, "num_key_value_heads", values["num_attention_heads"]
    )
    values["head_dim"] = _or_default(raw, "head_dim", None)
    if values["head_dim"] is None:
        values["head_dim"] = _derived_head_dim(path, values)
    values["mtp"] = raw.get("mtp")
    try:
        return ModelConfig.from_dict(values), raw
    except ValueError as fault:
        raise BitMTPError(f"{path}: {fault}") from fault


def _check_architecture(path: Path, raw: dict[str, Any]) -> None:
    names = raw.get("architectures")
    # Both spellings, BitNet… and Bitnet…, are in published files.
    if not isinstance(names, list) or "bitnetforcausallm" not in [str(n).lower() for n in names]:
        raise BitMTPError(
            f"{path}: architectures is {names!r}; only BitNetForCausalLM is supported"
        )
    if raw.get("model_type", "bitnet") != "bitnet":
        raise BitMTPError(
            f"{path}: model_type is {raw['model_type']!r}; only 'bitnet' is supported"
        )


def _check_quantization(path: Path, raw: Any) -> None:
    """Only packed weights whose scale multiplies; the legacy class divides by it."""
    if not isinstance(raw, dict):
        raise BitMTPError(
            f"{path}: quantization_config is {raw!r}; only packed BitNet weights are supported"
        )
    for key, wanted in _QUANTIZATION.items():
        if raw.get(key) != wanted:
            raise BitMTPError(
                f"{path}: quantization_config.{key} is {raw.get(key)!r}; "
                f"only {wanted!r} is supported"
            )
    if raw.get("use_rms_norm"):
        raise BitMTPError(f"{path}: quantization_config.use_rms_norm is set; it is not supported")
    if raw.get("modules_to_not_convert") not in (None, [], ["lm_head"]):
        raise BitMTPError(
            f"{path}: quantization_config.modules_to_not_convert is "
            f"{raw['modules_to_not_convert']!r}; every matrix but lm_head must be packed"
        )


def _rope_theta(path: Path, raw: dict[str, Any]) -> Any:
    """The base of the rotary embedding, in whichever of its three places it stands."""
    bases = {"rope_theta": raw["rope_theta"]} if raw.get("rope_theta") is not None else {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if rope is None:
            continue
        plain = isinstance(rope, dict) and rope.keys() <= {"rope_type", "type", "rope_theta"}
        kinds = (rope.get("rope_type"), rope.get("type")) if plain else ()
        if not plain or any(kind not in (None, "default") for kind in kinds):
            raise BitMTPError(
                f"{path}: {key} is {rope!r}; only default rotary embeddings are supported"
            )
        if rope.get("rope_theta") is not None:
            bases[key] = rope["rope_theta"]
    if not bases:
        raise BitMTPError(f"{path} lacks rope_theta")
    first, *others = bases.values()
    if any(other != first for other in others):
        raise BitMTPError(
            f"{path}: rope_theta differs between its places: "
            f"{', '.join(f'{base!r} in {key}' for key, base in bases.items())}"
        )
    return first


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
