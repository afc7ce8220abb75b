"""The forward pass of a whole model in numpy: the judge of every compiled one."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bitmtp_tvm.checkpoint.base import Checkpoint
from bitmtp_tvm.reference.ops import (
    attention,
    dequantize,
    embed,
    gated,
    group_linear,
    head,
    low_bit_embed,
    low_bit_linear,
    qk_norm,
    quantize,
    quantize_groups,
    rms_norm,
    rope,
)
from bitmtp_tvm.weights import FUSED, Dense, model_tensors, read_matrix, rope_table, segments
from relax_models.config import ModelConfig
from relax_models.formats import get_format, unpack, unpack_scales


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
    """The whole forward pass; every tensor unpacked in memory, so for small models.

    With `float_activations` the linears take their inputs as they are, float32, instead of int8:
    what the quantisation of the activations costs is the difference.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, np.ndarray],
        float_activations: bool = False,
    ) -> None:
        """`tensors`: names of `weights.parameter_specs`, matrices as codes `(N, K)` uint8, group
        scales as `(N, K / 128)` float16."""
        self.config = config
        self.tensors = dict(tensors)
        self.float_activations = float_activations
        self._format = get_format(config.weight_format)
        self._segments = {matrix: segments(config, matrix) for matrix in FUSED}

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, rope_positions: int, float_activations: bool = False
    ) -> "ReferenceModel":
        """Straight from the checkpoint, no packing in between."""
        config = checkpoint.config
        tensors = {}
        for tensor in model_tensors(config):
            if isinstance(tensor, Dense):
                tensors[tensor.parameter] = checkpoint.dense(tensor.source)
                continue
            codes, scales = read_matrix(checkpoint, tensor, get_format(config.weight_format))
            tensors[f"{tensor.stem}.weight"], tensors[f"{tensor.stem}.scale"] = codes, scales
        tensors["rope.table"] = rope_table(config, rope_positions)
        return cls(config, tensors, float_activations)

    @classmethod
    def from_packed(
        cls, config: ModelConfig, parameters: Mapping[str, np.ndarray], kind: str
    ) -> "ReferenceModel":
        """From packed parameters, as `weights.pack_parameters` gives them for `kind`."""
        tensors, form = dict(parameters), get_format(config.weight_format)
        for tensor in model_tensors(config):
            if isinstance(tensor, Dense):
                continue
            weight, scale = f"{tensor.stem}.weight", f"{tensor.stem}.scale"
            n, k = sum(tensor.rows), tensor.k
            tensors[weight] = unpack(tensors[weight], n, k, kind, form.bits)
            if form.group is not None:
                tensors[scale] = unpack_scales(tensors[scale], n, k, kind, form.bits)
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
        x = self._embed(tokens)
        for i in range(self.config.num_hidden_layers):
            x = x + self._attention(i, x, positions, boundary, visible, cache)
            x = x + self._feed_forward(i, x)
        return self._head(self._norm("norm", x))

    def _embed(self, tokens: np.ndarray) -> np.ndarray:
        table = self.tensors["embed.weight"]
        if self._format.group is None:
            return embed(tokens, table)
        return low_bit_embed(tokens, table, self.tensors["embed.scale"], self._format.bits)

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
        qkv = self._linear(f"{stem}.qkv", self._norm(f"{stem}.input_norm", x))
        first_key = config.num_attention_heads
        if config.architecture == "qwen3":
            q_norm, k_norm = (self.tensors[f"{stem}.qk.{name}_norm"] for name in "qk")
            qkv = qk_norm(qkv, q_norm, k_norm, first_key, config.rms_norm_eps)
        heads = qkv.reshape(rows, -1, config.head_dim)
        first_value = first_key + config.num_key_value_heads
        keys = rope(heads[:, first_key:first_value], positions, table)
        cache.write(layer, boundary, keys, heads[:, first_value:])
        queries = rope(heads[:, :first_key], positions, table)
        mixed = attention(queries, cache.keys[layer], cache.values[layer], boundary, visible)
        if config.architecture == "bitnet":
            mixed = self._norm(f"{stem}.attn_sub_norm", mixed)
        return self._linear(f"{stem}.o", mixed)

    def _feed_forward(self, layer: int, x: np.ndarray) -> np.ndarray:
        stem, ffn = f"layers.{layer}", self.config.intermediate_size
        gate_up = self._linear(f"{stem}.gate_up", self._norm(f"{stem}.post_attention_norm", x))
        inner = gated(gate_up[:, :ffn], gate_up[:, ffn:], self.config.hidden_act)
        if self.config.architecture == "bitnet":
            inner = self._norm(f"{stem}.ffn_sub_norm", inner)
        return self._linear(f"{stem}.down", inner)

    def _head(self, x: np.ndarray) -> np.ndarray:
        if self._format.group is None:
            return head(x, self.tensors["embed.weight"])
        return self._linear("embed" if self.config.tie_word_embeddings else "head", x)

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """Quantisation of x `(W, K)` float32 and the matrix `name`: `(W, N)` float32."""
        codes, scales = self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"]
        if self._format.group is not None:
            if self.float_activations:
                return x @ dequantize(codes, scales, self._format.bits).T
            return group_linear(*quantize_groups(x), codes, scales, self._format.bits)
        parts = self._segments[name.rsplit(".", 1)[1]]
        if self.float_activations:
            per_row = np.repeat(np.asarray(scales, np.float32), parts)
            return x @ (codes.astype(np.float32) - 1).T * per_row
        return low_bit_linear(*quantize(x), codes, scales, parts)
