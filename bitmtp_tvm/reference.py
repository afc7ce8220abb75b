"""The forward pass in numpy: slow, plain, float32, and the judge of every compiled one.

W rows go through one forward; K is the inner size of a linear and Kp its padded size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bitmtp_tvm.checkpoint.base import Checkpoint
from bitmtp_tvm.weights import FUSED, fused_matrix, rope_table, segments
from relax_models.config import ModelConfig
from relax_models.formats import bf16_to_float32, padded_k, unpack

_LEAST_ABSMAX = np.float32(1e-5)
# float32 holds every whole number up to here, so sums of small integers below it are exact.
_EXACT_FLOAT = 1 << 24


def embed(tokens: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Rows of the table: tokens `(W,)` int32, table `(V, H)` bfloat16 bits -> `(W, H)` float32."""
    return bf16_to_float32(table[tokens])


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight: x `(W, K)`, weight `(K,)` -> `(W, K)`, all float32."""
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return x * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * weight


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int8 activations, one scale a row: x `(W, K)` float32 -> q, scale, total.

    q `(W, Kp)` int8 = clip(rint(x * (127 / m)), -128, 127) with m = max(absmax, 1e-5) of the row,
    zero in the padding; scale `(W,)` float32 = m / 127; total `(W,)` int32 = the sum of q's row.
    """
    rows, k = x.shape
    largest = np.maximum(np.max(np.abs(x), axis=-1), _LEAST_ABSMAX)
    q = np.zeros((rows, padded_k(k)), np.int8)
    scaled = x * (np.float32(127) / largest)[:, None]
    q[:, :k] = np.clip(np.rint(scaled), -128, 127)
    return q, largest / np.float32(127), q.sum(axis=-1, dtype=np.int32)


def low_bit_accumulate(q: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Exact sum over k of code * q: q `(W, Kp)` int8, codes `(N, K)` uint8 -> `(W, N)` int32.

    Codes stand for weight + 1; the padding of q is 0, so the codes need none.
    """
    k = codes.shape[1]
    if k * 2 * 128 < _EXACT_FLOAT:
        return (q[:, :k].astype(np.float32) @ codes.astype(np.float32).T).astype(np.int32)
    return q[:, :k].astype(np.int32) @ codes.astype(np.int32).T


def low_bit_linear(
    q: np.ndarray,
    scale: np.ndarray,
    total: np.ndarray,
    codes: np.ndarray,
    weight_scales: np.ndarray,
    segments: Sequence[int],
) -> np.ndarray:
    """(acc - total) * (scale * weight_scale) -> `(W, N)` float32.

    q, scale, total as `quantize` gives them; codes `(N, K)` uint8; weight_scales `(parts,)`
    float32, one for each of `segments`, the rows of the parts of a fused matrix.
    """
    accumulated = low_bit_accumulate(q, codes) - total[:, None]
    per_column = np.repeat(np.asarray(weight_scales, np.float32), segments)
    return accumulated.astype(np.float32) * (scale[:, None] * per_column[None, :])


def gated_norm_quantize(
    gate: np.ndarray, up: np.ndarray, weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`quantize(rms_norm(relu(gate)^2 * up))`: gate, up `(W, F)`, weight `(F,)`, all float32."""
    positive = np.maximum(gate, np.float32(0))
    return quantize(rms_norm(positive * positive * up, weight, eps))


def rope(x: np.ndarray, positions: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Rotate-half rotary embedding, float32: element i pairs with i + D/2.

    x `(W, heads, D)`, positions `(W,)` int32, table `(positions, D/2, 2)` of cos and sin.
    """
    half = x.shape[-1] // 2
    cos, sin = table[positions, None, :, 0], table[positions, None, :, 1]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, boundary: int, visible: np.ndarray
) -> np.ndarray:
    """Softmax attention of W rows that see slots [0, boundary) and some of each other.

    q `(W, Hq, D)` float32; k_cache, v_cache `(Hkv, slots, D)` float32 with this step's rows already
    at slots boundary + i; visible `(W, W)` bool: row i sees slot boundary + j. -> `(W, Hq * D)`.
    """
    rows, heads, width = q.shape
    group = heads // k_cache.shape[0]
    slots = boundary + rows
    seen = np.concatenate([np.ones((rows, boundary), bool), visible], axis=1)
    out = np.empty_like(q)
    for h in range(heads):
        keys, values = k_cache[h // group, :slots], v_cache[h // group, :slots]
        scores = q[:, h] @ keys.T * np.float32(width**-0.5)
        scores = np.where(seen, scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = weights @ values / weights.sum(axis=-1, keepdims=True)
    return out.reshape(rows, heads * width)


def head(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Logits: x `(R, H)` float32, table `(V, H)` bfloat16 bits -> `(R, V)` float32."""
    return x @ bf16_to_float32(table).T


def greedy(logits: np.ndarray) -> np.ndarray:
    """Index of the largest logit, the lowest one on ties: `(R, V)` float32 -> `(R,)` int32.

    -1 for a row that holds a NaN, or nothing but -inf.
    """
    highest = logits.max(axis=-1)
    broken = np.isnan(highest) | (highest == -np.inf)
    return np.where(broken, -1, logits.argmax(axis=-1)).astype(np.int32)


@dataclass
class KVCache:
    """Keys (rotated) and values of all layers: each `(layers, Hkv, slots, D)` float32.

    With `half` every value is rounded to float16 as it is written, as a float16 cache holds it.
    """

    keys: np.ndarray
    values: np.ndarray
    half: bool = False

    def write(self, layer: int, slot: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Put rows `(W, Hkv, D)` into slots slot, slot + 1, …"""
        for store, rows in ((self.keys, keys), (self.values, values)):
            kept = rows.astype(np.float16) if self.half else rows
            store[layer, :, slot : slot + len(rows)] = kept.transpose(1, 0, 2)


class ReferenceModel:
    """The whole forward pass; every tensor unpacked in memory, so for small models."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> None:
        """`tensors`: names of `weights.parameter_specs`, matrices as codes `(N, K)` uint8."""
        self.config = config
        self.tensors = dict(tensors)
        self._segments = {matrix: segments(config, matrix) for matrix in FUSED}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, rope_positions: int) -> "ReferenceModel":
        """Straight from the checkpoint, no packing in between."""
        config = checkpoint.config
        tensors = {
            "embed.weight": checkpoint.dense("embed"),
            "norm.weight": checkpoint.dense("norm"),
            "rope.table": rope_table(config, rope_positions),
        }
        for i in range(config.num_hidden_layers):
            for norm in ("input_norm", "attn_sub_norm", "post_attention_norm", "ffn_sub_norm"):
                tensors[f"layers.{i}.{norm}.weight"] = checkpoint.dense(f"layers.{i}.{norm}")
            for matrix in FUSED:
                stem = f"layers.{i}.{matrix}"
                tensors[f"{stem}.weight"], tensors[f"{stem}.scale"] = fused_matrix(
                    checkpoint, i, matrix
                )
        return cls(config, tensors)

    @classmethod
    def from_packed(
        cls, config: ModelConfig, parameters: Mapping[str, np.ndarray], kind: str
    ) -> "ReferenceModel":
        """From packed parameters, as `weights.pack_parameters` gives them for `kind`."""
        tensors = dict(parameters)
        inner = {"qkv": config.hidden_size, "o": config.query_width}
        inner |= {"gate_up": config.hidden_size, "down": config.intermediate_size}
        for matrix, k in inner.items():
            for i in range(config.num_hidden_layers):
                name = f"layers.{i}.{matrix}.weight"
                tensors[name] = unpack(tensors[name], sum(segments(config, matrix)), k, kind)
        return cls(config, tensors)

    def new_cache(self, slots: int, half: bool = False) -> KVCache:
        """An empty cache of `slots` positions; NaN until written, so that a stray read shows."""
        config = self.config
        shape = (config.num_hidden_layers, config.num_key_value_heads, slots, config.head_dim)
        return KVCache(np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32), half)

    def forward(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        boundary: int,
        visible: np.ndarray | None,
        cache: KVCache,
    ) -> np.ndarray:
        """Logits `(W, V)` float32 of one step; its K/V rows go to slots boundary + i of `cache`.

        tokens, positions `(W,)` int32; visible `(W, W)` bool, plainly causal when None.
        """
        if visible is None:
            visible = np.tri(len(tokens), dtype=bool)
        x = embed(tokens, self.tensors["embed.weight"])
        for i in range(self.config.num_hidden_layers):
            x = x + self._attention(i, x, positions, boundary, visible, cache)
            x = x + self._feed_forward(i, x)
        return head(self._norm("norm", x), self.tensors["embed.weight"])

    def _attention(
        self,
        layer: int,
        x: np.ndarray,
        positions: np.ndarray,
        boundary: int,
        visible: np.ndarray,
        cache: KVCache,
    ) -> np.ndarray:
        config, rows = self.config, len(x)
        stem, table = f"layers.{layer}", self.tensors["rope.table"]
        qkv = self._linear(f"{stem}.qkv", quantize(self._norm(f"{stem}.input_norm", x)))
        heads = qkv.reshape(rows, -1, config.head_dim)
        first_key = config.num_attention_heads
        first_value = first_key + config.num_key_value_heads
        keys = rope(heads[:, first_key:first_value], positions, table)
        cache.write(layer, boundary, keys, heads[:, first_value:])
        queries = rope(heads[:, :first_key], positions, table)
        mixed = attention(queries, cache.keys[layer], cache.values[layer], boundary, visible)
        return self._linear(f"{stem}.o", quantize(self._norm(f"{stem}.attn_sub_norm", mixed)))

    def _feed_forward(self, layer: int, x: np.ndarray) -> np.ndarray:
        stem, ffn = f"layers.{layer}", self.config.intermediate_size
        activations = quantize(self._norm(f"{stem}.post_attention_norm", x))
        gate_up = self._linear(f"{stem}.gate_up", activations)
        weight = self.tensors[f"{stem}.ffn_sub_norm.weight"]
        gated = gated_norm_quantize(
            gate_up[:, :ffn], gate_up[:, ffn:], weight, self.config.rms_norm_eps
        )
        return self._linear(f"{stem}.down", gated)

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def _linear(
        self, name: str, activations: tuple[np.ndarray, np.ndarray, np.ndarray]
    ) -> np.ndarray:
        q, scale, total = activations
        codes, scales = self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"]
        parts = self._segments[name.rsplit(".", 1)[1]]
        return low_bit_linear(q, scale, total, codes, scales, parts)
