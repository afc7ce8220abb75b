"""`python -m bitmtp_tvm.generate`: continue prompts with a compiled model."""

import argparse
import codecs
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from bitmtp_tvm.arguments import add_decode_arguments, add_sampling_arguments, positive
from bitmtp_tvm.cli import check_stopped, run
from bitmtp_tvm.demo import demo_artifact
from bitmtp_tvm.errors import BitMTPError, UsageError

if TYPE_CHECKING:
    from bitmtp_tvm.engine import Engine, Progress
    from bitmtp_tvm.generation import Generation


@dataclass(frozen=True)
class GenerateOptions:
    """One run of the command; exactly one of `prompt`, `prompts` and `prompt_ids` is given.

    `chat`: every text is a message to an assistant, and goes through the model's chat template.
    The fields from `mode` to `stop` are those of `Engine.generate`.
    """

    artifact: Path | None = None
    prompt: str | None = None
    prompts: Path | None = None
    prompt_ids: tuple[int, ...] | None = None
    chat: bool = False
    max_new_tokens: int = 128
    mode: str | None = None
    block_size: int | None = None
    threshold: float | None = None
    draft_threshold: float | None = None
    min_chain: int | None = None
    layout: str = "auto"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    logprobs: bool = False
    graph: bool = True
    json: bool = False
    verbose: bool = False


# What of it an engine is asked for with every prompt.
REQUEST = (
    "max_new_tokens",
    "mode",
    "block_size",
    "threshold",
    "draft_threshold",
    "min_chain",
    "layout",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "stop",
)


@dataclass(frozen=True)
class Prompt:
    """`source` says in messages where the prompt stands, when there are several."""

    content: str | tuple[int, ...]
    source: str = ""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, generate, return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m bitmtp_tvm.generate",
        description="Continue prompts with a compiled model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--artifact",
        type=Path,
        metavar="DIR",
        help="a compiled model; without it the demo, compiled for this machine on first use",
    )
    add_prompt_arguments(parser)
    parser.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="at most N (default 128)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end in front of this text; may be given several times",
    )
    add_decode_arguments(parser.add_argument_group("decoding"))
    add_sampling_arguments(parser.add_argument_group("sampling"))
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one object a prompt: text, token_ids, finish_reason, stats",
    )
    parser.add_argument(
        "--logprobs", action="store_true", help="with --json: the tokens' logprobs too"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="say which step times are used, show tracebacks"
    )
    options = GenerateOptions(**vars(parser.parse_args(argv)))
    return run(lambda: generate(options), options.verbose)


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument(
        "--prompts", type=Path, metavar="FILE", help="several texts: one JSON string a line"
    )
    prompt.add_argument(
        "--prompt-ids", type=token_ids, metavar="1,2,3", help="token ids; prints token ids"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer the text as a message, in the model's chat format, instead of continuing it",
    )


def token_ids(text: str) -> tuple[int, ...]:
    try:
        if not re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", text):
            raise ValueError
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids such as 1,2,3"
        ) from None


def generate(options: GenerateOptions) -> None:
    """Answer the prompts on stdout; every prompt is checked before the first is answered."""
    if options.logprobs and not options.json:
        raise UsageError("--logprobs has no place among text: give --json with it")
    prompts = read_prompts(options)
    engine = open_engine(options)
    if options.verbose:
        print_step_times(engine)
    prompt_ids = [encode(engine, prompt, options.chat) for prompt in prompts]
    request = {name: getattr(options, name) for name in REQUEST}
    write = writer(options)
    for ids in prompt_ids:
        write(engine.generate(ids, **request))


def read_prompts(options: GenerateOptions) -> list[Prompt]:
    if options.prompts is not None:
        return read_prompt_file(options.prompts)
    content = options.prompt_ids if options.prompt is None else options.prompt
    if options.chat and options.prompt is None:
        raise UsageError("--chat needs text: give --prompt or --prompts, not token ids")
    if content is None:
        raise UsageError("no prompt: give one of --prompt, --prompts and --prompt-ids")
    return [Prompt(content)]


def read_prompt_file(path: Path) -> list[Prompt]:
    """The prompts of a file with one JSON string a line; empty lines are skipped."""
    try:
        # Some editors begin a file with a mark that none of them shows.
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be read: {fault.strerror}") from fault
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, str):
            raise BitMTPError(
                f'{path}, line {number}: not a JSON string; write each prompt as "…" on its line'
            )
        prompts.append(Prompt(content, f"{path}, line {number}: "))
    if not prompts:
        raise BitMTPError(f"{path} has no prompts: write one JSON string a line")
    return prompts


def open_engine(options: GenerateOptions) -> "Engine":
    from bitmtp_tvm.engine import Engine

    if options.artifact is not None:
        with progress_bar() as progress:
            return Engine(options.artifact, progress, options.graph)
    directory = demo_artifact(options.verbose)
    try:
        with progress_bar() as progress:
            return Engine(directory, progress, options.graph)
    except BitMTPError as fault:
        hint = f"the demo is in {directory}: remove it to have it compiled again"
        raise BitMTPError(f"{fault} ({hint})") from fault


@contextmanager
def progress_bar() -> Iterator["Progress"]:
    """A bar on stderr while a model loads, for a person only, gone when it is done."""
    hidden = None if sys.stderr else True  # None: shown on a terminal only
    with tqdm(unit="B", unit_scale=True, leave=False, disable=hidden, file=sys.stderr) as bar:

        def progress(phase: str, done: int, total: int) -> None:
            bar.set_description(phase, refresh=False)
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def print_step_times(engine: "Engine") -> None:
    advice = "predicted; python -m bitmtp_tvm.bench --steps measures them"
    device = engine.step_times.provenance.get("device", "this device")
    how = f"measured on {device}" if engine.step_times.measured else advice
    print(f"step times: {how}", file=sys.stderr)


def encode(engine: "Engine", prompt: Prompt, chat: bool) -> list[int]:
    try:
        if chat and isinstance(prompt.content, str):
            return engine.encode_chat(prompt.content)
        return engine.encode(prompt.content)
    except UsageError as fault:
        raise UsageError(f"{prompt.source}{fault}") from fault


def writer(options: GenerateOptions) -> Callable[["Generation"], None]:
    if options.json:
        return partial(write_json, logprobs=options.logprobs)
    return write_text if options.prompt_ids is None else write_ids


def write_json(generation: "Generation", logprobs: bool) -> None:
    for _ in generation.tokens():
        check_stopped()
    # Plain ASCII: no character of the text can be taken for the end of a line.
    print(json.dumps(generation.result().to_dict(logprobs)), flush=True)


def write_text(generation: "Generation") -> None:
    try:
        for piece in generation:
            check_stopped()
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    print_summary(generation)


def write_ids(generation: "Generation") -> None:
    try:
        for place, token in enumerate(generation.tokens()):
            check_stopped()
            print(f",{token}" if place else token, end="", flush=True)
    finally:
        print(flush=True)
    print_summary(generation)


def print_summary(generation: "Generation") -> None:
    stats = generation.stats
    several = stats.accepted_length > 1
    length = f"{stats.accepted_length:.2f} tokens per forward; " if several else ""
    print(
        f"tokens: {stats.prompt_tokens} prompt, {stats.new_tokens} new; {length}"
        f"{stats.tokens_per_second:.1f} tokens per second; finish: {generation.finish_reason}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
