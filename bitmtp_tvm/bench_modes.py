"""`bench --modes`: the ways to decode, side by side on this device."""

import datetime
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bitmtp_tvm.artifact import open_artifact
from bitmtp_tvm.device_state import device_state
from bitmtp_tvm.engine import Engine
from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.generate import progress_bar, read_prompt_file
from bitmtp_tvm.mode_rows import PROMPTS, Comparison, Setting, compare, settings, table
from bitmtp_tvm.modes import resolve

if TYPE_CHECKING:
    from bitmtp_tvm.bench import BenchOptions
    from bitmtp_tvm.manifest import Manifest

MAX_NEW_TOKENS = 256


def report_modes(options: "BenchOptions") -> dict[str, Any]:
    """Decode the prompts in every mode and print two tables: all texts, and those without loops."""
    manifest = open_artifact(options.artifact).manifest
    wanted = _settings(options, manifest)
    with progress_bar() as progress:
        engine = Engine(options.artifact, progress, graph=options.graph)
    prompts = read_prompts(engine, options)
    most = options.max_new_tokens or MAX_NEW_TOKENS
    # Measured times are those of graphs, where there are any.
    comparable = options.graph or manifest.kind != "cuda"
    found = compare(engine, prompts, wanted, most, engine.step_times if comparable else None)
    state = device_state(manifest.kind)
    device = state.pop("device")
    print(f"{options.artifact}: {manifest.model} for {manifest.target} on {device}")
    print("  " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in state.items()))
    for line in report_lines(found, most):
        print(line)
    return {
        "bench": "modes",
        "artifact": str(options.artifact),
        "model": manifest.model,
        "target": manifest.target,
        "device": device,
        "device_state": state,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": options.command,
        "versions": manifest.versions,
        "graph": options.graph and manifest.kind == "cuda",
        "step_times_measured": engine.step_times.measured,
        "max_new_tokens": most,
        **found.to_dict(),
    }


def _settings(options: "BenchOptions", manifest: "Manifest") -> list[Setting]:
    """What is compared; raises `UsageError` at once for what the artifact does not serve."""
    mtp = manifest.config.get("mtp")
    if mtp is None:
        raise UsageError(
            f"{options.artifact} was trained without multi-token prediction: ar is its only mode, "
            "and --steps measures it"
        )
    sizes = options.block_sizes or _block_sizes(mtp)
    found = settings(sizes, options.layouts or ("auto",))
    for setting in found:
        resolve(mtp, manifest.widths, **asdict(setting))
    return found


def _block_sizes(mtp: dict[str, Any]) -> tuple[int, ...]:
    most = int(mtp["block_size"])
    if mtp["block_attention"] == "bidirectional" or most == 1:
        return (most,)
    return (most // 2, most)


def read_prompts(engine: Engine, options: "BenchOptions") -> list[list[int]]:
    """Token ids of the prompts; a `UsageError` says which one cannot be served."""
    if options.prompts is None:
        return [engine.encode(text) for text in PROMPTS]
    found = []
    for prompt in read_prompt_file(options.prompts):
        try:
            found.append(engine.encode(prompt.content))
        except UsageError as fault:
            raise UsageError(f"{prompt.source}{fault}") from fault
    return found


def report_lines(found: Comparison, most: int) -> Sequence[str]:
    looping, total = sum(found.looping), len(found.looping)
    lines = [f"{total} prompts, at most {most} new tokens each, greedily", *table(found.every)]
    if not looping:
        return [*lines, "no text ends in a loop"]
    lines.append(f"{looping} of {total} texts end in a loop, which is easy to draft")
    if looping < total:
        lines += [f"the other {total - looping}:", *table(found.calm)]
    return lines
