"""Builds the kernels of candidates, many to a library, each library in a process of its own.

    python -m bitmtp_tvm.tuning_build JOB.json

is such a process: a compiler that crashes, hangs or refuses takes its batch with it, and no more.
The batch is then halved until the culprit is alone.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitmtp_tvm.cli import check_stopped
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.tuning_plan import Candidate, Task, replace_file

if TYPE_CHECKING:
    from bitmtp_tvm.targets import Target

BATCH = 64
"""Kernels in one library: NVRTC takes 0.2 to 0.4 seconds for each."""

SECONDS = 60
SECONDS_A_KERNEL = 6

SPILLS = "spills registers"
WRONG_TILE = "does not fit"
FAILS = "does not compile"
HANGS = "takes too long to compile"


@dataclass(frozen=True)
class Wanted:
    """A kernel to build: the first of a task is the rule's. program: of a fixed one, the scheduled
    function as TVM writes it; else template and arguments make it. current: compile takes it."""

    task: Task
    template: str
    arguments: dict[str, int]
    rule: bool
    program: str = ""
    current: bool = False

    @property
    def function(self) -> str:
        if self.program:
            return self.task.name
        values = "_".join(str(value) for value in self.arguments.values())
        return f"{self.task.name}_{self.template}_{values}"


@dataclass(frozen=True)
class Built:
    """A kernel that was built, or why there is none (`fault`)."""

    wanted: Wanted
    candidate: Candidate | None
    fault: str = ""


def build_all(
    wanted: Sequence[Wanted],
    target: "Target",
    directory: Path,
    progress: Callable[[int], None] | None = None,
    batch: int = BATCH,
) -> list[Built]:
    """Build every kernel into libraries in `directory`; those that are there already are kept.

    `progress` is told how many more are done. Raises `BitMTPError` where a rule's kernel fails.
    """
    jobs = len(os.sched_getaffinity(0))
    batch = min(batch, max(1, -(-len(wanted) // jobs)))
    batches = [list(wanted[at : at + batch]) for at in range(0, len(wanted), batch)]

    def one(items: list[Wanted]) -> list[Built]:
        check_stopped()
        found = _build_batch(items, target, directory, compilers)
        if progress:
            progress(len(items))
        return found

    compilers = Compilers()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            built = [item for found in pool.map(one, batches) for item in found]
        except BaseException:
            # What has not begun never will, and what runs is not worth waiting for.
            pool.shutdown(wait=False, cancel_futures=True)
            compilers.stop()
            raise
    for item in built:
        if item.wanted.rule and item.candidate is None:
            raise BitMTPError(f"the rule's kernel of {item.wanted.task.name} {item.fault}")
    return built


def _build_batch(
    items: list[Wanted], target: "Target", directory: Path, compilers: "Compilers"
) -> list[Built]:
    text = job_text(items, target)
    name = f"kernels-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    report = directory / f"{name}.json"
    if not (report.exists() and (directory / f"{name}.so").exists()):
        fault = compilers.run(text, directory / name, len(items))
        if fault and len(items) == 1:
            return [Built(items[0], None, fault)]
        if fault:
            half = len(items) // 2
            return [
                built
                for part in (items[:half], items[half:])
                for built in _build_batch(part, target, directory, compilers)
            ]
    return list(_read_report(items, report, f"{name}.so"))


def job_text(items: Sequence[Wanted], target: "Target") -> str:
    """What a process is told: the target, and of each kernel its workload, template and tile."""
    kernels = [
        {
            "function": item.function,
            "op": item.task.key.op,
            "settings": item.task.settings,
            "shapes": item.task.shapes,
            "dtypes": item.task.dtypes,
            "template": item.template,
            "arguments": item.arguments,
            "program": item.program,
        }
        for item in items
    ]
    from bitmtp_tvm.toolchain import versions

    job = {"target": target.name, "versions": versions(), "kernels": kernels}
    return json.dumps(job, sort_keys=True)


class Compilers:
    """The processes that build, which an interrupt ends. They are in sessions of their own, so that
    one at the terminal reaches them from here alone, and none of them looks like a failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, text: str, out: Path, kernels: int) -> str:
        """Build one library; returns what went wrong, or nothing. Raises `KeyboardInterrupt` once
        `stop` was called."""
        process = self._start([sys.executable, "-m", "bitmtp_tvm.tuning_build", str(out)])
        try:
            _, err = process.communicate(text, SECONDS + SECONDS_A_KERNEL * kernels)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return HANGS
        finally:
            with self._lock:
                self._running.discard(process)
        if self._stopped:
            raise KeyboardInterrupt
        if process.returncode == 0:
            return ""
        lines = err.strip().splitlines()
        return f"{FAILS}: {lines[-1][:200]}" if lines else f"{FAILS} (exit {process.returncode})"

    def _start(self, command: list[str]) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
            )
            self._running.add(process)
        return process

    def stop(self) -> None:
        """End what runs, and let nothing begin."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()


def _read_report(items: Sequence[Wanted], report: Path, library: str) -> Iterator[Built]:
    found: dict[str, dict[str, Any]] = json.loads(report.read_text())
    for item in items:
        result = found[item.function]
        candidate = Candidate(
            item.function,
            library,
            item.template,
            item.arguments,
            result.get("registers", 0),
            result.get("stack_bytes", 0),
            result.get("shared_bytes", 0),
        )
        fault = result.get("fault", "")
        if candidate.stack_bytes and not item.rule:
            fault = SPILLS
        yield Built(item, None if fault else candidate, fault)


def main(argv: list[str] | None = None) -> int:
    """Build the job on stdin into OUT.so and OUT.json; the last line on stderr says a fault."""
    (out,) = sys.argv[1:] if argv is None else argv
    try:
        build_job(json.loads(sys.stdin.read()), Path(out))
    except Exception as fault:
        # The parent shows this one line.
        print(" ".join(f"{type(fault).__name__}: {fault}".split()), file=sys.stderr)
        return 1
    return 0


def build_job(job: dict[str, Any], out: Path) -> None:
    """Build one library and the report of its kernels; both appear whole, the report last."""
    from bitmtp_tvm.targets import get_target

    target = get_target(job["target"])
    if target.kind == "cuda":
        from bitmtp_tvm.toolchain import prepare_cuda, register_nvrtc

        prepare_cuda()
        register_nvrtc()
    functions, report = _functions(job["kernels"], target)
    made = out.with_name(f".{out.name}.so")
    _compile(functions, target, made)
    for name, resources in _resources(made, functions).items():
        report[name] = resources
    os.replace(made, out.with_name(f"{out.name}.so"))
    replace_file(out.with_name(f"{out.name}.json"), json.dumps(report, sort_keys=True))


def _functions(
    kernels: Sequence[dict[str, Any]], target: "Target"
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The scheduled kernels by name, and the fault of each whose tile does not fit."""
    from bitmtp_tvm.targets import tvm_target

    functions: dict[str, Any] = {}
    faults: dict[str, dict[str, Any]] = {}
    described = tvm_target(target)
    for kernel in kernels:
        try:
            functions[kernel["function"]] = make_function(kernel, target.kind, described)
        except ValueError as fault:
            faults[kernel["function"]] = {"fault": f"{WRONG_TILE}: {fault}"}
    return functions, faults


def make_function(kernel: dict[str, Any], kind: str, described: Any) -> Any:
    """The PrimFunc of one kernel of a job; `ValueError` where template or tile do not fit."""
    import tvm

    from schedules.parsing import quick_frames
    from schedules.rule import TEMPLATES
    from schedules.workload import Workload

    attributes = {"tirx.noalias": True, "global_symbol": kernel["function"]}
    if kernel["program"]:
        return tvm.ir.load_json(kernel["program"]).with_attr(attributes)
    shapes = tuple(tuple(shape) for shape in kernel["shapes"])
    work = Workload(kernel["op"], kernel["settings"], shapes, tuple(kernel["dtypes"]))
    found = [t for t in TEMPLATES[kind].get(work.op, ()) if t.name == kernel["template"]]
    if not found:
        raise ValueError(f"no template {kernel['template']} of {work.op}")
    with quick_frames():
        func = found[0].make(work, found[0].tile(**kernel["arguments"]), described)
    return func.with_attr(attributes)


def _compile(functions: dict[str, Any], target: "Target", out: Path) -> None:
    import tvm

    from bitmtp_tvm.targets import tvm_target
    from bitmtp_tvm.toolchain import cross_compiler

    if not functions:
        raise BitMTPError("no kernel of the batch has a tile that fits")
    with tvm_target(target) as described:
        library = tvm.tirx.build(tvm.IRModule(functions), target=described)
    library.export_library(str(out), fcompile=cross_compiler(target.host_triple))


def _resources(library: Path, functions: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of every function: registers, stack and shared bytes, as the machine code has them."""
    from bitmtp_tvm.cubin import find_cubins

    found: dict[str, dict[str, Any]] = {name: {} for name in functions}
    for cubin in find_cubins(library.read_bytes()):
        for kernel in cubin.kernels:
            name = kernel.name.removesuffix("_kernel")
            if name in found:
                resources = asdict(kernel)
                resources.pop("name")
                found[name] = resources
    return found


def with_built(task: Task, built: Sequence[Built]) -> Task:
    """The task with the candidates that were built, and a count of each reason against others."""
    mine = [item for item in built if item.wanted.task.name == task.name]
    rejected: dict[str, int] = {}
    for item in mine:
        if item.fault:
            reason = item.fault.partition(":")[0]
            rejected[reason] = rejected.get(reason, 0) + 1
    kept = tuple(item.candidate for item in mine if item.candidate is not None)
    current = next((i.candidate.function for i in mine if i.candidate and i.wanted.current), "")
    return replace(task, candidates=kept, rejected=rejected, current=current)


if __name__ == "__main__":
    sys.exit(main())
