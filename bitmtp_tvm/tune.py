"""`python -m bitmtp_tvm.tune`: find the fastest kernels of a model for one card."""

import argparse
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from bitmtp_tvm.arguments import positive
from bitmtp_tvm.bench import several
from bitmtp_tvm.cli import run
from bitmtp_tvm.compile import add_checkpoint_options, widths
from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.targets import TARGETS, get_target
from bitmtp_tvm.tuning_run import build, measure, merge, predict, tune_here

TRIALS = 1000


@dataclass(frozen=True)
class TuneOptions:
    """One run of the command; `source` is --from, `command` the command line for the record."""

    target: str | None = None
    model: str | None = None
    random_weights: bool = False
    quant: str | None = None
    quant_threshold: float | None = None
    mask_token_id: int | None = None
    block_size: int | None = None
    context: int | None = None
    widths: tuple[int, ...] | None = None
    ops: tuple[str, ...] | None = None
    trials: int = TRIALS
    minutes: float | None = None
    rpc: str | None = None
    key: str | None = None
    resume: bool = False
    records: Path | None = None
    build_only: Path | None = None
    measure: Path | None = None
    merge: Path | None = None
    predict: bool = False
    source: str | None = None
    verbose: bool = False
    command: str = ""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, tune, return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    options = vars(_parser().parse_args(arguments))
    command = shlex.join(["python", "-m", "bitmtp_tvm.tune", *arguments])
    return run(lambda: tune(TuneOptions(**options, command=command)), options["verbose"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bitmtp_tvm.tune",
        description="Find the fastest kernels of a model for one card, for compile to use.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", help=f"one of: {', '.join(TARGETS)}")
    parser.add_argument("--model", metavar="PATH", help="as compile takes it (default: the demo)")
    parser.add_argument(
        "--random-weights", action="store_true", help="a preset's shapes, e.g. bitnet-2b"
    )
    add_checkpoint_options(parser)
    parser.add_argument("--context", type=int, metavar="N", help="tokens (default: the model's)")
    parser.add_argument(
        "--widths", type=widths, metavar="1,2,4", help="rows of the decode buckets, up to 64"
    )
    parser.add_argument(
        "--ops",
        type=several(str),
        metavar="A,B",
        help="operations to tune, such as attention_parts (default: all); the others stay",
    )
    parser.add_argument(
        "--trials", type=positive, default=TRIALS, metavar="N", help=f"kernels (default {TRIALS})"
    )
    parser.add_argument("--minutes", type=_minutes, metavar="M", help="to measure, at most")
    parser.add_argument("--rpc", metavar="HOST:PORT", help="tracker of the board to measure on")
    parser.add_argument("--key", metavar="K", help="what the board calls itself there")
    parser.add_argument("--resume", action="store_true", help="go on where a run was interrupted")
    parser.add_argument(
        "--records", type=Path, metavar="DIR", help="records to write (default: the target's)"
    )
    parser.add_argument("--verbose", action="store_true", help="show tracebacks")
    _add_parts(parser)
    return parser


def _add_parts(parser: argparse.ArgumentParser) -> None:
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--build-only", type=Path, metavar="DIR", help="build the kernels, no card")
    part.add_argument("--measure", type=Path, metavar="DIR", help="time them; needs no compiler")
    part.add_argument("--merge", type=Path, metavar="DIR", help="turn the times into records")
    part.add_argument(
        "--predict", action="store_true", help="records for a card that nobody has measured"
    )
    parser.add_argument(
        "--from", dest="source", metavar="TARGET", help="with --predict: the card to learn from"
    )


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes")
    return value


def tune(options: TuneOptions) -> None:
    """Do the part that was asked for, or all three; raises `BitMTPError`."""
    _check(options)
    if options.measure:
        measure(options, options.measure)
    elif options.merge:
        merge(options, options.merge)
    elif options.build_only:
        build(options, options.build_only)
    elif options.predict:
        predict(options)
    else:
        tune_here(options)


def _check(options: TuneOptions) -> None:
    needs_model = not (options.measure or options.merge)
    if needs_model and options.target is None:
        raise UsageError(f"give --target, one of: {', '.join(TARGETS)}")
    if options.target is not None:
        get_target(options.target)
    if (options.rpc is None) != (options.key is None):
        raise UsageError("--rpc and --key go together: the tracker, and the board's name there")
    if options.rpc and (options.build_only or options.merge or options.predict):
        raise UsageError("--rpc is about measuring: leave it out here")
    if options.predict != (options.source is not None):
        raise UsageError("--predict and --from go together: --predict --target T --from h200")


if __name__ == "__main__":
    sys.exit(main())
