"""Building blocks of low-bit decoders as `relax.frontend.nn` modules over a symbolic width."""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op, tensor_ir_op

from relax_models import attention_ops, bounded_head, choose_ops, head_ops, ops, step_ops
from relax_models.formats import FORMATS, packed_dtype, packed_shape, padded_k, scales_shape


@dataclass(frozen=True)
class Storage:
    """What a model is built for beside its config.

    kind: "llvm" or "cuda", which decides the weights' layout; slots: KV slots a layer;
    positions: rows of the RoPE table; shared_attention: whether decode steps sum up their attention
    in two kernels, so that many blocks can share a row.
    """

    kind: str
    slots: int
    positions: int
    shared_attention: bool = False


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


def call_quantizer(func: tirx.PrimFunc, args: Sequence[Tensor], size: int, group: int) -> Quantized:
    """Call a PrimFunc that ends in q, scale and total of `size` columns."""
    width, padded = args[0].shape[0], padded_k(size)
    shape = (width, padded // group) if group else (width,)
    out = [((width, padded), "int8"), (shape, "float32"), (shape, "int32")]
    return Quantized(*call(func, str(func.attrs["bitmtp.op"]), args, out))


class NormQuantize(nn.Module):
    """RMSNorm and int8 quantisation in front of a linear, by row or by a `group` of columns."""

    def __init__(self, size: int, eps: float, group: int = 0):
        self.size, self.eps, self.group = size, eps, group
        self.weight = nn.Parameter((size,), "float32")

    def forward(self, x: Tensor) -> Quantized:
        func = ops.norm_quantize(self.size, self.eps, self.group)
        return call_quantizer(func, [x, self.weight], self.size, self.group)


class GatedNormQuantize(nn.Module):
    """activation(gate) · up, RMSNorm and int8 quantisation: the middle of BitNet's MLP."""

    def __init__(self, size: int, eps: float, activation: str):
        self.size, self.eps, self.activation = size, eps, activation
        self.weight = nn.Parameter((size,), "float32")

    def forward(self, gate_up: Tensor) -> Quantized:
        func = ops.gated_norm_quantize(self.size, self.eps, self.activation)
        return call_quantizer(func, [gate_up, self.weight], self.size, 0)


class LowBitLinear(nn.Module):
    """A linear over low-bit weights; `segments` are the rows of each original matrix."""

    def __init__(self, segments: Sequence[int], size: int, storage: Storage, format_name: str):
        self.segments, self.size = tuple(segments), size
        self.kind, self.format_name = storage.kind, format_name
        rows, form = sum(segments), FORMATS[format_name]
        shape = packed_shape(storage.kind, rows, size, form.bits)
        self.weight = nn.Parameter(shape, packed_dtype(storage.kind))
        if form.group:
            scales = scales_shape(storage.kind, rows, size, form.bits)
            self.scale = nn.Parameter(scales, "float16")
        else:
            self.scale = nn.Parameter((len(self.segments),), "float32")

    def forward(self, x: Quantized, residual: Tensor | None = None) -> Tensor:
        func = ops.low_bit_linear(
            self.segments, self.size, self.kind, self.format_name, residual is not None
        )
        args = [x.q, x.scale, x.total, self.weight, self.scale]
        args += [] if residual is None else [residual]
        shape = (x.q.shape[0], sum(self.segments))
        return call(func, "low_bit_linear", args, [(shape, "float32")])

    def lookup(self, tokens: Tensor) -> Tensor:
        """The weights' own rows, `(width, size)` float32: the matrix as an embedding table."""
        func = ops.low_bit_embed(sum(self.segments), self.size, self.kind, self.format_name)
        shape = (tokens.shape[0], self.size)
        return call(func, "low_bit_embed", [tokens, self.weight, self.scale], [(shape, "float32")])


class QKNorm(nn.Module):
    """RMSNorm of every query and key head (Qwen3)."""

    def __init__(self, config):
        self.config = config
        self.q_norm = nn.Parameter((config.head_dim,), "float32")
        self.k_norm = nn.Parameter((config.head_dim,), "float32")

    def forward(self, qkv: Tensor) -> Tensor:
        config = self.config
        func = ops.qk_norm(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rms_norm_eps,
        )
        return call(func, "qk_norm", [qkv, self.q_norm, self.k_norm], [(qkv.shape, "float32")])


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
        if self.storage.shared_attention and rows.visible is not None:
            return self._attend_in_parts(q, cache, rows)
        config = self.config
        func = attention_ops.attention(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            self.storage.slots,
            causal=rows.visible is None,
        )
        args = [q, cache, rows.boundary] + ([] if rows.visible is None else [rows.visible])
        shape = (q.shape[0], config.num_attention_heads * config.head_dim)
        return call(func, "attention", args, [(shape, "float32")])

    def _attend_in_parts(self, q: Tensor, cache: Tensor, rows: Rows) -> Tensor:
        config = self.config
        heads, head_dim = config.num_attention_heads, config.head_dim
        func = attention_ops.attention_parts(
            heads,
            config.num_key_value_heads,
            head_dim,
            self.storage.slots,
            config.weight_format,
        )
        shape = (q.shape[0], heads, attention_ops.CHAINS)
        out = [(shape, "float32"), (shape, "float32"), ((*shape, head_dim), "float32")]
        args = [q, cache, rows.boundary, rows.visible]
        parts = call(func, "attention_parts", args, out)
        func = attention_ops.attention_join(heads, head_dim)
        args = [*parts, rows.boundary]
        return call(func, "attention_join", args, [((q.shape[0], heads * head_dim), "float32")])


class FinalNorm(nn.Module):
    """RMSNorm of the rows that ask for logits."""

    def __init__(self, size: int, eps: float):
        self.size, self.eps = size, eps
        self.weight = nn.Parameter((size,), "float32")

    def forward(self, x: Tensor, logit_rows: Tensor) -> Tensor:
        func = ops.final_norm(self.size, self.eps)
        shape = (logit_rows.shape[0], self.size)
        return call(func, "final_norm", [x, self.weight, logit_rows], [(shape, "float32")])

    def coded(self, x: Tensor, logit_rows: Tensor) -> list[Tensor]:
        """normed, q, spread and floor: see `head_ops.final_norm_codes`."""
        rows, size = logit_rows.shape[0], self.size
        out = [((rows, size), "float32"), ((rows, 2, padded_k(size)), "int8")]
        out += [((rows, 3), "float32"), ((rows,), "int32")]
        func = head_ops.final_norm_codes(size, self.eps)
        return call(func, "final_norm_codes", [x, self.weight, logit_rows], out)


@dataclass(frozen=True)
class Choice:
    """What tokens are chosen by: see `choose_ops.softmax_parts`."""

    horizon: Tensor
    state: Tensor
    seen: Tensor


class Embedding(nn.Module):
    """A tied bfloat16 table: rows for tokens on the way in, logits on the way out.

    A large one has an 8-bit copy on cuda, for all logits but the largest: see `head_ops`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, storage: Storage):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.weight = nn.Parameter((vocab_size, hidden_size), "uint16")
        self.bounded = bounded_head.pays(storage.kind, vocab_size, hidden_size)
        if self.bounded:
            codes = bounded_head.codes_shape(vocab_size, hidden_size)
            self.codes = nn.Parameter(codes, "uint32")
            self.bounds = nn.Parameter(bounded_head.bounds_shape(vocab_size), "float32")

    def forward(self, tokens: Tensor) -> Tensor:
        func = ops.embed(self.vocab_size, self.hidden_size)
        shape = (tokens.shape[0], self.hidden_size)
        return call(func, "embed", [tokens, self.weight], [(shape, "float32")])

    def logits(
        self, h: Tensor, norm: FinalNorm, logit_rows: Tensor, choice: Choice | None
    ) -> Tensor:
        """Logits `(rows, vocab_size)` float32 of the rows of h `(width, hidden_size)` that ask.

        `choice` tells the bounded head of the repetition penalty, where there may be one.
        """
        if self.bounded:
            return self._bounded_logits(norm.coded(h, logit_rows), logit_rows, choice)
        func = ops.head(self.vocab_size, self.hidden_size)
        out = [((logit_rows.shape[0], self.vocab_size), "float32")]
        return call(func, "head", [norm(h, logit_rows), self.weight, logit_rows], out)

    def _bounded_logits(
        self, coded: Sequence[Tensor], logit_rows: Tensor, choice: Choice | None
    ) -> Tensor:
        normed, q, spread, floor = coded
        asked = [logit_rows] + ([choice.horizon, choice.state, choice.seen] if choice else [])
        shape = (logit_rows.shape[0], self.vocab_size)
        size, penalised = (self.vocab_size, self.hidden_size), choice is not None
        args = [q, spread, self.codes, self.bounds, *asked, floor]
        out = [Tensor.placeholder(shape, "float32"), Tensor.placeholder(floor.shape, "int32")]
        func = head_ops.head_codes(*size, penalised)
        logits, floor = tensor_ir_inplace_op(func, "head_codes", args, [-1, len(args) - 1], out)
        args = [normed, self.weight, spread, self.bounds, *asked, floor, logits]
        func = head_ops.head_rescore(*size, penalised)
        return tensor_ir_inplace_op(func, "head_rescore", args, [len(args) - 1], out[0])


def lay_out(state: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Fill `rows` (see `step_ops.step_rows`) with the rows of the next step; returns the state and
    the rows as they then are."""
    args = [state, *rows]
    out = [Tensor.placeholder(arg.shape, arg.dtype) for arg in args]
    written = tensor_ir_inplace_op(
        step_ops.step_rows(), "step_rows", args, [*range(len(args))], out
    )
    return written[0], written[1:]


def choose(logits: Tensor, logit_rows: Tensor, choice: Choice) -> list[Tensor]:
    """Token int32, confidence and logprob float32, each `(rows,)`: see `choose_ops.choose`."""
    rows, vocab_size = logits.shape
    shape = (rows, choose_ops.parts_of(int(vocab_size)))
    args = [logits, logit_rows, choice.horizon, choice.state, choice.seen]
    func = choose_ops.softmax_parts(int(vocab_size))
    out = [(shape, "float32"), (shape, "int32"), (shape, "float32")]
    parts = call(func, "softmax_parts", args, out)
    func = choose_ops.choose(int(vocab_size))
    chosen = [((rows,), "int32"), ((rows,), "float32"), ((rows,), "float32")]
    return call(func, "choose", [*args, *parts], chosen)


def accept(chosen: Sequence[Tensor], state: Tensor, ring: Tensor, seen: Tensor) -> Tensor:
    """Commit what `choose` gave; returns the new state: see `step_ops.accept`."""
    args = [*chosen, state, ring, seen]
    out = [Tensor.placeholder(arg.shape, arg.dtype) for arg in args[3:]]
    func = step_ops.accept(int(seen.shape[0]))
    return tensor_ir_inplace_op(func, "accept", args, [3, 4, 5], out)[0]


def greedy(logits: Tensor, logit_rows: Tensor) -> Tensor:
    """The greedy token `(rows,)` int32 of each row of `logits` `(rows, vocab_size)` float32."""
    rows, vocab_size = logits.shape
    func = ops.greedy(int(vocab_size))
    return call(func, "greedy", [logits, logit_rows], [((rows,), "int32")])


class RopeTable(nn.Module):
    """cos and sin of every position: `(positions, head_dim / 2, 2)` float32."""

    def __init__(self, positions: int, head_dim: int):
        self.table = nn.Parameter((positions, head_dim // 2, 2), "float32")
