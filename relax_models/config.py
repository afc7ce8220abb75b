"""The shape of a model, read from its checkpoint or taken from a preset; pure Python."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
BLOCK_ATTENTIONS = ("causal", "bidirectional")


@dataclass(frozen=True)
class MTPConfig:
    """The joint objective a model was trained with: what its mask rows mean."""

    block_size: int
    mask_token_id: int
    label: str = "next"
    block_attention: str = "causal"

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError, one sentence, for a setting that no decoder here supports."""
        _check_positive("mtp.block_size", self.block_size)
        if not _is_integer(self.mask_token_id) or not 0 <= self.mask_token_id < vocab_size:
            raise ValueError(
                f"mtp.mask_token_id is {self.mask_token_id!r}, outside the {vocab_size} rows of "
                "the vocabulary"
            )
        if self.label != "next":
            raise ValueError(f"mtp.label is {self.label!r}; only 'next' is supported")
        if self.block_attention not in BLOCK_ATTENTIONS:
            raise ValueError(
                f"mtp.block_attention is {self.block_attention!r}; known: "
                f"{', '.join(BLOCK_ATTENTIONS)}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass depends on; the names are those of Hugging Face's config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    hidden_act: str
    tie_word_embeddings: bool
    mtp: MTPConfig | None = None

    @property
    def query_width(self) -> int:
        """Columns of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Columns of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """A validated configuration; a missing or unknown key is a ValueError."""
        values = dict(values)
        if values.get("mtp") is not None:
            values["mtp"] = _construct(MTPConfig, values["mtp"], "mtp")
        config = _construct(cls, values, "the model configuration")
        config.validate()
        return config

    def validate(self) -> None:
        """Raise ValueError, one sentence, for what the model code cannot compute."""
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"architecture is {self.architecture!r}; known: {', '.join(ARCHITECTURES)}"
            )
        for name in _SIZES:
            _check_positive(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value!r}; it must be a positive number")
        self._validate_structure()
        if self.mtp is not None:
            self.mtp.validate(self.vocab_size)

    def _validate_structure(self) -> None:
        # A limit against damaged files: everything below counts tensors layer by layer.
        if self.num_hidden_layers > 1024:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}; the limit is 1024")
        if self.hidden_size % 8:
            raise ValueError(f"hidden_size is {self.hidden_size}; it must be a multiple of 8")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of "
                f"num_key_value_heads, {self.num_key_value_heads}"
            )
        if self.hidden_act != ARCHITECTURES[self.architecture]:
            raise ValueError(
                f"hidden_act is {self.hidden_act!r}; {self.architecture} is only supported with "
                f"{ARCHITECTURES[self.architecture]!r}"
            )
        if self.tie_word_embeddings is not True:
            raise ValueError(
                f"tie_word_embeddings is {self.tie_word_embeddings!r}; only tied embeddings are "
                "supported"
            )


# The activation that each architecture computes.
ARCHITECTURES = {"bitnet": "relu2"}

PRESETS = {
    "bitnet-2b": ModelConfig(
        architecture="bitnet",
        vocab_size=128256,
        hidden_size=2560,
        intermediate_size=6912,
        num_hidden_layers=30,
        num_attention_heads=20,
        num_key_value_heads=5,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=4096,
        hidden_act="relu2",
        tie_word_embeddings=True,
    ),
}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_positive(name: str, value: object) -> None:
    if not _is_integer(value) or not 0 < value < 1 << 31:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}; it must be a positive 32-bit number")


def _construct(cls: type, values: object, where: str) -> Any:
    """`cls(**values)` with a sentence about the keys that do not fit."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be an object, got {values!r}")
    unknown = sorted(str(key) for key in set(values) - {field.name for field in fields(cls)})
    if unknown:
        raise ValueError(f"{where} has unknown keys: {', '.join(unknown)}")
    required = [field.name for field in fields(cls) if field.default is MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    return cls(**values)
