"""What the virtual machine need not do at every step on the processor, several hundred calls of it.

On a GPU a step is a graph that holds kernels alone, and the host has time.
"""

from collections.abc import Callable, Iterator

from tvm import IRModule, relax

from bitmtp_tvm.chunks import bindings_of, with_bindings

ALLOC_TENSOR = "relax.memory.alloc_tensor"
CHECKS = frozenset({"vm.builtin.check_tensor_info", "vm.builtin.match_shape"})


def share_views(mod: IRModule) -> IRModule:
    """`mod` where one tensor stands for all of one shape and type in the same block of memory.

    The memory is planned by then: of those that share a block, no two are needed at once.
    """
    # An alias would be a copy in the machine.
    shared = relax.transform.CanonicalizeBindings()(_rewritten(mod, _with_shared_views))
    return _rewritten(shared, _without_loose_tuples)


def drop_checks(mod: IRModule) -> IRModule:
    """`mod` whose functions do not look at the shapes of their arguments.

    They are the same tensors every time, and each kernel looks at its own.
    """
    return _rewritten(mod, _without_checks)


def _rewritten(mod: IRModule, rewrite: Callable[[relax.Function], relax.Function]) -> IRModule:
    made = {
        var: rewrite(func) if isinstance(func, relax.Function) else func
        for var, func in mod.functions.items()
    }
    return IRModule(made, attrs=mod.attrs)


def _with_shared_views(func: relax.Function) -> relax.Function:
    return with_bindings(func, list(_sharing(func)), func.body.body)


def _sharing(func: relax.Function) -> Iterator[relax.Binding]:
    first: dict[tuple, relax.Var] = {}
    for binding in bindings_of(func):
        if not _calls(binding.value, ALLOC_TENSOR):
            yield binding
            continue
        storage, offset, shape, dtype = binding.value.args[:4]
        key = storage, int(offset.value), tuple(map(int, shape.values)), str(dtype.value)
        known = first.setdefault(key, binding.var)
        yield binding if known.same_as(binding.var) else relax.VarBinding(binding.var, known)


def _without_loose_tuples(func: relax.Function) -> relax.Function:
    """Of the tuples that kernels gave, only the fields are used."""
    used = set(relax.analysis.free_vars(func.body.body))
    for binding in bindings_of(func):
        used.update(relax.analysis.free_vars(binding.value))
    kept = [b for b in bindings_of(func) if b.var in used or not isinstance(b.value, relax.Tuple)]
    return with_bindings(func, kept, func.body.body)


def _without_checks(func: relax.Function) -> relax.Function:
    kept = [b for b in bindings_of(func) if not _is_check(b.value)]
    return with_bindings(func, kept, func.body.body)


def _calls(value: relax.Expr, name: str) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == name


def _is_check(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "global_symbol", "") in CHECKS
