"""The shape of a model, read from its checkpoint or taken from a preset; pure Python."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from relax_models.formats import get_format

# What float32 arithmetic still has room above.
_LARGEST = 1e30
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
class YarnConfig:
    """Rotary embeddings stretched by YaRN; names and formula are those of transformers."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # What cosine and sine are multiplied by; None: 0.1 * ln(factor) + 1.
    attention_factor: float | None = None

    def validate(self) -> None:
        """Raise ValueError, one sentence, for values that give no rotary table."""
        name = "original_max_position_embeddings"
        _check_positive(f"rope_scaling.{name}", self.original_max_position_embeddings)
        for name in ("factor", "beta_fast", "beta_slow"):
            _check_number(f"rope_scaling.{name}", getattr(self, name))
        if self.factor < 1:
            raise ValueError(f"rope_scaling.factor is {self.factor!r}; it must be at least 1")
        if self.attention_factor is not None:
            _check_number("rope_scaling.attention_factor", self.attention_factor)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"rope_scaling.beta_fast is {self.beta_fast!r}; it must not be below beta_slow, "
                f"{self.beta_slow!r}"
            )


@dataclass(frozen=True)
class Architecture:
    """What the model code of one architecture can compute."""

    activations: tuple[str, ...]
    weight_formats: tuple[str, ...]
    # Whether the head may be a matrix of its own.
    untied: bool


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
    # A key of `relax_models.formats.FORMATS`: how the low-bit matrices are stored.
    weight_format: str = "bitnet-ternary"
    rope_scaling: YarnConfig | None = None
    # Where the low-bit values come from, in words, for the manifest: "packed", or the rule that
    # made them of wider weights.
    quantization: str = ""

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
        for name, part in (("mtp", MTPConfig), ("rope_scaling", YarnConfig)):
            if values.get(name) is not None:
                values[name] = _construct(part, values[name], name)
        config = _construct(cls, values, "the model configuration")
        config.validate()
        return config

    def validate(self) -> None:
        """Raise ValueError, one sentence, for what the model code cannot compute."""
        if self.architecture not in tuple(ARCHITECTURES):
            raise ValueError(
                f"architecture is {self.architecture!r}; known: {', '.join(ARCHITECTURES)}"
            )
        for name in _SIZES:
            _check_positive(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            _check_number(name, getattr(self, name))
        self._validate_structure()
        self._validate_architecture(ARCHITECTURES[self.architecture])
        group = get_format(self.weight_format).group
        if group is not None:
            self._validate_groups(group)
        if not isinstance(self.quantization, str):
            raise ValueError(f"quantization is {self.quantization!r}; it must be a text")
        if self.mtp is not None:
            self.mtp.validate(self.vocab_size)
        if self.rope_scaling is not None:
            self.rope_scaling.validate()
            if self.rope_theta <= 1:
                raise ValueError(f"rope_theta is {self.rope_theta!r}; YaRN needs one above 1")

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

    def _validate_architecture(self, architecture: Architecture) -> None:
        if self.hidden_act not in architecture.activations:
            raise ValueError(
                f"hidden_act is {self.hidden_act!r}; {self.architecture} is only supported with "
                f"{_alternatives(architecture.activations)}"
            )
        if self.weight_format not in architecture.weight_formats:
            raise ValueError(
                f"weight_format is {self.weight_format!r}; {self.architecture} is only supported "
                f"with {_alternatives(architecture.weight_formats)}"
            )
        if type(self.tie_word_embeddings) is not bool:
            raise ValueError(
                f"tie_word_embeddings is {self.tie_word_embeddings!r}; it must be true or false"
            )
        if not self.tie_word_embeddings and not architecture.untied:
            raise ValueError(
                f"tie_word_embeddings is False; {self.architecture} is only supported with tied "
                "embeddings"
            )

    def _validate_groups(self, group: int) -> None:
        widths = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads * head_dim": self.query_width,
        }
        for name, width in widths.items():
            if width % group:
                raise ValueError(
                    f"{name} is {width}; {self.weight_format} needs a multiple of {group}"
                )


ARCHITECTURES = {
    "bitnet": Architecture(("relu2", "silu"), ("bitnet-ternary",), untied=False),
    "qwen3": Architecture(("silu",), ("ternary-g128", "binary-g128"), untied=True),
}


def _bonsai(**shape: Any) -> ModelConfig:
    """One of the Bonsai models, which all share these values."""
    return ModelConfig(
        **shape,
        architecture="qwen3",
        vocab_size=151669,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        hidden_act="silu",
        weight_format="ternary-g128",
    )


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
    "bonsai-1.7b": _bonsai(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "bonsai-4b": _bonsai(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "bonsai-8b": _bonsai(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        max_position_embeddings=65536,
        rope_scaling=YarnConfig(factor=4.0, original_max_position_embeddings=16384),
        tie_word_embeddings=False,
    ),
}


def _alternatives(names: tuple[str, ...]) -> str:
    return " or ".join(repr(name) for name in names)


def _check_number(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < _LARGEST:  # type: ignore[operator]
        shown = f"{value!r:.40}"
        raise ValueError(f"{name} is {shown}; it must be a positive number up to {_LARGEST:g}")


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
