"""Transformers' dense model of a shape, and its forward over a static cache.

Embedding, rotary tables, layers, norm and head are Transformers' own. What stands here is what its
model does between them, in a form in which one compiled program serves every layer.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

ROOM = 64
"""The static cache is a multiple of so many tokens, which kernels of attention like."""

CONFIGS = {"bitnet": "BitNetConfig", "qwen3": "Qwen3Config"}
"""Transformers' class of a configuration by the architecture of ours."""

_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
    "tie_word_embeddings",
)


def build_model(config: Mapping[str, Any], device: str, dtype: Any) -> Any:
    """Transformers' causal model of a manifest's `config`, with random weights made on `device`."""
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    yarn = config.get("rope_scaling")
    if yarn:
        rope |= {"rope_type": "yarn", **{k: v for k, v in yarn.items() if v is not None}}
    kind = getattr(transformers, CONFIGS[config["architecture"]])
    same = {name: config[name] for name in _SHARED}
    # Ids of special tokens have defaults that a small vocabulary lacks.
    shape = kind(**same, rope_parameters=rope, bos_token_id=0, eos_token_id=0, pad_token_id=None)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            shape, dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval()


class LayerCache:
    """What a layer asks of its cache; its storage has a place for every token from the start.

    Storage: keys and values, each `(1, heads, room, head_dim)`; positions `(W,)` int64.
    """

    def __init__(self, storage: tuple[Any, Any], positions: Any) -> None:
        self.storage, self.positions = storage, positions

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write keys and values `(1, heads, W, head_dim)`, and give all that is stored."""
        for stored, new in zip(self.storage, (keys, values), strict=True):
            stored.index_copy_(2, self.positions, new)
        return self.storage


def enter(model: Any, tokens: Any, positions: Any, places: Any) -> tuple[Any, Any, Any]:
    """Hidden states `(1, W, hidden)`, the mask `(1, 1, W, room)` bool that lets a row see what
    stands before it and itself, and the rotary tables. `places`: 0 to room - 1."""
    hidden = model.model.embed_tokens(tokens)
    mask = (places <= positions[:, None])[None, None]
    return hidden, mask, model.model.rotary_emb(hidden, position_ids=positions[None])


def run_layer(layer: Any, name: str, hidden: Any, mask: Any, rope: Any, cache: LayerCache) -> Any:
    """`name`: of the layer's argument for its cache."""
    return layer(hidden, attention_mask=mask, position_embeddings=rope, **{name: cache})


def leave(model: Any, hidden: Any) -> tuple[Any, Any]:
    """Logits `(1, W, vocabulary)` and their argmax `(1, W)`."""
    logits = model.lm_head(model.model.norm(hidden))
    return logits, logits.argmax(-1)


Pieces = tuple[Callable[..., Any], ...]
PIECES: Pieces = (enter, run_layer, leave)


def compiled_pieces(**options: Any) -> Pieces:
    """PIECES under torch.compile, which gets `options`."""
    return tuple(torch.compile(piece, dynamic=False, **options) for piece in PIECES)


class CachedForward:
    """The forward of a model over W new tokens, behind those that its static cache holds."""

    def __init__(self, model: Any, tokens: int) -> None:
        """`tokens`: what the cache needs room for."""
        self.model, self.room = model, -(-tokens // ROOM) * ROOM
        shape, head = model.config, model.lm_head.weight
        self._places = torch.arange(self.room, device=head.device)
        size = (1, shape.num_key_value_heads, self.room, shape.head_dim)
        self._storage = [
            tuple(torch.zeros(size, dtype=head.dtype, device=head.device) for _ in range(2))
            for _ in model.model.layers
        ]
        # The argument was renamed within Transformers 5.
        known = inspect.signature(model.model.layers[0].forward).parameters
        self._name = "cache" if "cache" in known else "past_key_values"

    def __call__(self, tokens: Any, positions: Any, pieces: Pieces = PIECES) -> tuple[Any, Any]:
        """Logits `(1, W, vocabulary)` and argmax `(1, W)` of `tokens (1, W)` at `positions (W,)`,
        both int64."""
        first, middle, last = pieces
        hidden, mask, rope = first(self.model, tokens, positions, self._places)
        for layer, storage in zip(self.model.model.layers, self._storage, strict=True):
            cache = LayerCache(storage, positions)
            hidden = middle(layer, self._name, hidden, mask, rope, cache)
        return last(self.model, hidden)

    def rows(self, width: int, start: int) -> tuple[Any, Any]:
        """Some tokens `(1, width)`, and their positions from `start` on."""
        device = self.model.lm_head.weight.device
        positions = torch.arange(start, start + width, device=device)
        return (1 + positions % 7)[None], positions

    def prefill(self, tokens: int) -> None:
        """Fill the cache with so many tokens."""
        if tokens:
            self(*self.rows(tokens, 0))
