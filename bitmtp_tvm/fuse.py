"""Fewer kernels for steps of a few rows: a linear quantises its own input.

A decode step is a chain of some three hundred kernels, each of which costs a launch, the wait for
the one before and its first look at memory, while the work of a norm over one row is next to
nothing. Where a quantised row is read by one linear alone, the two become one operation of
`relax_models/fused_ops.py`, with the same results to the bit; and where a linear's gate and up go
into one activation, that linear writes their product. In wider steps what attention gives is
quantised by the kernel that adds it up, where the scales are those of parts of a head. Attention of
one or two rows turns its queries and writes the cache itself.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import IRModule, relax, tirx
from tvm.ir import GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target as TVMTarget

from bitmtp_tvm.specialize import KERNEL_OPS, bind_dims
from relax_models import fused_attention_ops, fused_ops, ops
from relax_models.formats import FORMATS, row_tile
from schedules.gpu.attention_fragments import serves
from schedules.workload import Workload, read

KIND = "cuda"

FUSED_WIDTH = 1
"""Rows of the widest fused step. Each block of a linear repeats the norm of all rows and multiplies
by dp4a, which for one row costs less than launches do. For two of BitNet-2B's on an H200, norms
apart and linears on the tensor cores made a step 15 % shorter."""

MOST_ROWS = 1 << 15
"""Rows of the largest fused matrix. A vocabulary's has thousands of blocks, which would repeat the
quantisation, and is long enough not to feel a launch."""

MOST_CODES = 32 << 10
"""Bytes of all rows' codes, which lie in a block's shared memory beside the partial sums."""

ROPE_WIDTH = 2
"""Rows of the widest step whose attention turns its queries and writes the cache itself. All blocks
of a head repeat that for its queries, one after the other: of four rows on an H200 it takes what
the launch did, of eight rows and small heads more, and with a norm of the heads more in any case
(docs/performance.md)."""

_QUANTIZERS = ("norm_quantize", "quantize")
_GATED = {"gated_norm_quantize": "norm_quantize", "gated_quantize": "quantize"}


def fuse(mod: IRModule, target: TVMTarget) -> IRModule:
    """`mod` (as `specialize` leaves it) with fused kernels where they pay; other targets than cuda
    keep theirs."""
    if target.kind.name != KIND:
        return mod
    fuser = _Fuser(mod)
    for var, func in mod.functions_items():
        if isinstance(func, relax.Function):
            fuser.add(var.name_hint, func)
    fused = fuser.builder_.get()
    for name, func in fuser.rewritten.items():
        fused.update_func(fused.get_global_var(name), func)
    return relax.transform.DeadCodeElimination(list(fuser.rewritten))(fused)


@dataclass(frozen=True)
class _Kernel:
    """A kernel call as it stands in a function: what it computes, its name and its arguments."""

    work: Workload
    name: str
    args: tuple[relax.Expr, ...]

    @property
    def settings(self) -> dict[str, Any]:
        return self.work.settings


def _operands(value: relax.Expr) -> list[relax.Var]:
    """The variables that a bound value reads, as often as it does."""
    if isinstance(value, relax.Var):
        return [value]
    if isinstance(value, relax.TupleGetItem):
        return _operands(value.tuple_value)
    inside = getattr(value, "fields", None) or getattr(value, "args", None) or ()
    return [var for part in inside for var in _operands(part)]


@mutator
class _Fuser(PyExprMutator):
    """Rewrites one function after the other; equal pairs of kernels become one kernel."""

    def __init__(self, mod: IRModule):
        super().__init__(mod)
        self.source = mod
        self.rewritten: dict[str, relax.Function] = {}
        self.made: dict[tuple[str, ...], GlobalVar] = {}

    def add(self, name: str, func: relax.Function) -> None:
        bindings = [binding for block in func.body.blocks for binding in block.bindings]
        read_by = [(var, b.value) for b in bindings for var in _operands(b.value)]
        self.uses = Counter(var for var, _ in read_by) + Counter(_operands(func.body.body))
        # Who reads it last: of a variable that is used once, the one who does.
        self.readers = dict(read_by)
        self.products: set[relax.Var] = set()
        self.rewritten[name] = self.visit_expr(func)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:  # the visitor's own naming
        self.bound = binding.var
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:  # likewise
        rebuilt = super().visit_call_(call)
        kernel = self._kernel(rebuilt)
        if kernel is None:
            return rebuilt
        first = call.args[1].fields[0]
        if kernel.work.op in _GATED and first in self.products:
            return self._ungated(kernel, rebuilt)
        if kernel.work.op == "low_bit_linear":
            return self._linear(call, kernel, rebuilt)
        if kernel.work.op == "rope_kv_write":
            return self._rope(first, kernel, rebuilt)
        if kernel.work.op == "quantize":
            return self._joined(first, kernel, rebuilt)
        if kernel.work.op == "attention_parts":
            return self._attention(list(call.args[1].fields)[:2], kernel, rebuilt)
        return rebuilt

    def _kernel(self, value: relax.Expr | None) -> _Kernel | None:
        if value is None or getattr(getattr(value, "op", None), "name", "") not in KERNEL_OPS:
            return None
        var, arguments = value.args[0], value.args[1]
        work = read(self.builder_.get()[var])
        return _Kernel(work, var.name_hint, tuple(arguments.fields))

    def _producer(self, parts: Sequence[relax.Expr], here: Sequence[relax.Expr]) -> _Kernel | None:
        """The kernel that made `parts` (rebuilt: `here`) alone, and for no other reader."""
        if any(self.uses[part] != 1 for part in parts):
            return None
        value = self.lookup_binding(here[0])
        if isinstance(value, relax.TupleGetItem):
            value = self.lookup_binding(value.tuple_value)
        return self._kernel(value)

    def _linear(self, call: relax.Call, kernel: _Kernel, rebuilt: relax.Call) -> relax.Expr:
        """The linear together with what quantises its input, where they can be one."""
        source = self._producer(list(call.args[1].fields)[:3], kernel.args[:3])
        if source is None or source.work.op not in _QUANTIZERS or not self._pays(kernel):
            return rebuilt
        activation = self._activation(kernel)
        if activation:
            self.products.add(self.bound)
        var = self._add(
            (source.name, kernel.name, activation),
            _name(source, kernel, activation),
            lambda: _fused_linear(source, kernel, activation),
        )
        width, columns = kernel.work.shapes[-1]
        result = relax.TensorType((width, columns // 2 if activation else columns), "float32")
        return relax.call_tir(var, [*source.args, *kernel.args[3:]], result)

    def _pays(self, kernel: _Kernel) -> bool:
        width, padded = kernel.work.shapes[0]
        rows = sum(kernel.settings["segments"])
        return width <= FUSED_WIDTH and rows <= MOST_ROWS and width * padded <= MOST_CODES

    def _activation(self, kernel: _Kernel) -> str:
        """The activation that alone reads the result, a gate and up of whole tiles; or ""."""
        reader = self._kernel(self.readers.get(self.bound))
        if reader is None or reader.work.op not in _GATED or self.uses[self.bound] != 1:
            return ""
        gate = kernel.settings["segments"][0]
        bits = FORMATS[kernel.settings["format"]].bits
        if 2 * gate != sum(kernel.settings["segments"]) or gate % row_tile(KIND, bits):
            return ""
        return reader.settings.get("activation", "silu")

    def _ungated(self, kernel: _Kernel, rebuilt: relax.Call) -> relax.Expr:
        """What is left of an activation, norm and quantisation, over the product."""
        var = self._add((kernel.name,), f"un{kernel.name}", lambda: _without_gate(kernel))
        return relax.call_tir(var, list(kernel.args), list(rebuilt.ty_args[0].fields))

    def _rope(self, qkv: relax.Var, kernel: _Kernel, rebuilt: relax.Call) -> relax.Expr:
        """The rotation together with the norm of its heads, at any width."""
        source = self._producer([qkv], kernel.args[:1])
        if source is None or source.work.op != "qk_norm":
            return rebuilt
        var = self._add(
            (source.name, kernel.name),
            f"norm_{kernel.name}",
            lambda: _normed_rope(source, kernel),
        )
        arguments = [*source.args, *kernel.args[1:]]
        results = list(rebuilt.ty_args[0].fields)
        return relax.op.call_tir_inplace(var, arguments, [-1, len(arguments) - 1], results)

    def _joined(self, x: relax.Var, kernel: _Kernel, rebuilt: relax.Call) -> relax.Expr:
        """The quantisation together with the attention before it, where no linear may have it."""
        source = self._producer([x], kernel.args[:1])
        if source is None or source.work.op != "attention_join":
            return rebuilt
        head_dim, group = source.work.shapes[2][3], kernel.settings["group"]
        if kernel.work.shapes[0][0] <= FUSED_WIDTH or head_dim % group:
            return rebuilt
        var = self._add(
            (source.name, kernel.name),
            f"{source.work.op}_{kernel.name}",
            lambda: _quantized_join(source, kernel),
        )
        return relax.call_tir(var, list(source.args), list(rebuilt.ty_args[0].fields))

    def _attention(
        self, made: Sequence[relax.Var], kernel: _Kernel, rebuilt: relax.Call
    ) -> relax.Expr:
        """The sums over the cache together with what turns `made`, q, and writes the cache."""
        source = self._producer(made, kernel.args[:2])
        width, _, head_dim = kernel.work.shapes[0]
        served = serves(head_dim) and width <= ROPE_WIDTH
        if source is None or source.work.op != "rope_kv_write" or not served:
            return rebuilt
        var = self._add(
            (source.name, kernel.name),
            f"rope_{kernel.name}",
            lambda: _of_qkv(source, kernel),
        )
        results = [*rebuilt.ty_args[0].fields, source.args[-1].ty]
        cache = len(source.args) - 1
        arguments = [*source.args, kernel.args[3]]
        return relax.op.call_tir_inplace(var, arguments, [-1, -1, -1, cache], results)

    def _add(
        self, key: tuple[str, ...], name: str, build: Callable[[], tirx.PrimFunc]
    ) -> GlobalVar:
        if key not in self.made:
            self.made[key] = self.builder_.add_func(build(), name)
        return self.made[key]


def _name(source: _Kernel, kernel: _Kernel, activation: str) -> str:
    """For instance norm_low_bit_linear2_w1; the width stays at the end."""
    gate = "gate_" if activation else ""
    return f"{gate}{source.work.op.removesuffix('_quantize')}_{kernel.name}"


def _fused_linear(source: _Kernel, kernel: _Kernel, activation: str) -> tirx.PrimFunc:
    settings = kernel.settings
    linear = (settings["segments"], settings["size"], KIND, settings["format"])
    if source.work.op == "norm_quantize":
        func = fused_ops.norm_low_bit_linear(
            *linear, settings["residual"], source.settings["eps"], activation
        )
    else:
        func = fused_ops.quantize_low_bit_linear(*linear, settings["residual"], activation)
    return bind_dims(func, {"width": kernel.work.width})


def _without_gate(kernel: _Kernel) -> tirx.PrimFunc:
    size, settings = kernel.work.shapes[0][1] // 2, kernel.settings
    if kernel.work.op == "gated_norm_quantize":
        func = ops.norm_quantize(size, settings["eps"])
    else:
        func = ops.quantize(size, settings["group"])
    return bind_dims(func, {"width": kernel.work.shapes[0][0]})


def _normed_rope(source: _Kernel, kernel: _Kernel) -> tirx.PrimFunc:
    (width, _), _, _, (positions, half, _), (_, kv_heads, slots, _), (_, heads, _) = (
        kernel.work.shapes
    )
    func = fused_ops.norm_rope_kv_write(
        heads, kv_heads, 2 * half, positions, slots, source.settings["eps"]
    )
    return bind_dims(func, {"width": width})


def _quantized_join(source: _Kernel, kernel: _Kernel) -> tirx.PrimFunc:
    width, heads, _, head_dim = source.work.shapes[2]
    func = fused_ops.attention_join_quantize(heads, head_dim, kernel.settings["group"])
    return bind_dims(func, {"width": width})


def _of_qkv(source: _Kernel, kernel: _Kernel) -> tirx.PrimFunc:
    (width, heads, head_dim), (_, kv_heads, slots, _) = kernel.work.shapes[:2]
    positions = source.work.shapes[3][0]
    func = fused_attention_ops.rope_attention_parts(heads, kv_heads, head_dim, positions, slots)
    return bind_dims(func, {"width": width})
