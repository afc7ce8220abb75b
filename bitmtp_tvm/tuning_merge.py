"""`tune --merge`: what was measured becomes the records that compile reads."""

import datetime
import math
import re
from collections.abc import Mapping
from pathlib import Path

from bitmtp_tvm.device_state import device_state
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.records import MEASURED, DeviceInfo, Record, Records
from bitmtp_tvm.targets import Target, get_target
from bitmtp_tvm.tuning_chain import shares
from bitmtp_tvm.tuning_log import Chain, Measurements
from bitmtp_tvm.tuning_plan import Candidate, Task, TuningPlan

MOST_RECORDS = 12
"""Of one key: the winner, and slower ones that the cost model learns from."""


def merge(plan: TuningPlan, known: Measurements, folder: Path, command: str) -> int:
    """Write the records of all measured tasks into `folder`, beside those of other models that are
    there; returns how many tasks they are.

    A task whose rule's kernel is wrong gets none. Raises `BitMTPError` where nothing was measured.
    """
    records, merged = Records.read(folder), 0
    for task in plan.searched:
        found = task_records(plan, known, task)
        if found:
            records.put(found)
            merged += 1
    if not merged:
        raise BitMTPError(f"{known.path} holds no measured kernel: nothing to merge")
    records.prune(MOST_RECORDS)
    records.write(folder, device_info(plan, known, command))
    return merged


def task_records(plan: TuningPlan, known: Measurements, task: Task) -> list[Record]:
    """The records of one task: the fastest in the chain first, else the fastest alone."""
    seconds = known.seconds(task.name)
    if not seconds:
        return []
    in_chain = _in_chain(plan, known, task)
    by_name = {c.function: c for c in task.candidates if c.function in seconds}
    best = in_chain[0] if in_chain else min(seconds, key=lambda name: seconds[name])
    order = [best, *sorted((n for n in by_name if n != best), key=lambda n: seconds[n])]
    return [
        _record(task, by_name[name], seconds[name], plan.target, in_chain)
        for name in order
        if name in by_name
    ]


def _record(
    task: Task,
    candidate: Candidate,
    seconds: float,
    source: str,
    in_chain: tuple[str, float] | None,
) -> Record:
    won = in_chain is not None and in_chain[0] == candidate.function
    return Record(
        task.key,
        candidate.template,
        candidate.arguments,
        float(f"{seconds:.4g}"),
        MEASURED,
        source,
        float(f"{in_chain[1]:.4g}") if won and in_chain else None,
    )


def _in_chain(plan: TuningPlan, known: Measurements, task: Task) -> tuple[str, float] | None:
    """The kernel that won in a chain, and its part of the chain's seconds."""
    for bucket, chain in known.chains.items():
        if task.name in chain.choice:
            return chain.choice[task.name], chain_shares(plan, known, bucket, chain)[task.name]
    return None


def chain_shares(
    plan: TuningPlan, known: Measurements, bucket: str, chain: Chain
) -> dict[str, float]:
    """Seconds of one launch of each task within a bucket's chain."""
    tasks = [plan.task(name) for name in dict.fromkeys(plan.buckets[bucket])]
    kernels = {t.name: chain.choice.get(t.name, t.candidates[0].function) for t in tasks}
    alone = {name: known.seconds(name)[kernel] for name, kernel in kernels.items()}
    return shares(chain.seconds, alone, {task.name: task.counts[bucket] for task in tasks})


def device_info(plan: TuningPlan, known: Measurements, command: str) -> DeviceInfo:
    """device.json: where, when and how it was measured; as far as the device told."""
    state: Mapping[str, str] = known.device.get("state", {})
    target = get_target(plan.target)
    return DeviceInfo(
        target=plan.target,
        device=state.get("device", ""),
        compute_capability=".".join(map(str, target.compute_capability or ())),
        multiprocessors=int(known.device.get("cores", 0)) or None,
        driver=state.get("driver", ""),
        toolkit=plan.versions.get("toolkit", "") if target.kind == "cuda" else "",
        tvm=plan.versions.get("tvm", ""),
        clock_mhz=_number(state.get("clock_sm", "")),
        memory_clock_mhz=_number(state.get("clock_memory", "")),
        power_limit_w=_number(state.get("power_limit", "")),
        power_mode=state.get("power_mode", ""),
        date=str(known.device.get("date", "")),
        command=command,
        commit=plan.commit,
        notes=f"reads {known.device.get('gbs', 0):.0f} GB/s; model {plan.model}",
    )


def host_info(target: Target, command: str, commit: str) -> DeviceInfo:
    """device.json of schedules that are tuned on this machine, before they are."""
    state = device_state(target.kind)
    return DeviceInfo(
        target=target.name,
        device=state.get("device", ""),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        command=command,
        commit=commit,
    )


def _number(text: str) -> int | None:
    """The number in front of a unit, "1980 MHz" or "700.00 W"."""
    found = re.match(r"\d+", text)
    return int(found.group()) if found else None


def summary(plan: TuningPlan, known: Measurements) -> list[str]:
    """A line a bucket: its chain, or the sum of its fastest kernels, beside the ceiling."""
    rate, lines = known.device.get("gbs", math.inf), []
    for bucket, names in plan.buckets.items():
        tasks = [plan.task(name) for name in names]
        floor = math.fsum(task.floor(rate) for task in tasks)
        chain = known.chains.get(bucket)
        if chain:
            text = f"{chain.before * 1e6:.1f} -> {chain.seconds * 1e6:.1f} us in the chain"
            share = floor / chain.seconds
        else:
            searched = [task for task in tasks if not task.fixed]
            found = [known.seconds(task.name) for task in searched]
            if not searched or not all(found):
                continue
            floor = math.fsum(task.floor(rate) for task in searched)
            alone = math.fsum(min(seconds.values()) for seconds in found)
            text, share = f"{alone * 1e6:.1f} us, kernel by kernel", floor / alone
        lines.append(f"  {bucket:<14} {len(names):>4} kernels  {text}, {share:.0%} of the ceiling")
    return lines
