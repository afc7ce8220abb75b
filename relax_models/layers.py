"""Building blocks of low-bit decoders as `relax.frontend.nn` modules over a symbolic width."""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op, tensor_ir_op

from relax_models import ops
from relax_models.formats import packed_dtype, packed_shape, padded_k


@dataclass(frozen=True)
class Storage:
    """What a model is built for beside its config.

    kind: "llvm" or "cuda", which decides the weights' layout; slots: KV slots a layer;
    positions: rows of the RoPE table.
    """

    kind: str
    slots: int
    positions: int


@dataclass(frozen=True)
class Rows:
    """The rows of one step, all in device memory.

    tokens, position: `(width,)` int32; boundary: `(1,)` int32, the slot of row 0; visible:
    `(width, 2)` uint32, which rows of this step a row sees, or None for a plainly causal step
    (prefill).
    """

    tokens: Tensor
    position: Tensor
    boundary: Tensor
    visible: Tensor | None


@dataclass(frozen=True)
class Quantized:
    """Activations as a low-bit linear takes them: see `ops.norm_quantize`."""

    q: Tensor
    scale: Tensor
    total: Tensor


def call(func: tirx.PrimFunc, name: str, args: Sequence[Tensor], out):
    """Call a PrimFunc of relax_models.ops; `out` lists (shape, dtype) of its results."""
    results = [Tensor.placeholder(shape, dtype) for shape, dtype in out]
    return tensor_ir_op(func, name, list(args), results[0] if len(results) == 1 else results)


class NormQuantize(nn.Module):
    """RMSNorm and int8 quantisation in front of a linear; `gated` for the middle of the MLP."""

    def __init__(self, size: int, eps: float, gated: bool = False):
        self.size, self.eps, self.gated = size, eps, gated
        self.weight = nn.Parameter((size,), "float32")

    def forward(self, x: Tensor) -> Quantized:
        width = x.shape[0]
        builder = ops.gated_norm_quantize if self.gated else ops.norm_quantize
        out = [((width, padded_k(self.size)), "int8"), ((width,), "float32"), ((width,), "int32")]
        func = builder(self.size, self.eps)
        return Quantized(*call(func, builder.__name__, [x, self.weight], out))


class LowBitLinear(nn.Module):
    """A linear over ternary weights; `segments` are the rows of each matrix in a fused one."""

    def __init__(self, segments: Sequence[int], size: int, storage: Storage, format_name: str):
        self.segments, self.size = tuple(segments), size
        self.kind, self.format_name = storage.kind, format_name
        rows = sum(segments)
        shape = packed_shape(storage.kind, rows, size)
        self.weight = nn.Parameter(shape, packed_dtype(storage.kind))
        self.scale = nn.Parameter((len(self.segments),), "float32")

    def forward(self, x: Quantized, residual: Tensor | None = None) -> Tensor:
        func = ops.low_bit_linear(
            self.segments, self.size, self.kind, self.format_name, residual is not None
        )
        args = [x.q, x.scale, x.total, self.weight, self.scale]
        args += [] if residual is None else [residual]
        shape = (x.q.shape[0], sum(self.segments))
        return call(func, "low_bit_linear", args, [(shape, "float32")])


class KVCache(nn.Module):
    """One layer's part of the KV storage, and RoPE.

    `cache` is `(2, kv_heads, slots, head_dim)` float16.
    """

    def __init__(self, config, storage: Storage):
        self.config, self.storage = config, storage
        shape = (2, config.num_key_value_heads, storage.slots, config.head_dim)
        self.cache = nn.Parameter(shape, "float16")

    def write(self, qkv: Tensor, rows: Rows, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k, write k and v at the rows' slots; returns q and the written cache."""
        config = self.config
        func = ops.rope_kv_write(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            self.storage.positions,
            self.storage.slots,
        )
        shape = (qkv.shape[0], config.num_attention_heads, config.head_dim)
        out = [
            Tensor.placeholder(shape, "float32"),
            Tensor.placeholder(self.cache.shape, "float16"),
        ]
        args = [qkv, rows.position, rows.boundary, rope, self.cache]
        return tensor_ir_inplace_op(func, "rope_kv_write", args, [-1, 4], out)

    def attend(self, q: Tensor, cache: Tensor, rows: Rows) -> Tensor:
        """Attention of every row over `cache` as `write` gave it: `(width, heads * head_dim)`."""
        config = self.config
        func = ops.attention(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            self.storage.slots,
            causal=rows.visible is None,
        )
        args = [q, cache, rows.boundary] + ([] if rows.visible is None else [rows.visible])
        shape = (q.shape[0], config.num_attention_heads * config.head_dim)
        return call(func, "attention", args, [(shape, "float32")])


class Embedding(nn.Module):
    """A tied bfloat16 table: rows for tokens on the way in, logits on the way out."""

    def __init__(self, vocab_size: int, hidden_size: int):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.weight = nn.Parameter((vocab_size, hidden_size), "uint16")

    def forward(self, tokens: Tensor) -> Tensor:
        func = ops.embed(self.vocab_size, self.hidden_size)
        shape = (tokens.shape[0], self.hidden_size)
        return call(func, "embed", [tokens, self.weight], [(shape, "float32")])

    def logits(self, x: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `(rows, vocab_size)` float32 and their greedy tokens `(rows,)` int32."""
        rows = logit_rows.shape[0]
        func = ops.head(self.vocab_size, self.hidden_size)
        out = [((rows, self.vocab_size), "float32")]
        logits = call(func, "head", [x, self.weight, logit_rows], out)
        func = ops.greedy(self.vocab_size)
        return logits, call(func, "greedy", [logits, logit_rows], [((rows,), "int32")])


class FinalNorm(nn.Module):
    """RMSNorm of the rows that ask for logits."""

    def __init__(self, size: int, eps: float):
        self.size, self.eps = size, eps
        self.weight = nn.Parameter((size,), "float32")

    def forward(self, x: Tensor, logit_rows: Tensor) -> Tensor:
        func = ops.final_norm(self.size, self.eps)
        shape = (logit_rows.shape[0], self.size)
        return call(func, "final_norm", [x, self.weight, logit_rows], [(shape, "float32")])


class RopeTable(nn.Module):
    """cos and sin of every position: `(positions, head_dim / 2, 2)` float32."""

    def __init__(self, positions: int, head_dim: int):
        self.table = nn.Parameter((positions, head_dim // 2, 2), "float32")
