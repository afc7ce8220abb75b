"""What every checkpoint offers, whatever file it came from: a configuration and named tensors."""

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from relax_models.config import ModelConfig


class Checkpoint(ABC):
    """A model on its way into the compiler; tensors are read one at a time and never kept.

    Low-bit matrices are named `layers.{i}.{q,k,v,o,gate,up,down}_proj`; dense tensors are `embed`,
    `norm` and `layers.{i}.{input_norm,attn_sub_norm,post_attention_norm,ffn_sub_norm}`.
    `matrix_shapes` and `dense_shapes` list them.
    """

    name: str
    config: ModelConfig
    # tokenizer.json, or None where the checkpoint has none.
    tokenizer: Path | None
    # A prompt is `[bos_token_id] + encode(text, add_special_tokens=False)` where this is set, and
    # without the bos where it is not; the tokenizer's post-processor is already taken into account.
    add_bos: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @abstractmethod
    def low_bit(self, name: str) -> tuple[np.ndarray, float]:
        """Codes `(N, K)` uint8 in {0, 1, 2} and the scale of one matrix.

        For int8 activations q `(W, K)` with scales s `(W,)`: y = (q @ (codes - 1).T) / s * scale.
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
    layers = range(config.num_hidden_layers)
    return {f"layers.{i}.{name}": shape for i in layers for name, shape in one_layer.items()}


def dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every other tensor of a model: the embedding and the norms."""
    one_layer = {
        "input_norm": config.hidden_size,
        "attn_sub_norm": config.query_width,
        "post_attention_norm": config.hidden_size,
        "ffn_sub_norm": config.intermediate_size,
    }
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}": (size,) for name, size in one_layer.items()}
    return shapes | {"norm": (config.hidden_size,)}
