"""Symbolic width -> one function per bucket, with kernels of static shapes, ready to schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import IRModule, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

KERNEL_OPS = ("relax.call_tir", "relax.call_tir_inplace")


@dataclass(frozen=True)
class Bucket:
    """One width of one entry function: the Relax function `name` is `entry` bound to `dims`."""

    entry: str
    width: int

    @property
    def name(self) -> str:
        return f"{self.entry}_w{self.width}"

    @property
    def dims(self) -> dict[str, int]:
        """Every row of a decode step may ask for logits; prefill has none that do."""
        return {"width": self.width} | ({"rows": self.width} if self.entry == "decode" else {})


def buckets(widths: Sequence[int], prefill: Sequence[int]) -> list[Bucket]:
    """Step and decode at every width, prefill at every width and chunk, in ascending order."""
    entries = {"step": widths, "decode": widths, "prefill": (*widths, *prefill)}
    return [Bucket(entry, w) for entry, ws in entries.items() for w in sorted(set(ws))]


def specialize(mod: IRModule, wanted: Sequence[Bucket]) -> IRModule:
    """Replace the symbolic functions of `mod` by one per bucket.

    Kernels get static shapes and names that end in their width; equal ones are shared. The symbolic
    originals are dropped.
    """
    specializer = _Specializer(mod)
    for bucket in wanted:
        dims = {
            str(var.name): bucket.dims[str(var.name)]
            for var in relax.analysis.defined_symbolic_vars(mod[bucket.entry])
        }
        bound = relax.transform.BindSymbolicVars(dims, bucket.entry)(mod)[bucket.entry]
        specializer.add(bound, bucket)
    return specializer.finish(wanted)


@mutator
class _Specializer(PyExprMutator):
    """Rebuilds kernel calls with callees whose shapes are those of the arguments."""

    def __init__(self, mod: IRModule):
        super().__init__(mod)
        self.source = mod
        self.suffix = ""

    def add(self, func: relax.Function, bucket: Bucket) -> None:
        self.suffix = f"_w{bucket.width}"
        # The exporter's mark is for graph capture, which `pipeline` decides about.
        rebuilt = self.visit_expr(func).without_attr("num_input")
        self.builder_.add_func(rebuilt.with_attr("global_symbol", bucket.name), bucket.name)

    def finish(self, wanted: Sequence[Bucket]) -> IRModule:
        """The module of the bucket functions and the kernels that they call."""
        functions = self.source.functions.items()
        symbolic = {v.name_hint for v, f in functions if isinstance(f, relax.Function)}
        entries = [bucket.name for bucket in wanted]
        return relax.transform.DeadCodeElimination(entries)(_without(self.builder_.get(), symbolic))

    def visit_call_(self, call: relax.Call) -> relax.Expr:  # the visitor's own naming
        call = super().visit_call_(call)
        if getattr(call.op, "name", None) not in KERNEL_OPS:
            return call
        callee = self.source[call.args[0]]
        shapes = [arg.ty.shape for arg in call.args[1]] + _result_shapes(call)
        static = bind_shapes(callee, shapes)
        # The builder gives back the variable of an equal function that it already has.
        var = self.builder_.add_func(static, call.args[0].name_hint + self.suffix)
        return relax.Call(call.op, [var, *call.args[1:]], call.attrs, call.ty_args)


def _without(mod: IRModule, names: set[str]) -> IRModule:
    kept = {var: func for var, func in mod.functions.items() if var.name_hint not in names}
    return IRModule(kept, attrs=mod.attrs)


def _result_shapes(call: relax.Call) -> list:
    """Shapes of the results that are parameters of their own (in-place ones are arguments)."""
    out = call.ty_args[0]
    fields = list(out.fields) if isinstance(out, relax.TupleType) else [out]
    inplace = getattr(call.attrs, "inplace_indices", None) if call.attrs else None
    aliases = [-1] * len(fields) if inplace is None else [int(i) for i in inplace]
    return [field.shape for field, alias in zip(fields, aliases, strict=True) if alias < 0]


def bind_shapes(func: tirx.PrimFunc, shapes: Sequence) -> tirx.PrimFunc:
    """`func` with its symbolic buffer dimensions bound to those of `shapes`, one a parameter.

    Raises ValueError when a dimension is still symbolic or two disagree.
    """
    dims: dict[str, int] = {}
    for param, shape in zip(func.params, shapes, strict=True):
        for declared, given in zip(param.ty.shape, shape, strict=True):
            if isinstance(declared, tirx.Var):
                if dims.setdefault(declared.name, int(given)) != int(given):
                    raise ValueError(f"{declared.name} is both {dims[declared.name]} and {given}")
    return bind_dims(func, dims)


def bind_dims(func: tirx.PrimFunc, dims: Mapping[str, int]) -> tirx.PrimFunc:
    """`func` with the symbolic dimensions of its buffers replaced by name."""
    static = {}
    for param in func.params:
        buffer = param.ty
        if any(isinstance(dim, tirx.Var) for dim in buffer.shape):
            static[param] = tirx.decl_buffer(
                [_bound(dim, dims) for dim in buffer.shape],
                buffer.dtype,
                name=param.name,
                elem_offset=buffer.elem_offset,
                data_alignment=buffer.data_alignment,
                offset_factor=buffer.offset_factor,
                layout=None,
            )
    return func.specialize(static) if static else func


def _bound(dim, dims: Mapping[str, int]):
    return tirx.IntImm("int64", dims[dim.name]) if isinstance(dim, tirx.Var) else dim
