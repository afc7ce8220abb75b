"""BitNet b1.58: a Llama decoder with ternary linears and two more norms a layer.

Source: the BitNet b1.58 2B4T technical report and its public checkpoints.
"""

from tvm import IRModule
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, spec

from relax_models.config import ModelConfig
from relax_models.layers import (
    Embedding,
    FinalNorm,
    KVCache,
    LowBitLinear,
    NormQuantize,
    RopeTable,
    Rows,
    Storage,
)

FORMAT = "bitnet-ternary"


class BitNetLayer(nn.Module):
    """h + o(sub_norm(attention(norm(h)))), then h + down(sub_norm(relu(gate)² · up))."""

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
        self.ffn_sub_norm = NormQuantize(ffn, eps, gated=True)
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


class BitNet(nn.Module):
    """The whole model: `decode` gives logits for the rows that ask, `prefill` fills the cache."""

    def __init__(self, config: ModelConfig, storage: Storage):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.rope = RopeTable(storage.positions, config.head_dim)
        self.layers = nn.ModuleList(
            [BitNetLayer(config, storage) for _ in range(config.num_hidden_layers)]
        )
        self.norm = FinalNorm(config.hidden_size, config.rms_norm_eps)

    def decode(
        self,
        tokens: Tensor,
        position: Tensor,
        boundary: Tensor,
        visible: Tensor,
        logit_rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One step of up to 64 rows -> logits `(rows, vocab_size)`, greedy tokens `(rows,)`."""
        rows = Rows(tokens, position, boundary, visible)
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h, rows, self.rope.table)
        return self.embed.logits(self.norm(h, logit_rows), logit_rows)

    def prefill(self, tokens: Tensor, position: Tensor, boundary: Tensor) -> Tensor:
        """Fill the cache for a causal chunk; the last layer stops at its k and v."""
        rows = Rows(tokens, position, boundary, None)
        h = self.embed(tokens)
        *inner, last = list(self.layers)
        for layer in inner:
            h = layer(h, rows, self.rope.table)
        return last.write_kv(h, rows, self.rope.table)[1]

    def export(self) -> tuple[IRModule, list[str]]:
        """The Relax module with `decode` and `prefill` over symbolic dims `width` and `rows`, and
        the names of the parameters that follow the inputs in both (KV caches end in `.kv.cache`).
        """
        rows = {
            "tokens": spec.Tensor(["width"], "int32"),
            "position": spec.Tensor(["width"], "int32"),
            "boundary": spec.Tensor([1], "int32"),
        }
        asked = {
            "visible": spec.Tensor(["width", 2], "uint32"),
            "logit_rows": spec.Tensor(["rows"], "int32"),
        }
        plain = {"param_mode": "plain", "effect_mode": "none"}
        mod, params = self.export_tvm(
            {"decode": {**rows, **asked, "$": plain}, "prefill": {**rows, "$": plain}}
        )
        return mod, [name for name, _ in params]
