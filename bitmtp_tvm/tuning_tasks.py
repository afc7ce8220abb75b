"""What there is to tune in a model: its kernels that have templates, how often a step runs each.

A task is one workload; its share of a step decides how many of the trials it gets.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm import relax, tirx

from bitmtp_tvm.bench_kernels import LOOKED_UP
from bitmtp_tvm.cards import card_of
from bitmtp_tvm.compile import CompileOptions, Plan, make_plan, symbolic_model
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.pipeline import before_schedule
from bitmtp_tvm.records import Key
from bitmtp_tvm.specialize import KERNEL_OPS, Bucket
from bitmtp_tvm.targets import tvm_target
from bitmtp_tvm.tuning_fixed import fixed_constants
from bitmtp_tvm.tuning_inputs import OPERATIONS, operation
from bitmtp_tvm.tuning_plan import Task
from schedules import rule
from schedules.space import Choice, choices
from schedules.workload import Workload, read

if TYPE_CHECKING:
    from bitmtp_tvm.records import Records
    from bitmtp_tvm.targets import Target

KERNEL_SECONDS = 1e-6
"""What a launch costs beside its bytes: measured for dependent kernels of one graph."""

LEAST_TRIALS = 2
"""A task with fewer has nothing to compare."""


@dataclass(frozen=True)
class Found:
    """A task without candidates, and all that could be tried for it, the rule's choice first."""

    task: Task
    work: Workload
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Fixed:
    """A kernel that nothing is searched for, and its function before any schedule."""

    task: Task
    func: tirx.PrimFunc


@dataclass(frozen=True)
class Model:
    """A model's tasks on a target. found: those that are searched; fixed: the others beside
    them; buckets: names of the tasks in the order of a step, none where nothing is searched;
    kernels: all of the model's, at static shapes."""

    plan: Plan
    found: tuple[Found, ...]
    fixed: tuple[Fixed, ...]
    buckets: dict[str, tuple[str, ...]]
    kernels: dict[str, tirx.PrimFunc]


def find_tasks(options: CompileOptions, ops: Sequence[str] = ()) -> Model:
    """Every kernel of the model that `options` name, specialised for its target: those with
    templates are searched, or of these the operations `ops` alone.

    Raises `BitMTPError` for options that `compile` does not take either, `UsageError` for an
    operation that the model does not have.
    """
    plan = make_plan(options)
    wanted = [Bucket("step", w) for w in plan.target.widths]
    wanted += [Bucket("prefill", w) for w in plan.target.prefill]
    mod = before_schedule(symbolic_model(plan), wanted, tvm_target(plan.target))
    functions = {var.name_hint: func for var, func in mod.functions_items()}
    kernels = {name: f for name, f in functions.items() if isinstance(f, tirx.PrimFunc)}
    works = {name: read(func) for name, func in kernels.items()}
    _check_ops(ops, works)
    tuned = {op for op in rule.TEMPLATES.get(plan.target.kind, {}) if not ops or op in ops}
    sequences = {}
    for bucket in wanted:
        names = [var.name_hint for var in kernel_sequence(mod[bucket.name])]
        sequences[bucket.name] = names if any(works[name].op in tuned for name in names) else []
    searched: dict[Key, Found] = {}
    fixed: dict[str, Fixed] = {}

    def task_of(name: str) -> str:
        if works[name].op in tuned:
            return _found(kernels[name], works[name], plan.target, searched).task.name
        fixed[name] = fixed.get(name) or _fixed(name, kernels[name], plan.target)
        return name

    buckets = {bucket: tuple(map(task_of, names)) for bucket, names in sequences.items()}
    found = tuple(replace(f, task=_counted(f.task, buckets)) for f in searched.values())
    others = tuple(replace(f, task=_counted(f.task, buckets)) for f in fixed.values())
    return Model(plan, found, others, buckets, kernels)


def _check_ops(ops: Sequence[str], works: Mapping[str, Workload]) -> None:
    known = sorted({work.op for work in works.values()})
    odd = [op for op in ops if op not in known]
    if odd:
        raise UsageError(f"--ops {odd[0]}: the model has {', '.join(known)}")


def kernel_sequence(func: relax.Function) -> list[Any]:
    """The kernels that a function calls, in its order, as often as it calls them."""
    calls: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, relax.Call) and getattr(node.op, "name", None) in KERNEL_OPS:
            calls.append(node.args[0])

    relax.analysis.post_order_visit(func, visit)
    return calls


def _found(func: tirx.PrimFunc, work: Workload, target: "Target", found: dict[Key, Found]) -> Found:
    card = card_of(target)
    key = Key.of(work, card)
    if key not in found:
        operation(key.op)
        task = _task(task_name(key), func, key)
        templates = rule.TEMPLATES[target.kind][work.op]
        found[key] = Found(task, work, tuple(choices(templates, work, card)))
    return found[key]


def _fixed(name: str, func: tirx.PrimFunc, target: "Target") -> Fixed:
    task = _task(name, func, Key.of(read(func), card_of(target)))
    return Fixed(replace(task, fixed=True), func)


def _task(name: str, func: tirx.PrimFunc, key: Key) -> Task:
    """A task without candidates, and not counted yet."""
    work, names = read(func), tuple(param.name for param in func.params)
    known = OPERATIONS.get(key.op)
    task = Task(
        name=name,
        key=key,
        settings=work.settings,
        shapes=work.shapes,
        dtypes=work.dtypes,
        constants=known.constants if known else fixed_constants(key.op, names),
        reads=0,
        counts={},
        names=names,
    )
    if known and known.reads:
        return replace(task, reads=known.reads(task))
    looked_up = key.op.endswith("embed") or key.op in LOOKED_UP
    return replace(task, reads=0 if looked_up else task.weight_bytes)


def task_name(key: Key) -> str:
    """The name of a key's task, and the first part of those of its functions."""
    form = key.format.replace("-", "_")
    parts = [key.op, form, f"n{key.n}", f"k{key.k}", f"w{key.width}"]
    parts += ["residual"] * key.residual
    return "_".join(part for part in parts if part)


def _counted(task: Task, buckets: Mapping[str, Sequence[str]]) -> Task:
    name = task.name
    counts = {bucket: Counter(names)[name] for bucket, names in buckets.items() if name in names}
    return replace(task, counts=counts)


def expected_gain(task: Task, bandwidth_gbs: float, records: "Records | None" = None) -> float:
    """Seconds of a step, over all buckets, that the task's kernels take.

    As measured where records have them, less the floor that no tuning goes below; else guessed from
    bytes and launches.
    """
    floor = task.floor(bandwidth_gbs)
    known = records.of(task.key) if records else []
    seconds = next((r.seconds for r in known if r.seconds and r.provenance == "measured"), None)
    each = KERNEL_SECONDS + floor if seconds is None else max(seconds - floor, 0.1 * seconds)
    return each * sum(task.counts.values())


def budgets(gains: Sequence[float], available: Sequence[int], trials: int) -> list[int]:
    """How many candidates each task gets, the rule's included: at most what it has.

    The rule's kernel is built for all, since the others are compared with it. Of what `trials`
    leaves, each gets the part of its gain, the largest gain first, but one to compare as long as
    there are any; what one cannot use goes to the others.
    """
    given = [min(1, count) for count in available]
    left = trials - sum(given)
    order = sorted(range(len(gains)), key=lambda i: -gains[i])
    least = [i for i in order if available[i] >= LEAST_TRIALS][: max(0, left)]
    for i in least:
        given[i], left = LEAST_TRIALS, left - 1
    while left > 0:
        open_tasks = [i for i in least if given[i] < available[i]]
        whole = math.fsum(gains[i] for i in open_tasks)
        if whole <= 0:
            break
        for i in open_tasks:
            more = max(1, int(trials * gains[i] / whole) - given[i])
            more = min(more, available[i] - given[i], left)
            given[i], left = given[i] + more, left - more
    return given


def check_trials(model: Model, given: Sequence[int]) -> None:
    """Raise `UsageError` when no task has anything to compare."""
    if not any(count >= LEAST_TRIALS for count in given):
        most = max((len(f.choices) for f in model.found), default=0)
        if most < LEAST_TRIALS:
            raise BitMTPError(
                f"no kernel of {model.plan.checkpoint.name} has more than one tile to try on "
                f"{model.plan.target.name}: there is nothing to tune"
            )
        raise UsageError(
            f"--trials is too small: {len(model.found)} kernels are the rule's, give more than that"
        )
