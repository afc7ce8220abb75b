"""The decode loop as Relax functions: several steps of one bucket in one call.

On a GPU a step is a CUDA graph, and a chunk enqueues it so many times without a look at the
results: a step after the stop changes nothing. The processor has nothing to enqueue, so there a
chunk looks before each step, and leaves out those after the stop.
"""

from collections.abc import Sequence

import tvm
from tvm import IRModule, relax, tirx

from relax_models.step_ops import running

CHUNKS = (1, 2, 4, 8)
"""Steps that one call can run: powers of two."""

STATE = "state"

GRAPH = "graph"
"""First word of the functions that run a step as a CUDA graph, for instance `graph_w8_x4`."""

GRAPH_STORAGE = "cuda_graph_alloc"
"""TVM's name for the function that allocates what the graphs of all buckets share."""

_RUN_GRAPH = "vm.builtin.cuda_graph.run_or_capture"


def chunk_name(step: str, count: int) -> str:
    """The function that runs `step`, for instance `step_w8`, `count` times."""
    return f"{step}_x{count}"


def add_chunks(mod: IRModule, steps: Sequence[str]) -> IRModule:
    """`mod` with a chunk of every size for every step function; they take what the steps take.

    A step runs only while the state before it says that the sequence is running.
    """
    builder = relax.BlockBuilder(mod)
    condition = builder.add_func(running(), "running_w0")
    for step in steps:
        callee = step
        for count in CHUNKS:
            # Twice the chunk before: code of one length, for hundreds of arguments each call.
            name = chunk_name(step, count)
            _add_chunk(builder, callee, name, 1 if count == 1 else 2, condition)
            callee = name
    return builder.get()


def _add_chunk(
    builder: relax.BlockBuilder, callee: str, name: str, calls: int, condition: tvm.ir.GlobalVar
) -> None:
    mod = builder.get()
    params = [relax.Var(param.name, param.ty) for param in mod[callee].params]
    call = relax.Call(mod.get_global_var(callee), params)
    (state,) = [param for param in params if param.name == STATE]
    with builder.function(name, params):
        state = builder.emit(call)
        for _ in range(calls - 1):
            asked = relax.call_tir(condition, [state], relax.TensorType((), "bool"))
            state = builder.emit(relax.If(builder.emit(asked), call, state))
        builder.emit_func_output(state)


def mark_graphs(mod: IRModule, steps: Sequence[str]) -> IRModule:
    """`mod` with a copy of every step function (`step_w8`) for `capture_graphs` (`graph_w8`)."""
    builder = relax.BlockBuilder(mod)
    for step in steps:
        name = step.replace("step", GRAPH, 1)
        # Of its arguments none is an input: their addresses stay, and the graph may hold them.
        marks = {"global_symbol": name, "num_input": 0}
        builder.add_func(mod[step].with_attr(marks), name)
    return builder.get()


def capture_graphs(mod: IRModule) -> IRModule:
    """Replace every marked step function by chunks that replay it as one CUDA graph.

    A graph is captured when its bucket first runs, and shared by the chunks of all sizes.
    """
    marked = {v: f for v, f in mod.functions.items() if f.attrs and "num_input" in f.attrs}
    if not marked:
        return mod
    others = {var: func for var, func in mod.functions.items() if var not in marked}
    kernels = {var: func for var, func in others.items() if isinstance(func, tirx.PrimFunc)}
    # TVM's pass looks at all of a module, and would also lift parts out of the other functions.
    ready = {var: _capturable(func) for var, func in marked.items()}
    with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True}):
        captured = relax.transform.RewriteCUDAGraph()(IRModule({**ready, **kernels}))
    funcs = {**others, **dict(captured.functions.items())}
    chunked = {var.name_hint: funcs.pop(var) for var in marked}
    builder = relax.BlockBuilder(IRModule(funcs, attrs=mod.attrs))
    for step, func in chunked.items():
        for count in CHUNKS:
            name = chunk_name(step, count)
            builder.add_func(_repeated(func, count).with_attr("global_symbol", name), name)
    return builder.get()


def bindings_of(func: relax.Function) -> list[relax.Binding]:
    """The bindings of a function's own blocks, those inside of branches not."""
    return [binding for block in func.body.blocks for binding in block.bindings]


def with_bindings(
    func: relax.Function, bindings: list[relax.Binding], result: relax.Expr
) -> relax.Function:
    """`func` with other bindings and another result."""
    body = relax.SeqExpr([relax.BindingBlock(bindings)], result)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def _capturable(func: relax.Function) -> relax.Function:
    """`func` in the form that TVM's pass gets right: the region that it lifts begins with the first
    kernel, and it uses what is allocated behind that, or returned from inside it, out of scope."""
    bindings = bindings_of(func)
    storage = [binding for binding in bindings if allocates(binding.value)]
    others = [binding for binding in bindings if not allocates(binding.value)]
    (state,) = [param for param in func.params if param.name == STATE]
    return with_bindings(func, storage + others, state)


def _repeated(func: relax.Function, count: int) -> relax.Function:
    """`func` with its graph run `count` times.

    The graph's arguments are bound once, as a tuple. Its result gets a type: the bytecode machine
    gives no place to a result of none, and then fails to return there.
    """
    bindings: list[relax.Binding] = []
    for binding in bindings_of(func):
        call = binding.value
        if not _runs_graph(call):
            bindings.append(binding)
            continue
        name, (region, arguments, index) = call.args[0], call.args[1].fields
        held = relax.Var("held", arguments.ty)
        bindings.append(relax.VarBinding(held, arguments))
        for i in range(count):
            result = relax.Var(f"result{i}", relax.AnyType())
            fields = relax.Tuple([region, held, index])
            run = relax.Call(call.op, [name, fields], call.attrs, [result.ty])
            bindings.append(relax.VarBinding(result, run))
    return with_bindings(func, bindings, func.body.body)


def _runs_graph(value: relax.Expr) -> bool:
    if not isinstance(value, relax.Call) or not value.args:
        return False
    return getattr(value.args[0], "global_symbol", "") == _RUN_GRAPH


def allocates(value: relax.Expr) -> bool:
    """Whether `value` is a call that allocates a block of memory."""
    name = getattr(getattr(value, "op", None), "name", "")
    return isinstance(value, relax.Call) and name.endswith("alloc_storage")
