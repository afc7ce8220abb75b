"""Bonsai: a Qwen3 decoder whose linears, embedding and head are ternary or binary by groups of 128.

Source: the Qwen3 technical report and the public checkpoints; weights and activations carry one
scale for every 128 columns.
"""

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor

from relax_models import ops
from relax_models.config import ModelConfig
from relax_models.decoder import Decoder
from relax_models.formats import FORMATS
from relax_models.layers import (
    Choice,
    FinalNorm,
    KVCache,
    LowBitLinear,
    NormQuantize,
    QKNorm,
    Quantized,
    RopeTable,
    Rows,
    Storage,
    call_quantizer,
)


class BonsaiLayer(nn.Module):
    """h + o(attention(qk_norm(qkv(norm(h))))), then h + down(silu(gate) · up)."""

    def __init__(self, config: ModelConfig, storage: Storage):
        form = config.weight_format
        hidden, eps, group = config.hidden_size, config.rms_norm_eps, group_of(config)
        heads, kv = config.query_width, config.key_value_width
        self.group, self.heads, self.ffn = group, heads, config.intermediate_size
        self.input_norm = NormQuantize(hidden, eps, group)
        self.qkv = LowBitLinear((heads, kv, kv), hidden, storage, form)
        self.qk = QKNorm(config)
        self.kv = KVCache(config, storage)
        self.o = LowBitLinear((hidden,), heads, storage, form)
        self.post_attention_norm = NormQuantize(hidden, eps, group)
        self.gate_up = LowBitLinear((self.ffn, self.ffn), hidden, storage, form)
        self.down = LowBitLinear((hidden,), self.ffn, storage, form)

    def write_kv(self, h: Tensor, rows: Rows, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Write this layer's k and v of every row; returns q and the written cache."""
        return self.kv.write(self.qk(self.qkv(self.input_norm(h))), rows, rope)

    def forward(self, h: Tensor, rows: Rows, rope: Tensor) -> Tensor:
        q, cache = self.write_kv(h, rows, rope)
        mixed = self.kv.attend(q, cache, rows)
        h = self.o(self._quantized(ops.quantize, mixed, self.heads), residual=h)
        gate_up = self.gate_up(self.post_attention_norm(h))
        return self.down(self._quantized(ops.gated_quantize, gate_up, self.ffn), residual=h)

    def _quantized(self, builder, x: Tensor, size: int) -> Quantized:
        return call_quantizer(builder(size, self.group), [x], size, self.group)


class Bonsai(Decoder):
    """The whole model; the head shares the embedding's table where the config ties them."""

    def __init__(self, config: ModelConfig, storage: Storage):
        form, vocab, hidden = config.weight_format, config.vocab_size, config.hidden_size
        self.vocab_size = config.vocab_size
        self.config = config
        self.embed = LowBitLinear((vocab,), hidden, storage, form)
        if not config.tie_word_embeddings:
            self.head = LowBitLinear((vocab,), hidden, storage, form)
        self.rope = RopeTable(storage.positions, config.head_dim)
        self.layers = nn.ModuleList(
            [BonsaiLayer(config, storage) for _ in range(config.num_hidden_layers)]
        )
        self.norm = FinalNorm(hidden, config.rms_norm_eps)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed.lookup(tokens)

    def logits(self, h: Tensor, logit_rows: Tensor, choice: Choice | None = None) -> Tensor:
        normed, size = self.norm(h, logit_rows), self.config.hidden_size
        group = group_of(self.config)
        x = call_quantizer(ops.quantize(size, group), [normed], size, group)
        return self.embed(x) if self.config.tie_word_embeddings else self.head(x)


def group_of(config: ModelConfig) -> int:
    """Columns that share a scale in the config's format."""
    group = FORMATS[config.weight_format].group
    if not group:
        raise ValueError(f"{config.weight_format} has no groups, which a Bonsai model needs")
    return group
