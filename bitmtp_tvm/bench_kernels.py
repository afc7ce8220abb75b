"""`bench --kernels`: every kernel of a compiled model by itself, beside what memory allows.

The kernels run out of the artifact's own library on the arguments of a real step: those of all
layers in turn, so that weights come from memory as they do in a step.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitmtp_tvm.artifact import check_device, open_artifact
from bitmtp_tvm.bench_steps import measured_facts
from bitmtp_tvm.cli import check_stopped
from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.generate import progress_bar
from bitmtp_tvm.manifest import Manifest
from bitmtp_tvm.plotting import check_picture, draw_kernel_times
from bitmtp_tvm.session import Session
from bitmtp_tvm.step_timing import Bench, check_fill, full_state, measure_width
from bitmtp_tvm.streaming import read_bandwidth
from bitmtp_tvm.targets import TARGETS
from bitmtp_tvm.timing import Timer, make_timer

if TYPE_CHECKING:
    from bitmtp_tvm.bench import BenchOptions

LEAST_CALLS = 24
CACHE = "_kv_cache"
# Operations that read a few rows of a lasting table, not all of it.
LOOKED_UP = ("head_rescore", "norm_rope_kv_write", "rope_kv_write")


@dataclass
class Launches:
    """A kernel of one bucket: `count` launches in a run of it, what launches them, and the bytes
    that one has to move."""

    name: str
    op: str
    width: int
    count: int = 0
    calls: list[Callable[[], Any]] = field(default_factory=list)
    bytes: int = 0


@dataclass(frozen=True)
class Row:
    """A line of the table. seconds: of one launch."""

    bucket: str
    kernel: str
    op: str
    count: int
    seconds: float
    bytes: int

    @property
    def gbs(self) -> float:
        """10^9 bytes a second."""
        return self.bytes / self.seconds / 1e9


def report_kernels(options: "BenchOptions") -> dict[str, Any]:
    """Measure every kernel of every bucket and print a table a bucket."""
    artifact = open_artifact(options.artifact)
    check_device(artifact)
    manifest = artifact.manifest
    if options.plot:
        check_picture(options.plot)
    before = read_report(options.before) if options.before else None
    fill = check_fill(manifest, options.fill)
    with progress_bar() as progress:
        session = Session(artifact, progress, graph=options.graph)
    mask = (manifest.config.get("mtp") or {}).get("mask_token_id", 0)
    device = session.device_handle
    timer = make_timer(manifest.kind, device)
    target = TARGETS.get(manifest.target)
    floor = read_bandwidth(manifest.kind, device, timer, target.l2_bytes if target else 0)
    session.prefill([1 + i % 7 for i in range(fill - 1)], 0)
    rows, whole = [], {}
    for bucket, entry, width in buckets(manifest):
        session.write(full_state(width, fill, session.context, mask))
        rows += time_bucket(session, timer, bucket, entry, width, fill)
        if entry == "step":
            timing = measure_width(session, width, Bench(fill, mask))
            whole[bucket] = timing.median / 1000
    facts = measured_facts(artifact, options.command, fill)
    print(f"{artifact.directory}: {manifest.model} on {facts['device']}, {fill} tokens of context")
    print(f"  reading memory: {floor:.0f} GB/s, measured with one kernel over more than the caches")
    for line in lines(rows, whole, floor):
        print(line)
    report = {
        "bench": "kernels",
        **facts,
        "artifact": str(artifact.directory),
        "floor_gbs": round(floor, 1),
        "kernels": [shown(row, floor) for row in rows],
        "whole_us": {bucket: round(seconds * 1e6, 2) for bucket, seconds in whole.items()},
    }
    if options.plot:
        title = f"{manifest.model} on {facts['device']}, {fill} tokens of context"
        draw_kernel_times(options.plot, report, before, title)
        print(f"drawn: {options.plot}")
    return report


def read_report(path: Path) -> dict[str, Any]:
    """What an earlier run printed last. Raises `UsageError` for anything else."""
    try:
        report = json.loads(path.read_text().strip().splitlines()[-1])
        if report["bench"] == "kernels" and report["whole_us"] and report["kernels"]:
            return dict(report)
    except OSError as fault:
        raise UsageError(f"--before {path} cannot be read: {fault.strerror}") from fault
    except (ValueError, LookupError, TypeError):
        pass
    raise UsageError(f"--before {path} does not end in a report of bench --kernels")


def buckets(manifest: Manifest) -> list[tuple[str, str, int]]:
    """Name, entry and rows of every decode bucket, and of the prefill chunks beside them."""
    steps = [(f"step_w{w}", "step", w) for w in manifest.widths]
    return steps + [(f"prefill_w{w}", "prefill", w) for w in manifest.prefill]


def time_bucket(
    session: Session, timer: Timer, bucket: str, entry: str, width: int, fill: int
) -> list[Row]:
    """Time each kernel of one bucket over the arguments that a run of it has."""
    found = collect(session, entry, width, fill)
    rows = []
    for launches in found.values():
        check_stopped()
        calls = launches.calls * -(-LEAST_CALLS // len(launches.calls))
        seconds = timer.seconds(calls) / len(calls)
        rows.append(
            Row(bucket, launches.name, launches.op, launches.count, seconds, launches.bytes)
        )
    return rows


def collect(session: Session, entry: str, width: int, fill: int) -> dict[str, Launches]:
    """The kernels of one run by name, in the order in which they first run.

    What a later kernel overwrites is copied, so that a kernel finds again what it found; weights
    and caches are the session's.
    """
    ops = {kernel.name: kernel.op for kernel in session.manifest.kernels}
    found: dict[str, Launches] = {}
    copies: dict[tuple[str, int], Any] = {}

    def seen(name: str, function: Any, arguments: list[tuple[Any, str]]) -> None:
        launches = found.setdefault(name, Launches(name, ops[name], width))
        if not launches.count:
            launches.bytes = moved_bytes(ops[name], arguments, session.manifest, fill)
        kept = []
        for place, (tensor, lasting) in enumerate(arguments):
            if not lasting and (name, place) not in copies:
                copies[name, place] = session.copy_of(tensor)
            kept.append(tensor if lasting else copies[name, place])
        launches.count += 1
        launches.calls.append(partial(function, *kept))

    session.observe(entry, width, fill, seen)
    return found


def moved_bytes(
    op: str, arguments: Sequence[tuple[Any, str]], manifest: Manifest, fill: int
) -> int:
    """Bytes that a kernel reads and writes at least: all of its arguments, but of a table that is
    looked up no more than what comes out, and of a cache what is filled, if it is read at all."""
    total = 0
    for tensor, lasting in arguments:
        size = math.prod(map(int, tensor.shape)) * np.dtype(str(tensor.dtype)).itemsize
        if lasting.endswith(CACHE):
            size = size * fill // manifest.kv.shape[2] if "attention" in op else 0
        elif lasting and (op.endswith("embed") or op in LOOKED_UP):
            size = 0
        total += size
    return total


def lines(rows: Sequence[Row], whole: Mapping[str, float], floor: float) -> list[str]:
    """A table a bucket, then a sum an operation beside the whole step."""
    found: list[str] = []
    for bucket in dict.fromkeys(row.bucket for row in rows):
        mine = [row for row in rows if row.bucket == bucket]
        found += [
            f"{bucket:<28}{'count':>6}{'us':>10}{'us in all':>11}{'GB/s':>9}{'of reading':>12}"
        ]
        found += [
            f"  {r.kernel:<26}{r.count:>6}{r.seconds * 1e6:>10.2f}"
            f"{r.count * r.seconds * 1e6:>11.1f}{r.gbs:>9.0f}{r.gbs / floor:>12.0%}"
            for r in mine
        ]
        found += _sums(mine, whole.get(bucket))
    return found


def _sums(rows: Sequence[Row], whole: float | None) -> list[str]:
    by_op: dict[str, float] = defaultdict(float)
    for row in rows:
        by_op[row.op] += row.count * row.seconds
    total = math.fsum(by_op.values())
    parts = sorted(by_op.items(), key=lambda item: -item[1])
    text = ", ".join(f"{op} {seconds * 1e6:.1f}" for op, seconds in parts)
    beside = f", the whole step {whole * 1e6:.1f} us" if whole else ""
    return [f"  by operation, us: {text}", f"  kernels alone {total * 1e6:.1f} us{beside}"]


def shown(row: Row, floor: float) -> dict[str, Any]:
    """For JSON."""
    return {
        "bucket": row.bucket,
        "kernel": row.kernel,
        "op": row.op,
        "count": row.count,
        "us": round(row.seconds * 1e6, 3),
        "bytes": row.bytes,
        "gbs": round(row.gbs, 1),
        "share": round(row.gbs / floor, 4),
    }
