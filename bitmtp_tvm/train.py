"""`python -m bitmtp_tvm.train`: a low-bit model learns to predict several tokens at once."""

import argparse
from pathlib import Path
from typing import Any

from bitmtp_tvm.arguments import positive
from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.cli import run
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.training.options import (
    DTYPES,
    OPTIMIZERS,
    PARTS,
    RUNS,
    SCHEDULES,
    combined,
    read_recipe,
)
from relax_models.config import BLOCK_ATTENTIONS, PRESETS
from relax_models.quantizers import QUANTIZERS


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, train, return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m bitmtp_tvm.train",
        description="Train a low-bit model for one and several tokens at once.",
        allow_abbrev=False,
        # What is not given stays open for the recipe.
        argument_default=argparse.SUPPRESS,
    )
    add_model_options(parser)
    add_data_options(parser)
    add_objective_options(parser)
    add_optimizer_options(parser)
    add_run_options(parser)
    given = vars(parser.parse_args(argv))
    return run(lambda: work(given), given.pop("verbose", False))


def work(given: dict[str, Any]) -> None:
    """Train one run, or all of a file. Raises BitMTPError."""
    if "config" in given:
        given["config"] = read_json(given["config"])
    for name in ("data", "validation_data"):
        if name in given:
            given[name] = tuple(given[name])
    runs, recipe = given.pop("runs", None), given.pop("recipe", None)
    if runs is not None and recipe is not None:
        raise UsageError("give one of --runs and --recipe")
    _require_torch()
    if runs is not None:
        from bitmtp_tvm.training.ablation import read_runs, run_all

        run_all(read_runs(runs, given), Path(given["output"]))
        return
    from bitmtp_tvm.training.loop import train

    train(combined(read_recipe(recipe) if recipe is not None else {}, given))


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise BitMTPError(
            "training needs PyTorch, which is not installed: pip install 'bitmtp-tvm[train]'"
        ) from None


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--recipe", metavar="NAME", help="options from a file, or a shipped recipe: demo")
    add(
        "--runs",
        metavar="FILE",
        help=f"several runs and a table of them, or one of: {', '.join(RUNS)}",
    )
    add("--model", metavar="DIR", help="start from a Hugging Face checkpoint")
    add("--preset", metavar="NAME", help=f"random weights of one of: {', '.join(PRESETS)}")
    add("--config", type=Path, metavar="FILE", help="random weights of the shape in a JSON file")
    add("--quant", metavar="RULE", help=f"for a Qwen3, one of: {', '.join(QUANTIZERS)}")
    add("--quant-threshold", type=float, metavar="T", help="threshold of the rule ternary-g128")
    add("-o", "--output", type=Path, metavar="DIR", help="where the checkpoint goes")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add("--data", nargs="+", metavar="PATH", help="text, .jsonl, directories, tokenised shards")
    add("--validation-data", nargs="+", metavar="PATH", help="default: every 50th document")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json (default: the model's)")
    add("--cache", type=Path, metavar="DIR", help="token shards (default: DIR.tokens)")
    add("--length", type=positive, metavar="N", help="tokens of a window (default 1024)")


def add_objective_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("objective").add_argument
    add("--mask-token-id", type=int, metavar="ID", help="default: the model's, or <|mask|>")
    add("--block-size", type=positive, metavar="K", help="mask rows (default the model's, or 8)")
    add("--block-attention", choices=BLOCK_ATTENTIONS, help="default the model's, or causal")
    add("--anchors", type=int, metavar="N", help="mask blocks a window (default: one for 8 tokens)")
    add("--mtp-weight", type=float, metavar="X", help="of the mask rows' loss (default 0.3)")
    add("--mtp-decay", type=float, metavar="X", help="from one mask row to the next (default 0.85)")
    add("--kl-share", type=float, metavar="F", help="1 (default): learn from clean rows; 0: text")
    add("--ntp-only", action="store_true", help="no mask rows: the baseline")
    add("--train-only", choices=PARTS, help="masks: the mask token's row of the embedding alone")


def add_optimizer_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("optimiser and budget").add_argument
    add("--tokens", type=_whole, metavar="N", help="budget in clean tokens, such as 60M")
    add("--minutes", type=float, metavar="T", help="budget in minutes instead")
    add("--pause-after", type=float, metavar="T", help="stop after T minutes, for --resume")
    add("--batch-tokens", type=_whole, metavar="N", help="clean tokens a step (default 65536)")
    add("--micro-batch", type=positive, metavar="N", help="windows a forward (default 8)")
    add("--optimizer", choices=OPTIMIZERS, help="default adamw")
    add("--lr", type=float, metavar="X", help="highest learning rate (default 1e-3)")
    add("--schedule", choices=SCHEDULES, help="cosine (default), or wsd: level, then a line")
    add("--warmup", type=float, metavar="F", help="fraction of the budget (default 0.02)")
    add("--decay", type=float, metavar="F", help="wsd: fraction of the budget (default 0.3)")
    add("--weight-decay", type=float, metavar="X", help="of the layers' matrices (default 0.1)")
    add("--clip", type=float, metavar="X", help="largest norm of the gradient (default 1)")
    add("--ema", type=float, metavar="X", help="save a running mean of the weights, such as 0.999")
    add("--seed", type=int, metavar="N", help="default 0")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add("--device", metavar="NAME", help="auto (default), cpu or cuda")
    add("--dtype", choices=DTYPES, help="of products (default bfloat16 on a GPU, else float32)")
    add("--no-compile", dest="compile", action="store_false", help="no compiled graphs on a GPU")
    add("--activation-checkpointing", action="store_true", help="less memory, more time")
    add("--log-every", type=positive, metavar="N", help="steps (default 10)")
    add("--validate-every", type=positive, metavar="N", help="steps (default 200)")
    add("--validation-windows", type=positive, metavar="N", help="held-out windows (default 64)")
    add("--save-every", type=float, metavar="T", help="minutes (default 5)")
    add("--resume", action="store_true", help="go on with the run in --output")
    add("--packed", action="store_true", help="write a packed checkpoint too, in DIR/packed")
    add("--shard-mb", type=positive, metavar="N", help="largest file of weights (default 256)")
    add("--tensorboard", action="store_true", help="write its files too")
    add("--verbose", action="store_true", help="show tracebacks")


def _whole(text: str) -> int:
    """A whole number, with k, M or G behind it if that is shorter."""
    factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(digits) * factor


if __name__ == "__main__":
    raise SystemExit(main())
