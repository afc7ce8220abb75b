"""What `tune --build-only` hands to `tune --measure`: plan.json beside libraries of kernels."""

import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.manifest import decode
from bitmtp_tvm.records import Key
from bitmtp_tvm.targets import get_target

FORMAT_VERSION = 4
PLAN = "plan.json"
MEASUREMENTS = "measurements.jsonl"
OWN_FILES = re.compile(r"plan\.json|measurements\.jsonl|kernels-[0-9a-f]+\.(so|json)")


@dataclass(frozen=True)
class Candidate:
    """A kernel to time: `function` of the file `library`, made by `template` from `arguments`.

    registers, stack_bytes: of a thread, shared_bytes: of a block, as the machine code says; 0 for a
    processor.
    """

    function: str
    library: str
    template: str
    arguments: dict[str, int]
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class Task:
    """One workload to find the best kernel for, or a `fixed` one: its only candidate keeps its
    place among the others.

    names, shapes, dtypes: of the arguments, the results last; constants: which of them are weights,
    or the cache; reads: bytes of these that a launch has to read from memory; counts: launches in
    one run of each bucket; candidates: the rule's first, then the likeliest first; current: the
    function of the one that compile would take, by records or by the rule; rejected: why other
    candidates are not here, and how many.
    """

    name: str
    key: Key
    settings: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    constants: tuple[int, ...]
    reads: int
    counts: dict[str, int]
    candidates: tuple[Candidate, ...] = ()
    rejected: dict[str, int] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    fixed: bool = False
    current: str = ""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the constants."""
        return sum(self.bytes_of(i) for i in self.constants)

    def bytes_of(self, argument: int) -> int:
        """Bytes of one argument."""
        return int(np.prod(self.shapes[argument])) * np.dtype(self.dtypes[argument]).itemsize

    def floor(self, bandwidth_gbs: float) -> float:
        """Seconds that reading what one launch needs takes at so many 10^9 bytes a second."""
        return self.reads / (bandwidth_gbs * 1e9)


@dataclass(frozen=True)
class TuningPlan:
    """All that measuring needs to know. versions, commit: of what built the kernels; buckets: for
    each bucket ("step_w8", "prefill_w128") the names of its tasks, which are all of its kernels, in
    the order in which they run.
    """

    target: str
    model: str
    arch: str
    versions: dict[str, str]
    commit: str
    buckets: dict[str, tuple[str, ...]]
    tasks: tuple[Task, ...]
    format_version: int = FORMAT_VERSION

    @property
    def kind(self) -> str:
        """TVM's kind of the target: "cuda" or "llvm"."""
        return get_target(self.target).kind

    @property
    def searched(self) -> tuple[Task, ...]:
        """The tasks whose best kernel is looked for."""
        return tuple(task for task in self.tasks if not task.fixed)

    def task(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)

    def write(self, directory: Path) -> None:
        """Put plan.json into the folder, whole or not at all."""
        replace_file(directory / PLAN, json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")


def read_plan(directory: Path, target: str | None = None) -> TuningPlan:
    """Read and check what `--build-only` wrote.

    Raises `UsageError` where the folder is none of its, or is for another target than `target`;
    `BitMTPError` where it is damaged.
    """
    path = directory / PLAN
    if not path.is_file():
        raise UsageError(
            f"{directory} holds no {PLAN}: give the folder that tune --build-only wrote"
        )
    try:
        data = json.loads(path.read_bytes().decode())
        version = data.get("format_version") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version} instead of {FORMAT_VERSION}")
        plan: TuningPlan = decode(TuningPlan, data, "plan")
    except (OSError, ValueError, RecursionError) as fault:
        raise BitMTPError(f"{path} is damaged ({fault}): build the kernels again") from fault
    _check(plan, directory, target)
    return plan


def _check(plan: TuningPlan, directory: Path, target: str | None) -> None:
    if target is not None and plan.target != target:
        raise UsageError(
            f"{directory} is for --target {plan.target}, not {target}: give that, or another folder"
        )
    get_target(plan.target)
    names = {task.name for task in plan.tasks}
    if any(set(sequence) - names for sequence in plan.buckets.values()):
        raise BitMTPError(f"{directory / PLAN} names tasks that it does not hold: build it again")
    libraries = {c.library for task in plan.tasks for c in task.candidates}
    missing = sorted(name for name in libraries if not (directory / name).is_file())
    if missing:
        raise BitMTPError(f"{directory / missing[0]} is missing: copy the whole folder")


def check_own(directory: Path, resume: bool) -> None:
    """Make sure that nothing foreign stands where kernels are to be written, and no measurement.

    Raises `UsageError`.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(f"{directory} is no folder: choose another one")
    names = sorted(path.name for path in directory.iterdir())
    foreign = [name for name in names if not OWN_FILES.fullmatch(name)]
    if foreign:
        raise UsageError(f"{directory} holds {foreign[0]}, so it is not tune's: choose another one")
    if MEASUREMENTS in names and not resume:
        raise UsageError(f"{directory} was measured already: add --resume, or choose another one")


def replace_file(path: Path, text: str) -> None:
    """Write a file beside its place and rename it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
