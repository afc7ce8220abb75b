"""Command line arguments for how to decode and how to sample."""

import argparse

from bitmtp_tvm.modes import DRAFT_THRESHOLD, LAYOUTS, MODES, THRESHOLD


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def add_decode_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mode",
        choices=MODES,
        help="speculative where the model predicts several tokens (default), else ar",
    )
    group.add_argument(
        "--block-size", type=positive, metavar="N", help="mask rows a block (default the model's)"
    )
    group.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help=f"commit unverified tokens at least so probable (default {THRESHOLD})",
    )
    group.add_argument(
        "--draft-threshold",
        type=float,
        metavar="P",
        help=f"draft tokens at least so probable (default {DRAFT_THRESHOLD})",
    )
    group.add_argument(
        "--min-chain",
        type=positive,
        metavar="N",
        help="hybrid commits chains of N unverified tokens and more (default 3/4 of the block)",
    )
    group.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="auto",
        help="where mask rows stand: auto (default) goes by the step times",
    )
    group.add_argument(
        "--no-graph", dest="graph", action="store_false", help="launch kernels without CUDA graphs"
    )


def add_sampling_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy"
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="of the K likeliest (default 0: of all)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="of the fewest that hold this probability together (default 1)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="of those with this share of the likeliest's probability (default 0)",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="the same draws every time (default: new ones)"
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: tokens that stand in the text are less likely (default 1)",
    )
