"""MetaSchedule's two files in a folder of records: decisions for schedules made with primitives.

A record is found by the structural hash of the operation, and only its decisions are taken: the
schedule is made by the steps of this package (schedules/sampled.py), never by what a file says.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target as TVMTarget

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.records import damaged, replace_text
from schedules.sampled import MAIN, Sampled

WORKLOADS = "database_workload.json"
TUNING_RECORDS = "database_tuning_record.json"

SAMPLED = "SampleCategorical"


def read_database(folder: Path) -> ms.database.Database:
    """A copy in memory of the database in `folder`, empty where there is none.

    Raises `BitMTPError` that names a damaged or foreign file.
    """
    found = ms.database.MemoryDatabase()
    paths = folder / WORKLOADS, folder / TUNING_RECORDS
    if not any(path.exists() for path in paths):
        return found
    workloads = [_workload(line, found, paths[0]) for line in _lines(paths[0])]
    for number, line in enumerate(_lines(paths[1]), start=1):
        try:
            index, body = line
            workload = workloads[_index(index, len(workloads))]
            found.commit_tuning_record(ms.database.TuningRecord.from_json(body, workload))
        except Exception as fault:
            raise damaged(paths[1], f"line {number}: {first_line(fault)}") from fault
    return found


def _lines(path: Path) -> list[Any]:
    try:
        return [json.loads(line) for line in path.read_bytes().decode().splitlines()]
    except (OSError, ValueError, RecursionError) as fault:
        raise damaged(path, fault) from fault


def _workload(line: Any, database: ms.database.Database, path: Path) -> ms.database.Workload:
    try:
        hashed, text = line
        if not isinstance(hashed, str) or not isinstance(text, str):
            raise ValueError("no hash and module")
        mod = ms.database.Workload.from_json([hashed, text]).mod
        if str(tvm_ffi.structural_hash(mod)) != hashed:
            raise ValueError("a module does not have its hash")
        return database.commit_workload(mod)
    except Exception as fault:
        raise damaged(path, first_line(fault)) from fault


def _index(value: Any, count: int) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"there is no workload {value}")
    return value


def first_line(fault: BaseException) -> str:
    """What an error of TVM says first; the rest is its stack."""
    return next((line for line in str(fault).splitlines() if line.strip()), type(fault).__name__)


def write_database(folder: Path, database: ms.database.Database) -> None:
    """Put the best record of every workload into `folder`, each file whole or not at all."""
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        files = str(made / WORKLOADS), str(made / TUNING_RECORDS)
        database.dump_pruned(ms.database.JSONDatabase(*files))
        for file in (WORKLOADS, TUNING_RECORDS):
            lines = (made / file).read_text() if (made / file).exists() else ""
            replace_text(folder / file, lines)


def best_record(
    database: ms.database.Database, operation: Sampled, target: TVMTarget
) -> ms.database.TuningRecord | None:
    """The fastest record of an operation, None where there is none."""
    return database.query_tuning_record(operation.mod, target, MAIN)


def decisions_of(trace: s_tir.schedule.Trace, operation: Sampled) -> dict[str, int]:
    """The decisions of a trace by the names of the operation's space.

    Raises ValueError where the trace was not made by that space.
    """
    _, own = operation.schedule()
    drawn = [step for step in trace.insts if step.kind.name == SAMPLED]
    if len(drawn) != len(own.values):
        raise ValueError(f"it decides {len(drawn)} things instead of {len(own.values)}")
    found = {}
    for step, (name, values) in zip(drawn, own.values.items(), strict=True):
        offered = tuple(int(value) for value in step.attrs[0])
        if offered != values:
            raise ValueError(f"{name} was one of {offered}, and is one of {values}")
        found[name] = values[int(trace.get_decision(step))]
    return found


def with_record(
    database: ms.database.Database,
    operation: Sampled,
    target: TVMTarget,
    decided: Mapping[str, int],
    seconds: float,
) -> ms.database.Database:
    """A database in which one record, of `seconds` a run, is all that is known of an operation."""
    made = ms.database.MemoryDatabase()
    workload = made.commit_workload(operation.mod)
    for record in database.get_all_tuning_records():
        if not made.commit_workload(record.workload.mod).same_as(workload):
            made.commit_tuning_record(record)
    trace = operation.schedule(decided)[0].trace
    made.commit_tuning_record(ms.database.TuningRecord(trace, workload, [seconds], target))
    return made


def recorded_decisions(
    database: ms.database.Database, operation: Sampled, target: TVMTarget, folder: Path
) -> dict[str, int] | None:
    """What a database says about an operation, None where it says nothing.

    Raises `BitMTPError` for a record that does not fit the operation any more.
    """
    record = best_record(database, operation, target)
    if record is None:
        return None
    try:
        return decisions_of(record.trace, operation)
    except Exception as fault:
        raise BitMTPError(
            f"{folder / TUNING_RECORDS} does not fit {operation.work.op} any more "
            f"({first_line(fault)}): remove it, or tune again"
        ) from fault
