"""`bench --steps`: t(W) on this device, beside the least that memory allows."""

import datetime
import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitmtp_tvm.artifact import Artifact, check_device, open_artifact
from bitmtp_tvm.device_state import device_state
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.generate import progress_bar
from bitmtp_tvm.manifest import Manifest
from bitmtp_tvm.peer import check_peer, measure_peer, peer_lines, peer_widths, shown_peer
from bitmtp_tvm.plotting import check_picture, draw_step_times
from bitmtp_tvm.session import Session
from bitmtp_tvm.step_times import (
    GRAPH,
    LAUNCHES,
    STEP_TIMES,
    Timing,
    kv_bytes,
    shown_times,
    write_step_times,
)
from bitmtp_tvm.step_timing import Bench, check_fill, measure_steps
from bitmtp_tvm.targets import TARGETS

if TYPE_CHECKING:
    from bitmtp_tvm.bench import BenchOptions

Timings = Mapping[str, Mapping[int, Timing]]

TITLES = {GRAPH: "CUDA graph", LAUNCHES: "kernel by kernel"}


def report_steps(options: "BenchOptions") -> dict[str, Any]:
    """Measure, print a table, keep the times beside the artifact, and draw them if wanted."""
    if options.plot:
        check_picture(options.plot)
    artifact = open_artifact(options.artifact)
    check_device(artifact)
    manifest = artifact.manifest
    fill = check_fill(manifest, options.fill)
    graphs = manifest.kind == "cuda" and options.graph
    if options.peer:
        check_peer(graphs)
    hows = (GRAPH, LAUNCHES) if graphs else (LAUNCHES,)
    timings = {how: _measure(artifact, how == GRAPH, fill) for how in hows}
    facts = measured_facts(artifact, options.command, fill)
    floor = reading_floor(artifact, fill)
    for line in lines(artifact, timings, facts, floor):
        print(line)
    # Steps without graphs are no guide for those who run with them.
    if graphs or manifest.kind != "cuda":
        write_step_times(options.artifact, manifest, timings, facts)
        print(f"kept in {options.artifact / STEP_TIMES}")
    if options.plot:
        title = f"{manifest.model} on {facts['device']}, {fill} tokens of context"
        draw_step_times(options.plot, timings, title, floor["floor_ms"])
    report = {"bench": "steps", **facts, **floor, "milliseconds": shown(timings)}
    if options.peer:
        report["peer"] = _beside(manifest, timings[GRAPH], fill)
    return report


def _beside(manifest: Manifest, ours: Mapping[int, Timing], fill: int) -> dict[str, Any]:
    """Measure the peer and print a table; what JSON says of it."""
    peer = measure_peer(manifest.config, peer_widths(manifest.widths), fill)
    for line in peer_lines(peer, ours):
        print(line)
    return shown_peer(peer, ours)


def measured_facts(artifact: Artifact, command: str, fill: int) -> dict[str, Any]:
    """Where, when and how; to be asked right behind the work, before clocks fall."""
    state = device_state(artifact.manifest.kind)
    return {
        "device": state.pop("device"),
        "device_state": state,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "context_fill": fill,
        "versions": artifact.manifest.versions,
    }


def _measure(artifact: Artifact, graph: bool, fill: int) -> dict[int, Timing]:
    with progress_bar() as progress:
        session = Session(artifact, progress, graph=graph)
    mask = (artifact.manifest.config.get("mtp") or {}).get("mask_token_id", 0)
    times = measure_steps(session, Bench(fill, mask))
    # The next session needs the memory.
    del session
    gc.collect()
    return times


def shown(timings: Timings) -> dict[str, Any]:
    """For JSON."""
    return {how: shown_times(times) for how, times in timings.items()}


def reading_floor(artifact: Artifact, fill: int) -> dict[str, Any]:
    """What a step must read, and how long that takes at the bandwidth of the data sheet."""
    manifest = artifact.manifest
    weights, kv = weight_bytes(artifact), kv_bytes(manifest, fill)
    target = TARGETS.get(manifest.target)
    bandwidth = target.bandwidth_gbs if target else 0.0
    return {
        "artifact": str(artifact.directory),
        "model": manifest.model,
        "target": manifest.target,
        "weight_bytes": weights,
        "kv_bytes": kv,
        "data_sheet_gbs": bandwidth or None,
        "floor_ms": round((weights + kv) / bandwidth / 1e6, 5) if bandwidth else None,
    }


def weight_bytes(artifact: Artifact) -> int:
    """Bytes of all weights that a step reads: of an embedding that is not the head, a few rows."""
    sizes: dict[str, int] = {}
    for shard in artifact.manifest.shards:
        sizes.update(tensor_bytes(artifact.directory / shard.file))
    embedding = sum(size for name, size in sizes.items() if name.startswith("embed."))
    has_head = any(name.startswith("head.") for name in sizes)
    return sum(sizes.values()) - (embedding if has_head else 0)


def tensor_bytes(path: Path) -> dict[str, int]:
    """Bytes of every tensor of a safetensors file, from its header."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        spans = {name: info["data_offsets"] for name, info in header.items() if name[:2] != "__"}
        return {name: end - start for name, (start, end) in spans.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as fault:
        raise BitMTPError(f"{path} cannot be read: {fault}") from fault


def lines(
    artifact: Artifact, timings: Timings, facts: Mapping[str, Any], floor: Mapping[str, Any]
) -> list[str]:
    """What is printed for people."""
    manifest, least = artifact.manifest, floor["floor_ms"]
    state = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in facts["device_state"].items())
    read = (
        f"  behind {facts['context_fill']} tokens a step reads "
        f"{floor['weight_bytes'] / 1e6:.1f} MB of weights and "
        f"{floor['kv_bytes'] / 1e6:.1f} MB of keys and values"
    )
    if least:
        read += f": {least:.3f} ms at the data sheet's {floor['data_sheet_gbs']:g} GB/s"
    return [
        f"{artifact.directory}: {manifest.model} for {manifest.target} on {facts['device']}",
        f"  {state}",
        read,
        *table(timings, floor),
    ]


def table(timings: Timings, floor: Mapping[str, Any]) -> list[str]:
    """A line a bucket: median milliseconds, their 10-90 % range, and the memory's share in them."""
    least, read = floor["floor_ms"], floor["weight_bytes"] + floor["kv_bytes"]
    share = "of data sheet" if least else "GB/s"
    head = "".join(f"  {TITLES[how]:<32}{share:>13}" for how in timings)
    found = [f"rows{head}"]
    for width in next(iter(timings.values())):
        cells = ""
        for times in timings.values():
            time = times[width]
            speed = read / time.median / 1e6
            rate = f"{100 * least / time.median:.0f} %" if least else f"{speed:.1f}"
            cells += f"  {time!s:<32}{rate:>13}"
        found.append(f"{width:>4}{cells}")
    return found
