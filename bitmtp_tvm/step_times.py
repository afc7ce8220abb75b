"""t(W): what a decode step costs in every bucket, measured on the device or predicted."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.manifest import Manifest
from bitmtp_tvm.targets import TARGETS

STEP_TIMES = "t_w.json"
FORMAT_VERSION = 1

GRAPH, LAUNCHES = "graph", "launches"
"""How steps were run: as one CUDA graph each, or kernel by kernel (on a processor always)."""

TYPICAL_FILL = 512
"""Tokens of context at which steps are measured, if there is room, and predicted."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step: the median, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> "Timing":
        """That of so many steps."""
        low, median, high = np.percentile(milliseconds, (10, 50, 90)).tolist()
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ms ({self.low:.3f}-{self.high:.3f})"


def shown_times(times: Mapping[int, Timing]) -> dict[str, list[float]]:
    """For JSON, by width: median, 10th and 90th percentile."""
    return {str(w): [round(x, 5) for x in (t.median, t.low, t.high)] for w, t in times.items()}


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one step by bucket width.

    `measured`: on this device, by `bench --steps`; otherwise predicted, which is good enough to
    choose a bucket but no speed claim. `provenance` says where the numbers come from.
    """

    milliseconds: dict[int, float]
    measured: bool
    provenance: dict[str, Any] = field(default_factory=dict)


def identity(manifest: Manifest) -> str:
    """What names an artifact: the SHA-256 of its manifest, which has those of its parameters."""
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()


def write_step_times(
    directory: Path,
    manifest: Manifest,
    timings: Mapping[str, Mapping[int, Timing]],
    provenance: Mapping[str, Any],
) -> StepTimes:
    """Put t_w.json beside the manifest, whole or not at all.

    `timings`: for GRAPH and LAUNCHES, whichever were measured, every width's time. `provenance`:
    device, driver, clocks, date, command and so on, as JSON can hold them. Raises `BitMTPError`.
    """
    record = {
        **provenance,
        "format_version": FORMAT_VERSION,
        "artifact": identity(manifest),
        "milliseconds": {how: shown_times(times) for how, times in timings.items()},
    }
    path = directory / STEP_TIMES
    try:
        _replace(path, json.dumps(record, indent=1, sort_keys=True) + "\n")
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be written: {fault.strerror}") from fault
    return _parse(record, manifest)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "w") as file:
            file.write(text)
        # mkstemp gives a file that its owner alone may read.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_step_times(directory: Path, manifest: Manifest) -> StepTimes | None:
    """The times that were measured for the artifact in `directory`; None where none were.

    Raises `BitMTPError` when the file is damaged, or belongs to another artifact.
    """
    path = directory / STEP_TIMES
    try:
        record = json.loads(path.read_bytes().decode())
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
        if record.get("artifact") == identity(manifest):
            return _parse(record, manifest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as fault:
        raise BitMTPError(
            f"{path} is damaged ({fault}): remove it, or measure again with "
            f"python -m bitmtp_tvm.bench --artifact {directory} --steps"
        ) from fault
    raise BitMTPError(
        f"{path} was measured for another artifact: remove it, or measure this one with "
        f"python -m bitmtp_tvm.bench --artifact {directory} --steps"
    )


def _parse(record: Mapping[str, Any], manifest: Manifest) -> StepTimes:
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"format version {record.get('format_version')}, not {FORMAT_VERSION}")
    timings = record.get("milliseconds")
    if not isinstance(timings, dict) or not set(timings) & {GRAPH, LAUNCHES}:
        raise ValueError("no milliseconds")
    # Who runs without graphs does so for a reason other than speed.
    times = timings.get(GRAPH) or timings.get(LAUNCHES)
    milliseconds = {width: _median(times, width) for width in manifest.widths}
    return StepTimes(milliseconds, True, {k: v for k, v in record.items() if k != "milliseconds"})


_LONGEST = 1e9
"""Milliseconds; of what is longer, somebody made it up."""


def _median(times: Any, width: int) -> float:
    timing = times.get(str(width)) if isinstance(times, dict) else None
    median = timing[0] if isinstance(timing, list) and timing else None
    if isinstance(median, bool) or not isinstance(median, int | float):
        raise ValueError(f"no time of width {width}")
    if not 0 < median < _LONGEST:
        raise ValueError(f"the time of width {width} is {median}")
    return float(median)


# The card model. Fitted to an H200 and untuned kernels (BitNet-2B, 1, 8, 16, 32 and 64 rows: 1.1,
# 1.5, 1.6, 2.3 and 3.6 ms), and to two cores of an x86-64 server (the demo, 1, 2, 4, 8 and 16 rows:
# 1.1, 1.5, 2.4, 4.5 and 9.0 ms).
GPU_MULTIPLICATIONS = 0.41e12  # a second and multiprocessor
GPU_KERNEL_SECONDS = 2.5e-6
LAYER_KERNELS = 11
CPU_BANDWIDTH = 42e9  # bytes a second
CPU_MULTIPLICATIONS = 132e9


def predict(manifest: Manifest) -> StepTimes:
    """A card's guess at t(W): every byte once, every row's multiplications, every kernel's start.

    Good for choosing a bucket, not for speed claims: `measured` is False.
    """
    fill = min(TYPICAL_FILL, manifest.context // 2)
    weights = sum(shard.bytes for shard in manifest.shards)
    work = weights + kv_bytes(manifest, fill), row_multiplications(manifest)
    target = TARGETS.get(manifest.target)
    # A new name in a newer table: the processor's numbers have the cautious shape.
    model = _gpu_seconds if target and target.kind == "cuda" else _cpu_seconds
    times = {w: 1000 * model(manifest, *work, w) for w in manifest.widths}
    provenance = {"predicted_for": manifest.target, "context_fill": fill}
    return StepTimes(times, False, provenance)


def _gpu_seconds(manifest: Manifest, read: int, multiplications: int, width: int) -> float:
    target = TARGETS[manifest.target]
    reading = read / (target.bandwidth_gbs * 1e9)
    multiplying = width * multiplications / (GPU_MULTIPLICATIONS * target.multiprocessors)
    kernels = LAYER_KERNELS * int(manifest.config["num_hidden_layers"])
    return kernels * GPU_KERNEL_SECONDS + max(reading, multiplying)


def _cpu_seconds(manifest: Manifest, read: int, multiplications: int, width: int) -> float:
    return read / CPU_BANDWIDTH + width * multiplications / CPU_MULTIPLICATIONS


def kv_bytes(manifest: Manifest, fill: int) -> int:
    """Bytes of the keys and values of `fill` tokens, all layers together."""
    pair, heads, _, size = manifest.kv.shape
    item = 4 if manifest.kv.dtype == "float32" else 2
    return pair * heads * size * item * fill * int(manifest.config["num_hidden_layers"])


def row_multiplications(manifest: Manifest) -> int:
    """Multiplications of one row in the linears and the head."""
    config = manifest.config
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    attention = hidden * (2 * queries + 2 * config["num_key_value_heads"] * head_dim)
    layer = attention + 3 * hidden * config["intermediate_size"]
    return int(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)
