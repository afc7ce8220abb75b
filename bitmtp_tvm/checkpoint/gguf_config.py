"""The keys of a GGUF file to the shape of a model; what is not supported is refused by its name."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.checkpoint.gguf_file import GGUFFile
from bitmtp_tvm.errors import BitMTPError, shown

# The file's architecture: ours, and the activation that it computes where no key says so.
ARCHITECTURES = {
    "bitnet-b1.58": ("bitnet", "relu2"),
    "bitnet-25": ("bitnet", "relu2"),
    "bitnet": ("bitnet", "silu"),
    "qwen3": ("qwen3", "silu"),
}
_ACTIVATIONS = {"relu2": "relu2", "relu_sqr": "relu2", "silu": "silu", "swiglu": "silu"}
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation")
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
# Keys that change the forward pass, and the values at which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
# Weights that only mean something after a rotation of the activations.
_ROTATION = "hadamard"


def read_gguf_values(file: GGUFFile) -> dict[str, Any]:
    """What the keys say, by the names of ModelConfig, but for the vocabulary and the weights.

    Raises BitMTPError for another architecture, a missing or mistyped key, and every key that asks
    for something which the forward pass does not compute.
    """
    keys = Keys(file)
    if rotated := [key for key in file.keys if _ROTATION in key.lower()]:
        raise BitMTPError(
            f"{file.path} has the key {rotated[0]!r}: its weights need a Hadamard rotation of the "
            "activations, which is not supported"
        )
    architecture, activation = ARCHITECTURES[keys.architecture]
    for key, neutral in _NEUTRAL.items():
        keys.neutral(key, neutral)
    values: dict[str, Any] = {name: keys.integer(key) for name, key in _SIZES.items()}
    heads = values["num_attention_heads"]
    values["architecture"] = architecture
    values["hidden_act"] = _activation(keys, activation)
    values["num_key_value_heads"] = keys.integer("attention.head_count_kv", heads)
    values["head_dim"] = _head_dim(keys, values["hidden_size"], heads)
    values["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    values["rope_theta"] = keys.number("rope.freq_base")
    values["rope_scaling"] = _rope_scaling(keys, architecture)
    return values


class Keys:
    """The keys `{architecture}.…` of a file, each with the type that it must have."""

    def __init__(self, file: GGUFFile) -> None:
        self.path: Path = file.path
        self._keys = file.keys
        name = file.keys.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise BitMTPError(
                f"{file.path}: general.architecture is {shown(name)}; supported are "
                f"{', '.join(ARCHITECTURES)}"
            )
        self.architecture = name

    def get(self, key: str) -> Any:
        return self._keys.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int:
            raise self.fault(key, value, "it must be a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; float32 comes as the shortest decimal, so that 1e-5 is what it was."""
        value = self.get(key)
        value = default if value is None else value
        if type(value) not in (int, float):
            raise self.fault(key, value, "it must be a number")
        with np.errstate(over="ignore"):
            return float(str(np.float32(value)))

    def neutral(self, key: str, allowed: tuple[Any, ...]) -> None:
        value = self.get(key)
        if value is not None and (isinstance(value, np.ndarray | list) or value not in allowed):
            raise self.fault(key, value, f"only {' or '.join(map(str, allowed))} is supported")

    def fault(self, key: str, value: Any, what: str) -> BitMTPError:
        name = f"{self.architecture}.{key}"
        if value is None:
            return BitMTPError(f"{self.path} lacks the key {name}")
        return BitMTPError(f"{self.path}: {name} is {shown(value)}; {what}")


def _activation(keys: Keys, default: str) -> str:
    for key in _ACTIVATION_KEYS:
        value = keys.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or value.lower() not in _ACTIVATIONS:
            raise keys.fault(key, value, f"known are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value.lower()]
    return default


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    derived = hidden // heads if heads > 0 and hidden % heads == 0 else None
    size = keys.integer("attention.key_length", derived)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, size) != size:
            raise keys.fault(key, keys.get(key), f"only the size of a head, {size}, is supported")
    return size


def _rope_scaling(keys: Keys, architecture: str) -> dict[str, Any] | None:
    """The values of a YarnConfig, or None where positions are not scaled."""
    kind, factor = keys.get("rope.scaling.type"), keys.number("rope.scaling.factor", 1.0)
    old = keys.number("rope.scale_linear", 1.0)
    if old != 1:
        raise keys.fault("rope.scale_linear", old, "only 1 is supported")
    if kind in (None, "none", "linear") and factor in (0.0, 1.0):
        return None
    if kind != "yarn" or architecture != "qwen3":
        raise keys.fault(
            "rope.scaling.type", kind or "linear", "only yarn, for qwen3, is supported"
        )
    values: dict[str, Any] = {
        "factor": factor,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{name}") is not None:
            values[name] = keys.number(f"rope.scaling.yarn_{name}")
    attention = keys.number("rope.scaling.yarn_attn_factor", 1.0)
    attention *= keys.number("rope.scaling.attn_factor", 1.0)
    if attention != 1:
        values["attention_factor"] = attention * (1 + 0.1 * math.log(max(factor, 1.0)))
    return values
