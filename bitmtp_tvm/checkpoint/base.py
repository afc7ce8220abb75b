"""What every checkpoint offers, whatever file it came from: a configuration and named tensors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from relax_models.config import ModelConfig

# One scale a matrix, or `(N, K / 128)` float16: one for every group of 128 columns of a row.
Scale: TypeAlias = float | np.ndarray


class Checkpoint(ABC):
    """A model on its way into the compiler; tensors are read one at a time and never kept.

    Low-bit matrices are named `layers.{i}.{q,k,v,o,gate,up,down}_proj`, for a qwen3 also `embed`
    and, where it is not tied, `head`. Dense tensors are `norm`, `layers.{i}.input_norm` and
    `layers.{i}.post_attention_norm`; for a bitnet `embed`, `layers.{i}.attn_sub_norm` and
    `layers.{i}.ffn_sub_norm`; for a qwen3 `layers.{i}.q_norm` and `layers.{i}.k_norm`.
    `matrix_shapes` and `dense_shapes` list them.
    """

    name: str
    config: ModelConfig
    # tokenizer.json where the checkpoint is a directory that has one; see `tokenizer_json`.
    tokenizer: Path | None
    # A prompt is `[bos_token_id] + encode(text, add_special_tokens=False)` where this is set, and
    # without the bos where it is not; the tokenizer's post-processor is already taken into account.
    add_bos: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    # The Jinja text that turns messages into a prompt, or None where the checkpoint has none.
    chat_template: str | None = None
    # What chat templates call tokens, "bos_token" and so on, and the text of each.
    special_tokens: Mapping[str, str] = MappingProxyType({})

    def tokenizer_json(self) -> bytes | None:
        """The contents of a tokenizer.json, or None where the checkpoint has no tokenizer."""
        return self.tokenizer.read_bytes() if self.tokenizer else None

    @abstractmethod
    def low_bit(self, name: str) -> tuple[np.ndarray, Scale]:
        """Codes `(N, K)` uint8 and the scale of one matrix, in `config.weight_format`.

        "bitnet-ternary": codes in {0, 1, 2} and one float, with int8 activations q `(W, K)` of
        scales s `(W,)`: y = (q @ (codes - 1).T) / s * scale. With groups the scales are
        `(N, K / 128)` float16, and a weight is (code - 1) * scale (ternary) or (2 * code - 1) *
        scale (binary).
        Raises BitMTPError when the file does not hold that matrix intact, KeyError for a name that
        is not in `matrix_shapes`.
        """

    @abstractmethod
    def dense(self, name: str) -> np.ndarray:
        """A norm's weight, float32 `(K,)`; "embed": bfloat16 bits as uint16 `(vocab_size, hidden)`.

        Raises BitMTPError when the file does not hold it intact, KeyError for a name that is not in
        `dense_shapes`.
        """


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name and shape `(N, K)` of every low-bit matrix of a model, in the order of use."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    query, key_value = config.query_width, config.key_value_width
    one_layer = {
        "q_proj": (query, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, int]] = {}
    if config.architecture == "qwen3":
        shapes["embed"] = (config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in one_layer.items()}
    if not config.tie_word_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every other tensor of a model: the norms, and a bitnet's embedding."""
    if config.architecture == "qwen3":
        one_layer = {
            "input_norm": config.hidden_size,
            "q_norm": config.head_dim,
            "k_norm": config.head_dim,
            "post_attention_norm": config.hidden_size,
        }
        shapes: dict[str, tuple[int, ...]] = {}
    else:
        one_layer = {
            "input_norm": config.hidden_size,
            "attn_sub_norm": config.query_width,
            "post_attention_norm": config.hidden_size,
            "ffn_sub_norm": config.intermediate_size,
        }
        shapes = {"embed": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}": (size,) for name, size in one_layer.items()}
    return shapes | {"norm": (config.hidden_size,)}
