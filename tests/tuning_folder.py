"""A folder as `tune --build-only` leaves it, for this machine's processor: small real kernels."""

from dataclasses import replace
from pathlib import Path

from bitmtp_tvm.records import Key
from bitmtp_tvm.targets import get_target
from bitmtp_tvm.tuning_plan import Candidate, Task, TuningPlan

LIBRARY = "kernels-0.so"
SEGMENTS = [40, 24]
SIZE = 200
WIDTH = 2
LAYERS = 3

RULE, EQUAL, WRONG, ABORTS = "rule", "equal", "wrong", "aborts"


def task(name="linear", width=WIDTH, layers=LAYERS, functions=(RULE, EQUAL, WRONG)):
    """A task of a ternary linear; a function is named after the task and what it does."""
    rows, padded = sum(SEGMENTS), 256
    shapes = ((width, padded), (width,), (width,), (8, 2, 8, 32), (2,), (width, rows))
    dtypes = ("int8", "float32", "int32", "uint8", "float32", "float32")
    candidates = tuple(
        Candidate(f"{name}_{what}", LIBRARY, "low_bit_gemv", {"warps": place + 1})
        for place, what in enumerate(functions)
    )
    return Task(
        name=name,
        key=Key("low_bit_linear", "bitnet-ternary", rows, padded, width, False, False),
        settings={
            "format": "bitnet-ternary",
            "segments": SEGMENTS,
            "residual": False,
            "size": SIZE,
        },
        shapes=shapes,
        dtypes=dtypes,
        constants=(3, 4),
        reads=8 * 2 * 8 * 32 + 8,
        counts={f"step_w{width}": layers},
        candidates=candidates,
    )


def norm(width=WIDTH, layers=LAYERS):
    """A fixed task in front of a linear of that width: the norm, and the codes of its rows."""
    name, shapes = f"norm_w{width}", ((width, SIZE), (SIZE,), (width, 256), (width,), (width,))
    return Task(
        name=name,
        key=Key("norm_quantize", "", 0, SIZE, width, False, False),
        settings={},
        shapes=shapes,
        dtypes=("float32", "float32", "int8", "float32", "int32"),
        constants=(1,),
        reads=4 * SIZE,
        counts={f"step_w{width}": layers},
        candidates=(Candidate(name, LIBRARY, "", {}),),
        names=("x", "weight", "q", "scale", "total"),
        fixed=True,
    )


def plan(*tasks):
    """A plan of tasks, each in the bucket of its width, layer by layer, what is fixed first."""
    buckets = {}
    for item in sorted(tasks, key=lambda item: not item.fixed):
        buckets.setdefault(f"step_w{item.key.width}", []).append(item.name)
    repeated = {name: tuple(names * LAYERS) for name, names in buckets.items()}
    return TuningPlan("cpu", "tiny", "", {"tvm": "0"}, "abc1234", repeated, tasks)


def write_folder(directory: Path, *tasks):
    """Build every candidate of the tasks and write the plan."""
    import tvm

    from bitmtp_tvm.targets import tvm_target
    from bitmtp_tvm.toolchain import cross_compiler

    target = get_target("cpu")
    described = tvm_target(target)
    functions = {
        c.function: made(c.function, item, described) for item in tasks for c in item.candidates
    }
    directory.mkdir(parents=True, exist_ok=True)
    library = tvm.tirx.build(tvm.IRModule(functions), target=described)
    path = directory / LIBRARY
    library.export_library(str(path), fcompile=cross_compiler(target.host_triple))
    found = plan(*tasks)
    found.write(directory)
    return found


def made(name, item, described):
    """The processor's kernel, or one that does what `name` ends in."""
    from bitmtp_tvm.specialize import bind_dims
    from relax_models import ops
    from schedules import rule

    if item.fixed:
        func = bind_dims(ops.norm_quantize(SIZE, 1e-5), {"width": item.key.width})
        func = rule.apply(func, described)
    elif name.endswith((WRONG, ABORTS)):
        func = misled(item, name.endswith(ABORTS))
    else:
        func = ops.low_bit_linear(SEGMENTS, SIZE, "llvm", "bitnet-ternary")
        func = rule.apply(bind_dims(func, {"width": item.key.width}), described)
    return func.with_attr("global_symbol", name)


def misled(item, aborts):
    """A kernel that gives the scales, or that ends the process."""
    from tvm.script import tirx as T

    width, rows = item.shapes[-1]
    arguments = list(zip(item.shapes, item.dtypes, strict=True))

    @T.prim_func(s_tir=True)
    def func(
        q: T.Buffer(*arguments[0]),
        scale: T.Buffer(*arguments[1]),
        total: T.Buffer(*arguments[2]),
        weight: T.Buffer(*arguments[3]),
        weight_scale: T.Buffer(*arguments[4]),
        y: T.Buffer(*arguments[5]),
    ):
        for i, n in T.grid(width, rows):
            with T.sblock("y"):
                vi, vn = T.axis.remap("SS", [i, n])
                if aborts:
                    T.evaluate(T.call_extern("int32", "abort"))
                y[vi, vn] = scale[vi]

    return func


def without(item, *functions):
    """The task without some of its candidates."""
    kept = tuple(c for c in item.candidates if not c.function.endswith(functions))
    return replace(item, candidates=kept)
