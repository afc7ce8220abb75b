"""What `python -m bitmtp_tvm.tune` does: build, measure, merge, predict, or all of a tuning."""

import importlib
import importlib.util
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bitmtp_tvm.compile import CompileOptions
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.records import tuning_folder
from bitmtp_tvm.targets import get_target
from bitmtp_tvm.tuning_plan import TuningPlan, check_own, read_plan

if TYPE_CHECKING:
    from bitmtp_tvm.records import Records
    from bitmtp_tvm.tune import TuneOptions
    from bitmtp_tvm.tuning_log import Measurements
    from bitmtp_tvm.tuning_tasks import Found, Model
    from schedules.space import Choice

PRIMITIVES = "bitmtp_tvm.tuning_schedules"
ABOUT_FILES = ("quant", "quant_threshold", "mask_token_id", "block_size")


def compile_options(options: "TuneOptions") -> CompileOptions:
    """The model, as compile is told of it."""
    names = ("model", "random_weights", "context", "widths", *ABOUT_FILES)
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    return CompileOptions(str(options.target), **given)


def records_folder(options: "TuneOptions", target: str) -> Path:
    """Where the records go; UsageError where that is no folder."""
    folder = options.records or tuning_folder(target)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--records {folder} is no folder")
    return folder


def find(options: "TuneOptions") -> "Model":
    """The model's tasks; compilers first, since TVM must not come up without its CUDA part."""
    from bitmtp_tvm.toolchain import require_compilers

    require_compilers(get_target(str(options.target)).kind)
    from bitmtp_tvm.tuning_tasks import find_tasks

    return find_tasks(compile_options(options), options.ops or ())


def build(options: "TuneOptions", directory: Path) -> TuningPlan:
    """Build the candidates of a model into `directory`, with the plan of what they are."""
    check_own(directory, options.resume)
    if get_target(str(options.target)).kind != "cuda":
        raise UsageError(f"no kernel has templates on {options.target}: there is nothing to build")
    return build_model(options, find(options), directory)


def build_model(options: "TuneOptions", model: "Model", directory: Path) -> TuningPlan:
    from bitmtp_tvm.toolchain import versions
    from bitmtp_tvm.tuning_build import build_all, with_built

    wanted = wanted_kernels(options, model)
    if not options.resume and directory.exists():
        for path in directory.iterdir():
            path.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    with bar("building kernels", len(wanted)) as say:
        built = build_all(wanted, model.plan.target, directory, lambda n: say("", n))
    tasks = [found.task for found in model.found] + [item.task for item in model.fixed]
    plan = TuningPlan(
        target=model.plan.target.name,
        model=model.plan.checkpoint.name,
        arch=model.plan.target.arch,
        versions=versions(),
        commit=commit(),
        buckets=model.buckets,
        tasks=tuple(with_built(task, built) for task in tasks),
    )
    plan.write(directory)
    print(_built(plan, directory))
    return plan


def wanted_kernels(options: "TuneOptions", model: "Model") -> list[Any]:
    """What is worth building within the trials, the rule's kernel of each task first and what
    records give now second, and behind that what is fixed."""
    from bitmtp_tvm.records import Records
    from bitmtp_tvm.tuning_build import Wanted
    from bitmtp_tvm.tuning_predict import ranked
    from bitmtp_tvm.tuning_tasks import budgets, check_trials, expected_gain

    target = model.plan.target
    records = Records.read(records_folder(options, target.name))
    gains = [expected_gain(f.task, target.bandwidth_gbs, records) for f in model.found]
    given = budgets(gains, [len(f.choices) for f in model.found], options.trials)
    check_trials(model, given)
    cost = cost_model() if sum(given) < sum(len(f.choices) for f in model.found) else None
    searched = []
    for found, count in zip(model.found, given, strict=True):
        rule, *others = ranked(found, target, cost)
        current = in_force(found, records) or rule
        # Both are built even where one trial is left: what was found before must not be lost.
        ahead = [rule] if current == rule else [rule, current]
        chosen = [*ahead, *(choice for choice in others if choice != current)]
        searched += [
            Wanted(
                found.task,
                choice.template.name,
                choice.arguments(),
                choice == rule,
                current=choice == current,
            )
            for choice in chosen[: max(count, len(ahead))]
        ]
    return [*searched, *fixed_kernels(model, records.folder)]


def in_force(found: "Found", records: "Records") -> "Choice | None":
    """Of a task's choices the one that records give, None without a record or for another tile."""
    record = next(iter(records.of(found.task.key)), None)
    if record is None:
        return None
    wanted = record.template, record.arguments
    return next((c for c in found.choices if (c.template.name, c.arguments()) == wanted), None)


def fixed_kernels(model: "Model", folder: Path) -> list[Any]:
    """The kernels that nothing is searched for, as records and rules make them."""
    import tvm

    from bitmtp_tvm.targets import tvm_target
    from bitmtp_tvm.tuned import Tuned
    from bitmtp_tvm.tuning_build import Wanted

    target, wanted = model.plan.target, []
    tuned = Tuned.open(folder, target)
    for item in model.fixed:
        made, origin = tuned.schedule(item.func, tvm_target(target))
        if made is None:
            raise BitMTPError(f"no schedule for {item.task.key.op} on {target.kind}: add a rule")
        program = tvm.ir.save_json(made)
        wanted.append(Wanted(item.task, origin.template, origin.arguments, True, program))
    return wanted


def cost_model() -> Any:
    """What was learnt so far, or None: then candidates are taken as the templates list them."""
    from bitmtp_tvm.tuning_predict import learn

    try:
        return learn()
    except BitMTPError as fault:
        print(f"candidates are not ranked: {fault}", file=sys.stderr)
        return None


def _built(plan: TuningPlan, directory: Path) -> str:
    kernels = sum(len(task.candidates) for task in plan.searched)
    size = sum(path.stat().st_size for path in directory.iterdir())
    reasons: dict[str, int] = {}
    for task in plan.tasks:
        for reason, count in task.rejected.items():
            reasons[reason] = reasons.get(reason, 0) + count
    rejected = "".join(f", {count} rejected ({reason})" for reason, count in reasons.items())
    searched = len(plan.searched)
    return (
        f"{directory}: {kernels} kernels of {searched} tasks for {plan.target}{rejected}, "
        f"{len(plan.tasks) - searched} that stay as they are, {size / 2**20:.1f} MiB"
    )


def measure(options: "TuneOptions", directory: Path) -> "Measurements":
    """Time what `directory` holds, here or on a board, and say what came out."""
    from bitmtp_tvm.tuning_log import open_measurements
    from bitmtp_tvm.tuning_measure import Measuring
    from bitmtp_tvm.tuning_merge import summary
    from bitmtp_tvm.tuning_process import WorkerProcess
    from bitmtp_tvm.tuning_rpc import RpcWorker, parse_tracker

    plan = read_plan(directory, options.target)
    known = open_measurements(directory, options.resume)
    worker = (
        RpcWorker(plan, directory, parse_tracker(options.rpc), str(options.key))
        if options.rpc
        else WorkerProcess(directory)
    )
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    measured = plan.searched if options.rpc else plan.tasks
    with bar("measuring", sum(len(task.candidates) for task in measured)) as say:
        measuring = Measuring(plan, worker, known, deadline, say=say, chains=not options.rpc)
        measuring.run()
    for line in summary(plan, known):
        print(line)
    return known


def merge(options: "TuneOptions", directory: Path) -> None:
    """Turn what was measured into records."""
    from bitmtp_tvm.tuning_log import read_measurements
    from bitmtp_tvm.tuning_merge import merge as merge_into

    plan = read_plan(directory, options.target)
    folder = records_folder(options, plan.target)
    count = merge_into(plan, read_measurements(directory), folder, options.command)
    print(f"{folder}: records of {count} tasks, measured on {plan.target}")


def predict(options: "TuneOptions") -> None:
    """Write records that a model learnt from another card's."""
    from bitmtp_tvm import tuning_predict
    from bitmtp_tvm.tuning_build import build_all

    target, source = get_target(str(options.target)), str(options.source)
    tuning_predict.check_source(source, target)
    tuning_predict.check_learnt(source, tuning_folder(source))
    cost = tuning_predict.learn(source=source)
    model = find(options)
    folder = records_folder(options, target.name)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        count = tuning_predict.predict(
            model.found, target, source, cost, folder, lambda w: build_all(w, target, scratch)
        )
    print(f"{folder}: {count} records for {target.name}, predicted from {source}, none measured")


def tune_here(options: "TuneOptions") -> None:
    """Build, measure and merge on this machine, or on the board behind the tracker."""
    from bitmtp_tvm.cache import cache_directory

    model = find(options)
    primitives = importlib.util.find_spec(PRIMITIVES) is not None
    if not model.found and not primitives:
        raise UsageError(
            f"no kernel of {model.plan.checkpoint.name} has templates on {options.target}: there "
            "is nothing to tune"
        )
    if model.found:
        name = f"tune-{model.plan.checkpoint.name}-{options.target}"
        directory = cache_directory() / name
        if not options.resume:
            clear(directory)
        build_model(options, model, directory)
        measure(replace(options, resume=True), directory)
        merge(options, directory)
        clear(directory)
    if primitives:
        tune_primitives(options, model)


def clear(directory: Path) -> None:
    """Remove what an earlier run has left, and nothing else."""
    check_own(directory, resume=True)
    for path in directory.iterdir() if directory.exists() else ():
        path.unlink()


def tune_primitives(options: "TuneOptions", model: "Model") -> None:
    """Let MetaSchedule tune the operations that are scheduled by primitives."""
    from bitmtp_tvm.records import Records, write_device_info
    from bitmtp_tvm.targets import tvm_target
    from bitmtp_tvm.tuning_merge import host_info
    from bitmtp_tvm.tuning_rpc import parse_tracker

    module: Any = importlib.import_module(PRIMITIVES)
    target = model.plan.target
    kernels = {
        name: func
        for name, func in model.kernels.items()
        if not options.ops or func.attrs["bitmtp.op"] in options.ops
    }
    tasks = module.schedule_tasks(kernels, tvm_target(target))
    if not tasks:
        return
    folder = records_folder(options, target.name)
    if Records.read(folder).device is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_device_info(folder, host_info(target, options.command, commit()))
    tracker = None
    if options.rpc:
        tracker = module.Tracker(*parse_tracker(options.rpc), str(options.key))
    each = max(1, options.trials // len(tasks))
    with bar("tuning schedules", len(tasks)) as say:
        outcomes = module.tune_schedules(
            tasks, target, folder, each, tracker, lambda outcome: say(outcome.task.names[0], 1)
        )
    before, after = module.total(outcomes)
    print(f"{folder}: {len(tasks)} schedules, {before * 1e6:.1f} -> {after * 1e6:.1f} us in all")


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on stderr that is told what is going on and how much more is done."""
    with tqdm(total=total, desc=title, file=sys.stderr, unit=" kernels") as progress:

        def say(text: str, done: int) -> None:
            if text:
                progress.set_postfix_str(text, refresh=False)
            progress.update(done)

        yield say


def commit() -> str:
    """The commit of this package's checkout, "" where it is none."""
    root = Path(__file__).parents[1]
    command: Sequence[str] = ("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
