"""`python -m bitmtp_tvm.trace`: draw what every step of a decode did."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bitmtp_tvm.arguments import add_decode_arguments, positive
from bitmtp_tvm.cli import check_stopped, run
from bitmtp_tvm.errors import UsageError

if TYPE_CHECKING:
    from bitmtp_tvm.engine import Parts
    from bitmtp_tvm.modes import DecodeOptions
    from bitmtp_tvm.recording import TracedStep

MAX_NEW_TOKENS = 48


@dataclass(frozen=True)
class TraceOptions:
    """One run of the command; of the decoding options None is the default."""

    artifact: Path
    prompt: str
    output: Path
    max_new_tokens: int = MAX_NEW_TOKENS
    mode: str | None = None
    block_size: int | None = None
    threshold: float | None = None
    draft_threshold: float | None = None
    min_chain: int | None = None
    layout: str = "auto"
    graph: bool = True
    verbose: bool = False


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, decode and draw, return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m bitmtp_tvm.trace",
        description="Decode a prompt greedily and draw every step: its rows, what was accepted, "
        "and how far the sequence moved. Needs matplotlib.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--artifact", type=Path, required=True, metavar="DIR", help="a compiled model"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE.png",
        help="the picture; its ending names its kind (png, svg, pdf)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        default=MAX_NEW_TOKENS,
        metavar="N",
        help=f"at most N (default {MAX_NEW_TOKENS})",
    )
    add_decode_arguments(parser.add_argument_group("decoding"))
    parser.add_argument("--verbose", action="store_true", help="show tracebacks")
    options = TraceOptions(**vars(parser.parse_args(argv)))
    return run(lambda: trace(options), options.verbose)


def trace(options: TraceOptions) -> None:
    """Decode, draw, and say where the picture is."""
    # Here and not above: this loads TVM, and a command line can be read without it.
    from bitmtp_tvm.engine import open_parts
    from bitmtp_tvm.generate import progress_bar
    from bitmtp_tvm.modes import resolve
    from bitmtp_tvm.plotting import check_picture
    from bitmtp_tvm.trace_picture import draw_trace

    check_picture(options.output)
    with progress_bar() as progress:
        parts = open_parts(options.artifact, progress, options.graph)
    if parts.codec is None:
        raise UsageError(f"{options.artifact} has no tokenizer: there is no text to draw")
    decoding = resolve(
        parts.mtp,
        parts.session.widths,
        mode=options.mode,
        block_size=options.block_size,
        threshold=options.threshold,
        draft_threshold=options.draft_threshold,
        min_chain=options.min_chain,
        layout=options.layout,
    )
    steps = record(parts, parts.codec.encode(options.prompt), options.max_new_tokens, decoding)
    if not steps:
        raise UsageError("the prompt fills the context, so there is no step to draw: shorten it")
    codec = parts.codec
    draw_trace(options.output, steps, lambda token: codec.decode([token]), decoding.mode)
    tokens = sum(len(step.committed) for step in steps)
    print(f"{options.output}: {tokens} tokens in {len(steps)} steps, mode {decoding.mode}")


def record(
    parts: "Parts", prompt_ids: list[int], max_new_tokens: int, decoding: "DecodeOptions"
) -> "list[TracedStep]":
    """The steps of one generation, run one by one."""
    from bitmtp_tvm.decoder import Decoder
    from bitmtp_tvm.recording import Recorder
    from bitmtp_tvm.stopping import StopCondition

    recorder = Recorder(parts.session)
    stop = StopCondition(parts.eos_token_ids, max_new_tokens, recorder.context)
    for _ in Decoder(recorder, parts.step_times).generate(prompt_ids, stop, decoding):
        check_stopped()
    return recorder.steps


if __name__ == "__main__":
    sys.exit(main())
