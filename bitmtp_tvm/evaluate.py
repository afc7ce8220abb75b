"""`python -m bitmtp_tvm.evaluate`: what a trained model is worth on text that it has not seen."""

import argparse
import datetime
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bitmtp_tvm.arguments import positive
from bitmtp_tvm.bench import layout_name, several
from bitmtp_tvm.cli import run
from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.modes import MODES
from bitmtp_tvm.sampling import SamplingOptions

if TYPE_CHECKING:
    from bitmtp_tvm.evaluation.work import Work


@dataclass(frozen=True)
class EvaluateOptions:
    """One run of the command; `command` is the command line, for the record."""

    model: Path | None = None
    baseline: Path | None = None
    artifact: Path | None = None
    data: tuple[Path, ...] = ()
    windows: int = 300
    length: int = 512
    anchors: int = 32
    device: str = "auto"
    quant: str | None = None
    quant_threshold: float | None = None
    prompts: Path | None = None
    completions: int = 50
    prompt_tokens: int = 64
    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.8)
    modes: tuple[str, ...] = MODES
    block_sizes: tuple[int, ...] | None = None
    layouts: tuple[str, ...] = ("auto",)
    graph: bool = True
    human_eval: bool = False
    problems: Path | None = None
    execute: bool = False
    seed: int = 0
    json: Path | None = None
    markdown: Path | None = None
    plots: Path | None = None
    verbose: bool = False
    command: str = ""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, evaluate, return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    values = vars(_parser().parse_args(arguments))
    values["data"] = tuple(values["data"])
    command = shlex.join(["python", "-m", "bitmtp_tvm.evaluate", *arguments])
    return run(lambda: evaluate(EvaluateOptions(**values, command=command)), values["verbose"])


def _parser() -> argparse.ArgumentParser:
    defaults = EvaluateOptions()
    parser = argparse.ArgumentParser(
        "python -m bitmtp_tvm.evaluate",
        description="Measure a checkpoint or a compiled model on held-out text.",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is evaluated")
    what.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint, by PyTorch")
    what.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="with --model: a checkpoint trained on next tokens alone, to compare the loss with",
    )
    what.add_argument("--artifact", type=Path, metavar="DIR", help="a compiled model")
    what.add_argument(
        "--device", default=defaults.device, metavar="NAME", help="of --model: auto, cpu, cuda, …"
    )
    what.add_argument("--quant", metavar="RULE", help="of a Bonsai checkpoint, as in compile")
    what.add_argument(
        "--quant-threshold", type=float, metavar="T", help="of that rule, as in compile"
    )
    what.add_argument("--seed", type=natural, default=0, metavar="N", help="default 0")
    _add_text(parser.add_argument_group("held-out text"), defaults)
    _add_completions(parser.add_argument_group("completions, by the artifact"), defaults)
    _add_human_eval(parser.add_argument_group("HumanEval, by the artifact"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write everything")
    output.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    output.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw into this folder; needs matplotlib"
    )
    output.add_argument("--verbose", action="store_true", help="show tracebacks")
    return parser


def _add_text(group: argparse._ArgumentGroup, defaults: EvaluateOptions) -> None:
    group.add_argument(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="token shards (.bin, .bin.xz), .jsonl, text files, folders of them",
    )
    for name, text in (
        ("windows", "windows of text at most, 0 for none"),
        ("length", "tokens of a window"),
        ("anchors", "places in a window where mask rows are measured"),
    ):
        default = getattr(defaults, name)
        kind = positive if name == "length" else natural
        group.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=f"{text} (default {default})"
        )


def _add_completions(group: argparse._ArgumentGroup, defaults: EvaluateOptions) -> None:
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one JSON string a line (default: pieces of --data)",
    )
    for name, text in (
        ("completions", "prompts out of --data at most, 0 for none"),
        ("prompt_tokens", "tokens of such a prompt"),
        ("max_new_tokens", "tokens of a completion at most"),
    ):
        default = getattr(defaults, name)
        kind = natural if name == "completions" else positive
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(
            flag, type=kind, default=default, metavar="N", help=f"{text} (default {default})"
        )
    group.add_argument(
        "--temperatures",
        type=several(temperature),
        default=defaults.temperatures,
        metavar="0,0.8",
        help="0 is greedy (default 0,0.8)",
    )
    group.add_argument(
        "--modes",
        type=several(mode_name),
        default=MODES,
        metavar="ar,hybrid",
        help="default all; ar is always run",
    )
    group.add_argument(
        "--block-sizes",
        type=several(positive),
        metavar="4,8",
        help="mask rows a block (default the model's)",
    )
    group.add_argument(
        "--layouts",
        type=several(layout_name),
        default=defaults.layouts,
        metavar="auto,chain",
        help="layouts of the modes that draft (default auto)",
    )
    group.add_argument(
        "--no-graph", dest="graph", action="store_false", help="launch kernels without CUDA graphs"
    )


def _add_human_eval(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--human-eval",
        action="store_true",
        help="write the 164 functions greedily and check them: needs --execute",
    )
    group.add_argument(
        "--problems",
        type=Path,
        metavar="FILE",
        help="a HumanEval.jsonl or .jsonl.gz (default: that of the package human-eval)",
    )
    group.add_argument(
        "--execute",
        action="store_true",
        help="run the programs that the model wrote, which nobody has read, on this machine",
    )


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def temperature(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature such as 0.8") from None


def mode_name(text: str) -> str:
    if text not in MODES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mode: choose of {', '.join(MODES)}, with commas between them"
        )
    return text


def evaluate(options: EvaluateOptions) -> None:
    """Measure, print the tables, write and draw what was asked for."""
    check(options)
    # Here and not above: what these load takes longer than to read a command line.
    from bitmtp_tvm.evaluation.pictures import check_folder
    from bitmtp_tvm.evaluation.report import Report, check_outputs, write_text

    check_outputs((options.json, options.markdown))
    if options.plots:
        check_folder(options.plots)
    report = Report(about(options), options.max_new_tokens)
    work(options).fill(report)
    print(report.text(), flush=True)
    if options.json:
        report.write_json(options.json)
    if options.markdown:
        write_text(options.markdown, report.markdown())
    if options.plots:
        for path in report.draw(options.plots):
            print(f"{path} is drawn", file=sys.stderr)


def work(options: EvaluateOptions) -> "Work":
    from bitmtp_tvm.evaluation.work import Work

    names = Work.__dataclass_fields__
    return Work(**{name: value for name, value in vars(options).items() if name in names})


def about(options: EvaluateOptions) -> dict[str, object]:
    now = datetime.datetime.now(datetime.timezone.utc)
    found = {k: v for k, v in asdict(options).items() if k in ("model", "baseline", "artifact")}
    return {
        "command": options.command,
        "date": now.isoformat(timespec="seconds"),
        **{name: str(value) for name, value in found.items() if value},
        "seed": options.seed,
        "data": [str(path) for path in options.data],
    }


def check(options: EvaluateOptions) -> None:
    """Options that do not go together or cannot be served, each a `UsageError`."""
    for value in options.temperatures:
        SamplingOptions(temperature=value)
    if options.model is None and options.artifact is None:
        raise UsageError("there is nothing to evaluate: give --model, --artifact or both")
    if options.baseline is not None and options.model is None:
        raise UsageError("--baseline is compared with --model: give that too")
    defaults = EvaluateOptions()
    for name in ("device", "quant", "quant_threshold"):
        if getattr(options, name) != getattr(defaults, name) and options.model is None:
            raise UsageError(f"--{name.replace('_', '-')} is about --model: give that too")
    for name in ("block_sizes", "layouts"):
        if getattr(options, name) != getattr(defaults, name) and set(options.modes) == {"ar"}:
            raise UsageError(f"--{name.replace('_', '-')} means nothing in mode ar: leave it out")
    if options.human_eval and not options.execute:
        raise UsageError(
            "--human-eval runs programs that the model wrote and nobody has read: add --execute "
            "where that is no danger"
        )
    for name in ("prompts", "human_eval"):
        if getattr(options, name) and options.artifact is None:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is answered by a compiled model: give --artifact too")
    for name in ("problems", "execute"):
        if getattr(options, name) and not options.human_eval:
            raise UsageError(f"--{name} goes with --human-eval")
    if not options.data and not options.prompts and not options.human_eval:
        raise UsageError("there is no held-out text: give --data, --prompts or --human-eval")
    predicts = options.data and options.windows
    if predicts and options.length < 2:
        raise UsageError("--length is 1: a window needs a token to predict, and one in front of it")
    completes = options.artifact and (options.prompts or (options.data and options.completions))
    if not predicts and not completes and not options.human_eval:
        raise UsageError("nothing is left to measure: give --windows above 0, or --artifact")
    if options.baseline is not None and not predicts:
        raise UsageError("--baseline is compared on windows of --data: give that, and --windows")


if __name__ == "__main__":
    sys.exit(main())
