"""Tunes the operations that are scheduled with primitives: MetaSchedule, one operation at a time.

Builds and runs happen in processes of their own, here or behind an RPC tracker. What an operation
gained is in the folder's database before the next begins, so that an interruption loses one.
"""

import importlib.util
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target as TVMTarget

from bitmtp_tvm import schedule_timing
from bitmtp_tvm.databases import (
    best_record,
    decisions_of,
    read_database,
    recorded_decisions,
    with_record,
    write_database,
)
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.ranked_search import RankedSearch, arguments
from bitmtp_tvm.targets import Target, tvm_target
from schedules.parsing import quick_frames
from schedules.rule import operation_of
from schedules.sampled import MAIN, Sampled

PACKAGES = ("cloudpickle", "psutil", "tornado", "xgboost")
TUNE = "pip install '.[tune]'"
TRIALS_AT_ONCE = 8
BUILD_SECONDS = 120
RUN_SECONDS = 60
TURNS = 3


@dataclass(frozen=True)
class Tracker:
    """An RPC tracker and the key of the devices to take from it."""

    host: str
    port: int
    key: str


@dataclass(frozen=True)
class ScheduleTask:
    """One operation to tune; `names` are the kernels that it is."""

    names: tuple[str, ...]
    operation: Sampled

    @property
    def combinations(self) -> int:
        """Ways to schedule it."""
        return self.operation.count()


@dataclass(frozen=True)
class Outcome:
    """Seconds of one run: under the rule's decisions, and under the best that was found."""

    task: ScheduleTask
    ruled: float
    best: float
    decided: Mapping[str, int]


def schedule_tasks(kernels: Mapping[str, tirx.PrimFunc], target: TVMTarget) -> list[ScheduleTask]:
    """What there is to decide among specialised kernels (`pipeline.unscheduled`); equal ones are
    one task."""
    found: dict[Any, tuple[list[str], Sampled]] = {}
    for name, func in kernels.items():
        operation = operation_of(func, target)
        if operation and operation.is_open():
            key = tvm_ffi.structural_hash(operation.mod)
            found.setdefault(key, ([], operation))[0].append(name)
    return [ScheduleTask(tuple(names), operation) for names, operation in found.values()]


def tune_schedules(
    tasks: Sequence[ScheduleTask],
    target: Target,
    folder: Path,
    trials: int | Callable[[ScheduleTask], int],
    tracker: Tracker | None = None,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Measure up to `trials` schedules of every task and keep the best of each in `folder`.

    What is there already is measured again, and stays if it is better. `progress` is told every
    task's outcome. The folder needs a `device.json` before `compile` takes it
    (`records.write_device_info`). Raises `BitMTPError` where the rule's own schedule cannot be
    built or run.
    """
    require_packages()
    _quiet()
    database, model = read_database(folder), ms.cost_model.XGBModel(num_warmup_samples=16)
    builder, described = _builder(target), tvm_target(target)
    outcomes = []
    for task in tasks:
        operation, most = task.operation, trials if isinstance(trials, int) else trials(task)
        with tempfile.TemporaryDirectory() as scratch:
            checked = str(Path(scratch) / "reference"), results_of(operation)
            runner = _remote(tracker, checked) if tracker else _local(checked)
            bench = _Bench(operation, target, builder, runner)
            known = recorded_decisions(database, operation, described, folder)
            outcome = _tune_one(task, bench, known, model, most)
        database = with_record(database, operation, described, outcome.decided, outcome.best)
        write_database(folder, database)
        outcomes.append(outcome)
        progress(outcome)
    return outcomes


def require_packages() -> None:
    """Raise `BitMTPError` unless what MetaSchedule needs beside TVM is installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise BitMTPError(f"tuning needs {', '.join(missing)}: {TUNE}")


class _Bench:
    """Builder and runner of one operation."""

    def __init__(self, operation: Sampled, target: Target, builder: Any, runner: Any):
        self.operation = operation
        self.target = tvm_target(target)
        self.device = "cuda" if target.kind == "cuda" else "cpu"
        self.builder = builder
        self.runner = runner

    def contest(self, all_decided: Sequence[Mapping[str, int]]) -> list[float]:
        """Seconds of each, the least of a few turns, which they take by turns: what else the
        machine does meets them alike. Raises `BitMTPError` where one cannot be built or run."""
        mods = [self.operation.schedule(decided)[0].mod for decided in all_decided]
        built = self.builder.build([ms.builder.BuilderInput(mod, self.target) for mod in mods])
        times: list[list[float]] = [[] for _ in built]
        for _ in range(TURNS):
            for found, result in zip(times, built, strict=True):
                found.append(self._run(result))
        return [min(found) for found in times]

    def _run(self, built: Any) -> float:
        fault = built.error_msg
        if not fault:
            given = ms.runner.RunnerInput(
                built.artifact_path, self.device, arguments(self.operation)
            )
            (future,) = self.runner.run([given])
            result = future.result()
            fault = result.error_msg
        if fault:
            raise BitMTPError(f"{self.operation.work.op} cannot be measured: {_cause(fault)}")
        return float(result.run_secs[0])


def _builder(target: Target) -> Any:
    return ms.builder.LocalBuilder(
        timeout_sec=BUILD_SECONDS,
        f_build=schedule_timing.build_schedule,
        f_export=partial(schedule_timing.export_library, target.host_triple),
    )


def _local(checked: tuple[str, tuple[int, ...]]) -> Any:
    return ms.runner.LocalRunner(
        timeout_sec=RUN_SECONDS,
        f_alloc_argument=schedule_timing.make_arguments,
        f_run_evaluator=partial(schedule_timing.run_checked, *checked),
    )


def _remote(tracker: Tracker, checked: tuple[str, tuple[int, ...]]) -> Any:
    return ms.runner.RPCRunner(
        rpc_config=ms.runner.RPCConfig(
            tracker_host=tracker.host,
            tracker_port=tracker.port,
            tracker_key=tracker.key,
            session_timeout_sec=RUN_SECONDS,
        ),
        f_alloc_argument=schedule_timing.make_remote_arguments,
        f_run_evaluator=partial(schedule_timing.run_remote, *checked),
    )


def _cause(fault: str) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def results_of(operation: Sampled) -> tuple[int, ...]:
    """Indices of the buffers that an operation writes."""
    schedule = s_tir.Schedule(operation.mod)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    written = [region.source for block in blocks for region in schedule.get(block).writes]
    params = enumerate(operation.mod[MAIN].params)
    return tuple(i for i, param in params if any(param.same_as(buffer) for buffer in written))


def _tune_one(
    task: ScheduleTask,
    bench: _Bench,
    known: Mapping[str, int] | None,
    model: Any,
    trials: int,
) -> Outcome:
    """Search, then let the best that was found, the rule and what is `known` meet once more."""
    bench.contest([{}])
    found = ms.database.MemoryDatabase()
    with quick_frames():
        # TVM imports the definitions of all its tensor instructions here.
        context = ms.TuneContext(
            task.operation.mod,
            target=bench.target,
            space_generator=ms.space_generator.ScheduleFn(
                task.operation.draw, sch_rules=[], postprocs=[], mutator_probs={}
            ),
            search_strategy=RankedSearch(task.operation),
            task_name=task.names[0],
            rand_state=1,
            logger=logging.getLogger(__name__),
        )
        ms.tune_tasks(
            tasks=[context],
            task_weights=[1.0],
            work_dir="",
            max_trials_global=trials,
            num_trials_per_iter=min(TRIALS_AT_ONCE, trials),
            builder=bench.builder,
            runner=bench.runner,
            database=found,
            cost_model=model,
            task_scheduler="round-robin",
        )
    record = best_record(found, task.operation, bench.target)
    # The rule's own decisions first: of equals they stay.
    rivals = [task.operation.schedule()[1].made]
    rivals += [decisions_of(record.trace, task.operation)] if record else []
    rivals += [dict(known)] if known else []
    distinct = [rival for i, rival in enumerate(rivals) if rival not in rivals[:i]]
    times = bench.contest(distinct)
    best = min(times)
    return Outcome(task, times[0], best, distinct[times.index(best)])


def _quiet() -> None:
    """MetaSchedule tells the log about every trial."""
    for name in ("tvm.s_tir.meta_schedule", __name__):
        logging.getLogger(name).setLevel(logging.ERROR)


def total(outcomes: Iterable[Outcome]) -> tuple[float, float]:
    """Seconds of one run of every task: by the rule, and by the best that was found."""
    found = list(outcomes)
    return sum(outcome.ruled for outcome in found), sum(outcome.best for outcome in found)
