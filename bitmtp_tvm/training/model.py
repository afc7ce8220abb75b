"""The two architectures as PyTorch modules; parameters are named as in Hugging Face checkpoints."""

from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from bitmtp_tvm.training.low_bit import (
    bfloat16_values,
    matrix_linear,
    rounded_rows,
    rounded_weights,
    table_product,
)
from bitmtp_tvm.weights import rope_table
from relax_models.config import ModelConfig
from relax_models.formats import FORMATS, K_BLOCK
from relax_models.quantizers import Quantizer, get_quantizer

Mask: TypeAlias = Any  # a BlockMask, or a Tensor `(B, 1, L, L)` of bool
_DEVIATION = 0.02
# Of heads of 64: the tiles that PyTorch takes by itself on an H200, 128 rows by four warps, do not
# hold the mask of a block in registers and take 2.7 times as long.
_TILES = {
    **{"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 3, "fwd_num_warps": 4},
    **{"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64},
    **{"bwd_num_stages": 3, "bwd_num_warps": 4},
}


class Matrix(nn.Module):
    """Latent weights `(rows, columns)` float32."""

    def __init__(self, rows: int, columns: int, deviation: float = _DEVIATION) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.deviation = deviation


class Norm(nn.Module):
    """RMSNorm over the last dimension, float32; its weight is rounded to bfloat16."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        mean = x.square().mean(-1, keepdim=True)
        return x * bfloat16_values(self.weight) * (1 / torch.sqrt(mean + self.eps))


class Linears(nn.Module):
    """How a model multiplies: by matrices of one scale, or by groups under a rule."""

    def __init__(self, config: ModelConfig, quantizer: Quantizer | None, dtype: torch.dtype):
        super().__init__()
        self.grouped = FORMATS[config.weight_format].group is not None
        self.quantizer, self.dtype = quantizer, dtype

    def forward(self, x: Tensor, matrices: list[Matrix]) -> Tensor:
        """x `(…, K)` float32 -> `(…, ΣN)` float32."""
        latents = [matrix.weight for matrix in matrices]
        if not self.grouped:
            return matrix_linear(x, latents, self.dtype)
        rows = rounded_rows(x.reshape(-1, x.shape[-1]), K_BLOCK)
        assert self.quantizer is not None
        table = torch.cat([rounded_weights(latent, self.quantizer) for latent in latents])
        return functional.linear(rows, table).view(*x.shape[:-1], len(table))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, under any mask."""

    def __init__(self, config: ModelConfig, linears: Linears) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        query, key_value = config.query_width, config.key_value_width
        self.heads = (config.num_attention_heads, config.num_key_value_heads)
        self.head_dim = config.head_dim
        self.q_proj = Matrix(query, hidden)
        self.k_proj = Matrix(key_value, hidden)
        self.v_proj = Matrix(key_value, hidden)
        self.o_proj = Matrix(hidden, query, _DEVIATION / (2 * config.num_hidden_layers) ** 0.5)
        self.sub_norms = config.architecture == "bitnet"
        if self.sub_norms:
            self.attn_sub_norm = Norm(query, eps)
        else:
            self.q_norm, self.k_norm = Norm(config.head_dim, eps), Norm(config.head_dim, eps)
        self.linears = linears

    def forward(self, x: Tensor, rope: Tensor, mask: Mask) -> Tensor:
        batch, length, _ = x.shape
        heads, kv = self.heads
        qkv = self.linears(x, [self.q_proj, self.k_proj, self.v_proj])
        parts = qkv.view(batch, length, heads + 2 * kv, self.head_dim)
        q, k, v = parts.split([heads, kv, kv], dim=2)
        if not self.sub_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q, rope), rotated(k, rope)
        narrow = [t.to(self.linears.dtype).transpose(1, 2) for t in (q, k, v)]
        mixed = attend(narrow[0], narrow[1], narrow[2], mask)
        mixed = mixed.transpose(1, 2).reshape(batch, length, heads * self.head_dim).float()
        if self.sub_norms:
            mixed = self.attn_sub_norm(mixed)
        return self.linears(mixed, [self.o_proj])


class FeedForward(nn.Module):
    """activation(gate) · up, and down again; a BitNet has a norm before the latter."""

    def __init__(self, config: ModelConfig, linears: Linears) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.intermediate_size
        self.gate_proj = Matrix(size, hidden)
        self.up_proj = Matrix(size, hidden)
        self.down_proj = Matrix(hidden, size, _DEVIATION / (2 * config.num_hidden_layers) ** 0.5)
        self.sub_norms = config.architecture == "bitnet"
        if self.sub_norms:
            self.ffn_sub_norm = Norm(size, config.rms_norm_eps)
        self.squared = config.hidden_act == "relu2"
        self.linears = linears

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linears(x, [self.gate_proj, self.up_proj]).chunk(2, dim=-1)
        gate = functional.relu(gate).square() if self.squared else functional.silu(gate)
        inner = gate * up
        if self.sub_norms:
            inner = self.ffn_sub_norm(inner)
        return self.linears(inner, [self.down_proj])


class Layer(nn.Module):
    """h + attention(norm(h)), then h + feed_forward(norm(h)); h is float32."""

    def __init__(self, config: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, linears)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config, linears)

    def forward(self, h: Tensor, rope: Tensor, mask: Mask) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), rope, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class Backbone(nn.Module):
    """What the checkpoints call `model`: embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.embed_tokens = Matrix(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, linears) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class TrainableDecoder(nn.Module):
    """A whole model whose forward pass is that of the compiled one, with gradients.

    `quant`, `quant_threshold`: the rule that makes the matrices of a Qwen3 low-bit. `dtype`: what
    matrices and attention are multiplied in. `only_row`: the one row of the embedding that gets
    gradients (see `train_only_row`).
    """

    def __init__(
        self,
        config: ModelConfig,
        quant: str | None = None,
        quant_threshold: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        config.validate()
        self.config = config
        grouped = FORMATS[config.weight_format].group is not None
        self.quantizer = get_quantizer(str(quant), quant_threshold) if grouped else None
        linears = Linears(config, self.quantizer, dtype)
        self.model = Backbone(config, linears)
        if not config.tie_word_embeddings:
            self.lm_head = Matrix(config.vocab_size, config.hidden_size)
        table = torch.from_numpy(rope_table(config, config.max_position_embeddings))
        self.register_buffer("rope", table, persistent=False)
        self.linears = linears
        self.checkpointing = False
        self.only_row: int | None = None

    def initialise(self, seed: int) -> None:
        """Random weights, the same on every machine: normal with 0.02, less where a layer ends."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, Matrix):
                values = torch.randn(module.weight.shape, generator=generator)
                module.weight.data.copy_(values * module.deviation)

    def train_only_row(self, row: int) -> None:
        """Freeze all but one row of the embedding: the mask token's, which only mask rows read.

        Hidden states of other rows stay as they are, bit for bit. With a tied head that row is also
        the token's own logit, which is therefore the one logit of other rows that moves.
        """
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.model.embed_tokens.weight.requires_grad_(True)
        self.only_row = row

    def forward(self, tokens: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        """Hidden states `(B, L, hidden)` float32 after the final norm.

        tokens, positions `(B, L)` int64; mask: a BlockMask, or `(B, 1, L, L)` bool, true where row
        i sees row j.
        """
        h = self._embedded(tokens)
        rope = self.rope[positions]
        for layer in self.model.layers:
            if self.checkpointing and torch.is_grad_enabled():
                run = partial(checkpoint, layer, use_reentrant=False)
                h = run(h, rope, mask)
            else:
                h = layer(h, rope, mask)
        return self.model.norm(h)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `(…, vocab_size)` float32 of hidden states `(…, hidden)`."""
        if self.linears.grouped:
            if not self.config.tie_word_embeddings:
                return self.linears(hidden, [self.lm_head])
            rows = rounded_rows(hidden.reshape(-1, hidden.shape[-1]), K_BLOCK)
            table = self._low_bit_table()
            return functional.linear(rows, table).view(*hidden.shape[:-1], len(table))
        return table_product(hidden, bfloat16_values(self._table()), self.linears.dtype)

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self.linears.grouped:
            return functional.embedding(tokens, self._low_bit_table())
        return bfloat16_values(functional.embedding(tokens, self._table()))

    def _low_bit_table(self) -> Tensor:
        assert self.quantizer is not None
        return rounded_weights(self._table(), self.quantizer)

    def _table(self) -> Tensor:
        """The embedding's latent weights; gradients only where they are wanted."""
        table = self.model.embed_tokens.weight
        if self.only_row is None:
            return table
        chosen = torch.arange(len(table), device=table.device)[:, None] == self.only_row
        return torch.where(chosen, table, table.detach())


def rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate-half rotary embedding: x `(B, L, heads, D)`, rope `(B, L, D / 2, 2)` of cos, sin."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = rope[:, :, None, :, 0], rope[:, :, None, :, 1]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Softmax attention: q `(B, heads, L, D)`, k, v `(B, kv_heads, L, D)` -> the shape of q."""
    if isinstance(mask, BlockMask):
        tiles = _TILES if q.shape[-1] <= 64 else None
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=tiles)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
