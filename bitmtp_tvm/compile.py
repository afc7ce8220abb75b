"""`python -m bitmtp_tvm.compile`: a checkpoint becomes an artifact for one device."""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from bitmtp_tvm.cli import run
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.manifest import (
    KVLayout,
    Manifest,
    MemoryPlan,
    Shard,
    TokenizerInfo,
    allocated,
)
from bitmtp_tvm.records import records_folder
from bitmtp_tvm.report import print_report
from bitmtp_tvm.targets import TARGETS, Target, get_target, with_buckets
from relax_models.quantizers import QUANTIZERS
from relax_models.state import MOST_ROWS

if TYPE_CHECKING:
    from tvm import IRModule

    from bitmtp_tvm.checkpoint import Checkpoint
    from bitmtp_tvm.pipeline import Lowered
    from bitmtp_tvm.tuned import Tuned

DEMO = Path(__file__).parent / "assets" / "demo"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
MOST_CONTEXT = 1 << 20
"""Longest context in tokens: the rotary table and the KV storage grow with it."""


@dataclass(frozen=True)
class CompileOptions:
    """One run of the command. `context` and `widths` default to the model's and the target's."""

    target: str
    model: str | None = None
    random_weights: bool = False
    quant: str | None = None
    quant_threshold: float | None = None
    mask_token_id: int | None = None
    block_size: int | None = None
    context: int | None = None
    widths: tuple[int, ...] | None = None
    output: Path | None = None
    records: Path | None = None
    require_tuned: bool = False
    dump: Path | None = None
    verbose: bool = False


@dataclass(frozen=True)
class Plan:
    """What is to be built, decided before any work."""

    target: Target
    checkpoint: "Checkpoint"
    context: int
    directory: Path

    @property
    def slots(self) -> int:
        """KV slots a layer: a chunk or bucket may begin at the last slot of the context."""
        return self.context + max(*self.target.widths, *self.target.prefill)

    @property
    def kv(self) -> KVLayout:
        config = self.checkpoint.config
        shape = (2, config.num_key_value_heads, self.slots, config.head_dim)
        return KVLayout("float16", shape)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, compile, return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m bitmtp_tvm.compile",
        description="Compile a low-bit checkpoint for one device; no GPU is needed.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", required=True, help=f"one of: {', '.join(TARGETS)}")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="checkpoint: a Hugging Face directory or a GGUF file (default: the demo); with "
        "--random-weights a preset's name",
    )
    parser.add_argument(
        "--random-weights", action="store_true", help="benchmark a preset's shapes, e.g. bitnet-2b"
    )
    add_checkpoint_options(parser)
    parser.add_argument("--context", type=int, metavar="N", help="tokens (default: the model's)")
    parser.add_argument(
        "--widths", type=widths, metavar="1,2,4", help="rows of the decode buckets, up to 64"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="default: dist/<model>-<target>"
    )
    parser.add_argument(
        "--records", type=Path, metavar="DIR", help="tuning records (default: those of the target)"
    )
    parser.add_argument(
        "--require-tuned",
        action="store_true",
        help="fail where a kernel was not measured on the target",
    )
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write the module after each pass")
    parser.add_argument("--verbose", action="store_true", help="list kernels, show tracebacks")
    options = CompileOptions(**vars(parser.parse_args(argv)))
    return run(lambda: compile_model(options), options.verbose)


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """What a checkpoint's files may leave open: see `bitmtp_tvm.checkpoint.open_checkpoint`."""
    parser.add_argument(
        "--quant",
        metavar="RULE",
        help=f"how wide weights become low-bit, one of: {', '.join(QUANTIZERS)}",
    )
    parser.add_argument(
        "--quant-threshold", type=float, metavar="T", help="threshold of the rule ternary-g128"
    )
    parser.add_argument(
        "--mask-token-id", type=int, metavar="ID", help="mask token of a multi-token model"
    )
    parser.add_argument(
        "--block-size", type=int, metavar="D", help="mask rows that it was trained with"
    )


def widths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_ROWS for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of widths from 1 to {MOST_ROWS}")
    return tuple(sorted({int(part) for part in parts}))


def compile_model(options: CompileOptions) -> Manifest:
    """Compile as `options` say and print what came out; returns the artifact's manifest.

    The directory appears only when everything in it is complete. Raises `BitMTPError`.
    """
    from bitmtp_tvm.artifact import LIBRARY, MANIFEST, write_artifact
    from bitmtp_tvm.toolchain import require_compilers

    plan = make_plan(options)
    # Before anything imports TVM, which would come up without its CUDA part, and before the work.
    require_compilers(plan.target.kind)
    from bitmtp_tvm.build import build
    from bitmtp_tvm.tuned import Tuned, require_tuned

    tuned = Tuned.open(records_folder(plan.target, options.records), plan.target)
    with write_artifact(plan.directory) as folder, phases() as say:
        say("reading and packing the checkpoint")
        shards = write_shards(plan, folder)
        lowered = lower_model(plan, options, say, tuned)
        if options.require_tuned:
            require_tuned(lowered.kernels, plan.target.name)
        manifest = make_manifest(plan, lowered, shards)
        text = manifest.to_json()
        (folder / MANIFEST).write_text(text)
        report = build(
            lowered.mod,
            plan.target,
            folder / LIBRARY,
            say,
            manifest=text,
            verbose=options.verbose,
        )
        write_text_files(plan.checkpoint, folder)
    print_report(plan.directory, manifest, report, options.verbose)
    return manifest


def make_plan(options: CompileOptions) -> Plan:
    """Check the options against the target and the checkpoint; raises `UsageError`."""
    target = with_buckets(get_target(options.target), options.widths)
    checkpoint = find_checkpoint(options)
    longest = checkpoint.config.max_position_embeddings
    context = longest if options.context is None else options.context
    if not 1 <= context <= longest:
        raise UsageError(f"--context is {context}; {checkpoint.name} serves 1 to {longest} tokens")
    if context > MOST_CONTEXT:
        raise UsageError(
            f"{checkpoint.name} serves {context} tokens, more than can be planned for: give "
            f"--context, at most {MOST_CONTEXT}"
        )
    check_template(checkpoint)
    directory = options.output or Path("dist") / f"{checkpoint.name}-{target.name}"
    if options.dump and options.dump.resolve().is_relative_to(directory.resolve()):
        raise UsageError(f"--dump {options.dump} lies in the artifact's folder: choose another")
    return Plan(target, checkpoint, context, directory)


def find_checkpoint(options: CompileOptions) -> "Checkpoint":
    from bitmtp_tvm.checkpoint import open_checkpoint
    from relax_models.config import PRESETS

    if options.model == "":
        raise UsageError("--model is empty: give a checkpoint, or leave it out for the demo")
    if options.random_weights:
        return _random_weights(options)
    if options.model in PRESETS and not Path(options.model).exists():
        raise UsageError(
            f"{options.model} is a preset's name: add --random-weights for a benchmark of its "
            "shapes, or give the folder of a checkpoint"
        )
    return open_checkpoint(
        Path(options.model) if options.model else DEMO,
        quant=options.quant,
        quant_threshold=options.quant_threshold,
        mask_token_id=options.mask_token_id,
        block_size=options.block_size,
    )


def _random_weights(options: CompileOptions) -> "Checkpoint":
    """A preset's shapes, of its own format or of the one that `--quant` makes of a Bonsai."""
    from bitmtp_tvm.checkpoint import random_checkpoint
    from bitmtp_tvm.checkpoint.options import CheckpointOptions
    from relax_models.config import PRESETS

    about_files = ("quant_threshold", "mask_token_id", "block_size")
    given = [name for name in about_files if getattr(options, name) is not None]
    if given:
        raise UsageError(
            f"--{given[0].replace('_', '-')} is about a checkpoint's files, and "
            "--random-weights has none: leave it out"
        )
    name = options.model
    if name not in PRESETS:
        raise UsageError(f"--random-weights needs --model, one of: {', '.join(PRESETS)}")
    config = PRESETS[name]
    if options.quant is not None:
        if config.architecture != "qwen3":
            raise UsageError(f"--quant is for a Bonsai: {name} has its own rule")
        weight_format = CheckpointOptions(options.quant).quantizer().format
        config = replace(config, weight_format=weight_format)
        name = f"{name}-{weight_format}"
    return random_checkpoint(config, name=name)


@contextmanager
def phases() -> Iterator[Callable[[str], None]]:
    """A bar on stderr that is told each phase as it begins, and shows how many are done."""
    from bitmtp_tvm.pipeline import PASSES

    # Beside the passes: packing, compiling, linking, checking.
    layout = "{desc}{n_fmt}/{total_fmt} {bar} {elapsed}"
    with tqdm(total=PASSES + 4, bar_format=layout) as bar:
        begun = 0

        def say(name: str) -> None:
            nonlocal begun
            bar.update(begun - bar.n)
            bar.set_description(name)
            begun += 1

        yield say
        bar.update(bar.total - bar.n)


def write_shards(plan: Plan, folder: Path) -> tuple[Shard, ...]:
    from bitmtp_tvm.weights import pack_parameters, parameter_specs, write_parameters

    specs = parameter_specs(plan.checkpoint.config, plan.target.kind, plan.context)
    tensors = pack_parameters(plan.checkpoint, plan.target.kind, plan.context)
    bar = tqdm(tensors, "packing", total=len(specs), unit=" tensors", leave=False)
    return tuple(Shard(**record) for record in write_parameters(folder, bar))  # type: ignore[arg-type]


def symbolic_model(plan: Plan) -> "IRModule":
    """The checkpoint's model for the target's kind, any width, before any pass."""
    from relax_models.layers import Storage
    from relax_models.models import MODELS

    config = plan.checkpoint.config
    on_gpu = plan.target.kind == "cuda"
    storage = Storage(plan.target.kind, plan.slots, plan.context, shared_attention=on_gpu)
    mod, _ = MODELS[config.architecture](config, storage).export()
    return mod


def lower_model(
    plan: Plan, options: CompileOptions, say: Callable[[str], None], tuned: "Tuned"
) -> "Lowered":
    from bitmtp_tvm.pipeline import lower
    from bitmtp_tvm.specialize import buckets
    from bitmtp_tvm.targets import tvm_target

    mod = symbolic_model(plan)
    wanted = buckets(plan.target.widths, plan.target.prefill)
    return lower(mod, wanted, tvm_target(plan.target), options.dump, say, tuned)


def make_manifest(plan: Plan, lowered: "Lowered", shards: tuple[Shard, ...]) -> Manifest:
    from bitmtp_tvm.build import LEAST_DRIVERS
    from bitmtp_tvm.chunks import CHUNKS
    from bitmtp_tvm.toolchain import versions
    from bitmtp_tvm.weights import parameter_specs
    from relax_models.formats import LAYOUT_VERSION

    target, checkpoint = plan.target, plan.checkpoint
    config = checkpoint.config
    specs = parameter_specs(config, target.kind, plan.context)
    parameters = [tensor_bytes(shape, dtype) for shape, dtype in specs.values()]
    kv = config.num_hidden_layers * [tensor_bytes(plan.kv.shape, plan.kv.dtype)]
    memory = MemoryPlan.of(
        *(allocated(sizes, target.kind) for sizes in (parameters, kv, lowered.workspace))
    )
    return Manifest(
        model=checkpoint.name,
        config=config.to_dict(),
        format=config.weight_format,
        layout_version=LAYOUT_VERSION,
        target=target.name,
        kind=target.kind,
        arch=target.arch,
        host_triple=target.host_triple,
        host_features=target.host_features,
        versions=versions(),
        least_drivers=dict(LEAST_DRIVERS) if target.kind == "cuda" else {},
        widths=target.widths,
        chunks=CHUNKS,
        prefill=target.prefill,
        context=plan.context,
        slots=plan.slots,
        kv=plan.kv,
        memory=memory,
        shards=shards,
        tokenizer=tokenizer_info(checkpoint),
        kernels=tuple(lowered.kernels),
        counts=dict(Counter(kernel.provenance for kernel in lowered.kernels)),
    )


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def check_template(checkpoint: "Checkpoint") -> None:
    """Raise `BitMTPError` for a chat template that no file can hold, before the work."""
    try:
        (checkpoint.chat_template or "").encode()
    except UnicodeEncodeError as fault:
        raise BitMTPError(f"the chat template of {checkpoint.name} is not valid text") from fault


def write_text_files(checkpoint: "Checkpoint", folder: Path) -> None:
    """Write the tokenizer and the chat template, where the checkpoint has them."""
    tokenizer = checkpoint.tokenizer_json()
    if tokenizer is not None:
        (folder / TOKENIZER).write_bytes(tokenizer)
    if tokenizer is not None and checkpoint.chat_template is not None:
        (folder / CHAT_TEMPLATE).write_bytes(checkpoint.chat_template.encode())


def tokenizer_info(checkpoint: "Checkpoint") -> TokenizerInfo:
    mtp = checkpoint.config.mtp
    has_text = checkpoint.tokenizer_json() is not None
    has_template = has_text and checkpoint.chat_template is not None
    return TokenizerInfo(
        file=TOKENIZER if has_text else None,
        add_bos=checkpoint.add_bos,
        bos_token_id=checkpoint.bos_token_id,
        eos_token_ids=tuple(checkpoint.eos_token_ids),
        mask_token_id=mtp.mask_token_id if mtp else None,
        chat_template=CHAT_TEMPLATE if has_template else None,
        special_tokens=dict(checkpoint.special_tokens),
    )


if __name__ == "__main__":
    sys.exit(main())
