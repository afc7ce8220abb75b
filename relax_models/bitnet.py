"""BitNet b1.58: a Llama decoder with ternary linears and two more norms a layer.

Source: the BitNet b1.58 2B4T technical report and its public checkpoints.
"""

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor

from relax_models.config import ModelConfig
from relax_models.decoder import Decoder
from relax_models.layers import (
    Choice,
    Embedding,
    FinalNorm,
    GatedNormQuantize,
    KVCache,
    LowBitLinear,
    NormQuantize,
    RopeTable,
    Rows,
    Storage,
)

FORMAT = "bitnet-ternary"


class BitNetLayer(nn.Module):
    """h + o(sub_norm(attention(norm(h)))), then h + down(sub_norm(activation(gate) · up))."""

    def __init__(self, config: ModelConfig, storage: Storage):
        hidden, ffn, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        heads = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.input_norm = NormQuantize(hidden, eps)
        self.qkv = LowBitLinear((heads, kv, kv), hidden, storage, FORMAT)
        self.kv = KVCache(config, storage)
        self.attn_sub_norm = NormQuantize(heads, eps)
        self.o = LowBitLinear((hidden,), heads, storage, FORMAT)
        self.post_attention_norm = NormQuantize(hidden, eps)
        self.gate_up = LowBitLinear((ffn, ffn), hidden, storage, FORMAT)
        self.ffn_sub_norm = GatedNormQuantize(ffn, eps, config.hidden_act)
        self.down = LowBitLinear((hidden,), ffn, storage, FORMAT)

    def write_kv(self, h: Tensor, rows: Rows, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Write this layer's k and v of every row; returns q and the written cache."""
        return self.kv.write(self.qkv(self.input_norm(h)), rows, rope)

    def forward(self, h: Tensor, rows: Rows, rope: Tensor) -> Tensor:
        q, cache = self.write_kv(h, rows, rope)
        mixed = self.kv.attend(q, cache, rows)
        h = self.o(self.attn_sub_norm(mixed), residual=h)
        gate_up = self.gate_up(self.post_attention_norm(h))
        return self.down(self.ffn_sub_norm(gate_up), residual=h)


class BitNet(Decoder):
    """The whole model: tied bfloat16 embedding and head around low-bit layers."""

    def __init__(self, config: ModelConfig, storage: Storage):
        self.vocab_size = config.vocab_size
        self.embed = Embedding(config.vocab_size, config.hidden_size, storage)
        self.rope = RopeTable(storage.positions, config.head_dim)
        self.layers = nn.ModuleList(
            [BitNetLayer(config, storage) for _ in range(config.num_hidden_layers)]
        )
        self.norm = FinalNorm(config.hidden_size, config.rms_norm_eps)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def logits(self, h: Tensor, logit_rows: Tensor, choice: Choice | None = None) -> Tensor:
        return self.embed.logits(h, self.norm, logit_rows, choice)
