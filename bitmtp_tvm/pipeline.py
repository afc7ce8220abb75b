"""From the symbolic model to what the back end compiles: one numbered list of passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvm import IRModule, relax, tirx
from tvm.target import Target as TVMTarget

from bitmtp_tvm.chunks import GRAPH_STORAGE, add_chunks, allocates, capture_graphs, mark_graphs
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.fuse import fuse
from bitmtp_tvm.lean import drop_checks, share_views
from bitmtp_tvm.manifest import KernelRecord
from bitmtp_tvm.specialize import Bucket, specialize
from bitmtp_tvm.tuned import Origin, Tuned
from schedules.workload import Workload, read

# The pooled allocator of TVM's virtual machine hands out whole pages.
PAGE = 4096


@dataclass
class Lowered:
    """What the passes leave behind: the module, one record a kernel, and the sizes in bytes of the
    blocks that the allocator ends up with."""

    mod: IRModule
    kernels: list[KernelRecord] = field(default_factory=list)
    workspace: list[int] = field(default_factory=list)


Pass = Callable[[IRModule], IRModule]


def lower(
    mod: IRModule,
    wanted: Sequence[Bucket],
    target: TVMTarget,
    dump: Path | None = None,
    progress: Callable[[str], None] | None = None,
    tuned: Tuned | None = None,
) -> Lowered:
    """Run all passes on the model's symbolic module; with `dump`, write it there after each.

    Without `tuned` the rules decide everything, for a large card. Raises `BitMTPError` for a kernel
    that no rule schedules, and for a record that does not fit.
    """
    result = Lowered(mod)
    passes = _passes(result, wanted, target, tuned or Tuned())
    for number, (name, step) in enumerate(passes, start=1):
        if progress:
            progress(name)
        with target:
            result.mod = step(result.mod)
        if dump:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{number:02d}_{name}.py").write_text(result.mod.script())
    return result


def before_schedule(mod: IRModule, wanted: Sequence[Bucket], target: TVMTarget) -> IRModule:
    """The model's symbolic module as the pass `schedule` gets it."""
    for name, step in _passes(Lowered(mod), wanted, target, Tuned()):
        if name == "schedule":
            break
        with target:
            mod = step(mod)
    return mod


def unscheduled(
    mod: IRModule, wanted: Sequence[Bucket], target: TVMTarget
) -> dict[str, tirx.PrimFunc]:
    """The kernels of a model's symbolic module by name, at static shapes, before any schedule: what
    there is to tune."""
    functions = before_schedule(mod, wanted, target).functions_items()
    return {var.name_hint: func for var, func in functions if isinstance(func, tirx.PrimFunc)}


def _passes(
    result: Lowered, wanted: Sequence[Bucket], target: TVMTarget, tuned: Tuned
) -> list[tuple[str, Pass]]:
    return [
        ("specialize", lambda mod: specialize(mod, wanted)),
        ("fuse", lambda mod: fuse(mod, target)),
        ("decode_loop", lambda mod: _decode_loop(mod, wanted, target)),
        ("schedule", lambda mod: _schedule(mod, target, tuned, result.kernels)),
        *LOWERING,
        ("capture_graphs", capture_graphs),
        ("lower_alloc_tensor", relax.transform.LowerAllocTensor()),
        ("plan_workspace", lambda mod: _plan_workspace(mod, result)),
        *_finishing(target.kind.name),
    ]


# TVM's own, in the order of its default pipeline, without the passes that schedule or fuse: what a
# rule made is final.
LOWERING: list[tuple[str, Pass]] = [
    ("to_non_dataflow", relax.transform.ToNonDataflow()),
    ("remove_purity_checking", relax.transform.RemovePurityChecking()),
    ("call_tir_rewrite", relax.transform.CallTIRRewrite()),
    ("static_plan_block_memory", relax.transform.StaticPlanBlockMemory()),
]
RUNTIME: list[tuple[str, Pass]] = [
    ("lower_runtime_builtin", relax.transform.LowerRuntimeBuiltin()),
    ("compute_prim_value", relax.transform.ComputePrimValue()),
    ("vm_shape_lower", relax.transform.VMShapeLower()),
]


def _finishing(kind: str) -> list[tuple[str, Pass]]:
    """To what the virtual machine of a target kind runs.

    A step on the processor is all the machine's, which would make, forget and check hundreds of
    tensors each time. There what is allocated is freed at the end of a step.
    """
    attach = ("attach_global_symbol", relax.transform.AttachGlobalSymbol())
    if kind == "llvm":
        return [("share_views", share_views), *RUNTIME, ("drop_checks", drop_checks), attach]
    return [("kill_after_last_use", relax.transform.KillAfterLastUse()), *RUNTIME, attach]


PASSES = 4 + len(LOWERING) + 3 + len(_finishing("llvm"))
"""Of a processor; a GPU has one less."""


def _decode_loop(mod: IRModule, wanted: Sequence[Bucket], target: TVMTarget) -> IRModule:
    """Add what runs several steps in one call: chunks, or what becomes CUDA graphs."""
    steps = [bucket.name for bucket in wanted if bucket.entry == "step"]
    return mark_graphs(mod, steps) if target.kind.name == "cuda" else add_chunks(mod, steps)


def _schedule(
    mod: IRModule, target: TVMTarget, tuned: Tuned, kernels: list[KernelRecord]
) -> IRModule:
    """Put every kernel's scheduled form in its place and note where the schedule came from."""
    for var, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            work = read(func)
            made, origin = tuned.schedule(func, target)
            if made is None:
                raise BitMTPError(
                    f"no schedule for {work.op} ({var.name_hint}) on {target.kind.name}: add a rule"
                )
            mod.update_func(var, made)
            kernels.append(_record(var.name_hint, work, origin))
    kernels.sort(key=lambda kernel: (kernel.op, kernel.width, kernel.name))
    return mod


def _record(name: str, work: Workload, origin: Origin) -> KernelRecord:
    width = int(name.rsplit("_w", 1)[1])
    form = work.settings.get("format", "")
    return KernelRecord(
        name,
        work.op,
        form,
        width,
        origin.provenance,
        origin.source,
        origin.template,
        origin.arguments,
    )


def _plan_workspace(mod: IRModule, result: Lowered) -> IRModule:
    """The blocks of the pooled allocator: freed ones serve the other functions by their size.

    What the graphs share is never freed, so nothing else can use it.
    """
    pool: dict[int, int] = {}
    graphs: dict[int, int] = {}
    for var, func in mod.functions.items():
        if isinstance(func, relax.Function):
            blocks = graphs if var.name_hint == GRAPH_STORAGE else pool
            for size, count in _blocks(func).items():
                blocks[size] = max(blocks.get(size, 0), count)
    found = sorted([*pool.items(), *graphs.items()])
    result.workspace = [size for size, count in found for _ in range(count)]
    return mod


def _blocks(func: relax.Function) -> dict[int, int]:
    found: dict[int, int] = {}

    def visit(node):
        if allocates(node):
            (size,) = node.args[0].values
            rounded = -(-int(size) // PAGE) * PAGE
            found[rounded] = found.get(rounded, 0) + 1

    relax.analysis.post_order_visit(func, visit)
    return found
