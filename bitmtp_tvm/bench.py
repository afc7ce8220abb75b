"""`python -m bitmtp_tvm.bench`: measure a compiled model on this device."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitmtp_tvm.arguments import positive
from bitmtp_tvm.cli import run
from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.modes import LAYOUTS

# What can be measured, and the options that go with each.
PARTS = {
    "steps": ("fill", "plot", "peer"),
    "kernels": ("fill", "plot", "before"),
    "modes": ("prompts", "max_new_tokens", "block_sizes", "layouts"),
}

# What else can be measured in the same run.
PEERS = ("transformers",)


@dataclass(frozen=True)
class BenchOptions:
    """One run of the command, of exactly one of PARTS; None is a default.

    `command` is the command line, for the record.
    """

    artifact: Path
    steps: bool = False
    kernels: bool = False
    modes: bool = False
    fill: int | None = None
    plot: Path | None = None
    peer: str | None = None
    before: Path | None = None
    prompts: Path | None = None
    max_new_tokens: int | None = None
    block_sizes: tuple[int, ...] | None = None
    layouts: tuple[str, ...] | None = None
    graph: bool = True
    verbose: bool = False
    command: str = ""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    options = vars(_parser().parse_args(arguments))
    command = shlex.join(["python", "-m", "bitmtp_tvm.bench", *arguments])
    return run(lambda: bench(BenchOptions(**options, command=command)), options["verbose"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bitmtp_tvm.bench",
        description="Measure a compiled model on this device. The last line printed is JSON.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--artifact", type=Path, required=True, metavar="DIR", help="a compiled model"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--steps",
        action="store_true",
        help="time a step of every bucket, and keep the times beside the model for layout auto",
    )
    what.add_argument(
        "--kernels",
        action="store_true",
        help="time every kernel by itself, beside the speed at which memory is read",
    )
    what.add_argument(
        "--modes",
        action="store_true",
        help="decode prompts in every mode, and compare tokens per forward and per second",
    )
    parser.add_argument(
        "--no-graph", dest="graph", action="store_false", help="launch kernels without CUDA graphs"
    )
    parser.add_argument("--verbose", action="store_true", help="show tracebacks")
    _add_steps(parser.add_argument_group("with --steps and --kernels"))
    _add_modes(parser.add_argument_group("with --modes"))
    return parser


def _add_steps(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fill",
        type=positive,
        metavar="N",
        help="tokens of context in front of the step (default 512, or half of a shorter context)",
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the times; needs matplotlib"
    )
    group.add_argument(
        "--before",
        type=Path,
        metavar="FILE",
        help="with --kernels --plot: what an earlier run printed, to be drawn beside",
    )
    group.add_argument(
        "--peer",
        choices=PEERS,
        help="with --steps: time Transformers' dense bfloat16 model of the same shape as well",
    )


def _add_modes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one JSON string a line (default: eight short ones)",
    )
    group.add_argument(
        "--max-new-tokens", type=positive, metavar="N", help="at most N a prompt (default 256)"
    )
    group.add_argument(
        "--block-sizes",
        type=several(positive),
        metavar="4,8",
        help="mask rows a block (default: half of the model's, and the model's)",
    )
    group.add_argument(
        "--layouts",
        type=several(layout_name),
        metavar="auto,chain",
        help="layouts of the modes that draft (default auto)",
    )


def several(one: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A comma-separated list of what `one` reads."""
    return lambda text: tuple(dict.fromkeys(one(part.strip()) for part in text.split(",")))


def layout_name(text: str) -> str:
    if text not in LAYOUTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no layout: choose of {', '.join(LAYOUTS)}, with commas between them"
        )
    return text


def bench(options: BenchOptions) -> None:
    """Measure and print; the last line is one JSON object."""
    (part, *others) = [name for name in PARTS if getattr(options, name)] or [""]
    if others or not part:
        raise UsageError("one thing at a time: give --steps, --kernels or --modes")
    for name in dict.fromkeys(name for names in PARTS.values() for name in names):
        if getattr(options, name) is not None and name not in PARTS[part]:
            goes = " and ".join(f"--{other}" for other, names in PARTS.items() if name in names)
            raise UsageError(f"--{name.replace('_', '-')} goes with {goes}")
    # Here and not above: what these load takes longer than to read a command line.
    from bitmtp_tvm.bench_kernels import report_kernels
    from bitmtp_tvm.bench_modes import report_modes
    from bitmtp_tvm.bench_steps import report_steps

    reports = {"steps": report_steps, "kernels": report_kernels, "modes": report_modes}
    report: dict[str, Any] = reports[part](options)
    print(json.dumps(report, sort_keys=True), flush=True)


if __name__ == "__main__":
    sys.exit(main())
