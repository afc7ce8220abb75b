"""The four ways to decode, and what may be asked of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitmtp_tvm.errors import UsageError, shown

MODES = ("ar", "confidence", "speculative", "hybrid")
LAYOUTS = ("auto", "chain", "outcomes")

# The options that a mode reads.
READ = {
    "ar": (),
    "confidence": ("block_size", "threshold"),
    "speculative": ("block_size", "draft_threshold", "layout"),
    "hybrid": ("block_size", "threshold", "draft_threshold", "min_chain", "layout"),
}

UNVERIFIED = ("confidence", "hybrid")
"""Modes that commit what nothing verified. The rows that run decide what they say, so each request
begins afresh: its answer does not depend on those before it."""

THRESHOLD = 0.9
DRAFT_THRESHOLD = 0.5


@dataclass(frozen=True)
class DecodeOptions:
    """How a request is decoded; `resolve` checks it.

    `block_size`: mask rows a block, 0 for ar. `threshold`: least confidence of a token that is
    committed unverified, `draft_threshold` of one that is drafted. `min_chain`: least unverified
    tokens that hybrid commits at once. `layout`: where mask rows stand, "auto": as the step times
    say. `bidirectional`: mask rows see the whole block, which then has its full size or none.
    """

    mode: str = "ar"
    block_size: int = 0
    threshold: float = THRESHOLD
    draft_threshold: float = DRAFT_THRESHOLD
    min_chain: int = 0
    layout: str = "auto"
    bidirectional: bool = False
    mask_token_id: int = 0


def resolve(
    mtp: Mapping[str, Any] | None,
    widths: Sequence[int],
    *,
    mode: str | None = None,
    block_size: int | None = None,
    threshold: float | None = None,
    draft_threshold: float | None = None,
    min_chain: int | None = None,
    layout: str = "auto",
) -> DecodeOptions:
    """The options of a request; what is None gets its default.

    `mtp`: the model's multi-token prediction as the manifest has it, None for a model without;
    `widths`: the decode buckets, ascending. Raises `UsageError` for what the model, the buckets or
    the mode do not serve; an option that the mode does not read is refused, not ignored.
    """
    mode = _known("mode", mode or _default_mode(mtp, widths), MODES)
    layout = _known("layout", layout, LAYOUTS)
    given = {
        "block_size": block_size,
        "threshold": threshold,
        "draft_threshold": draft_threshold,
        "min_chain": min_chain,
        "layout": None if layout == "auto" else layout,
    }
    _check_read(mode, given)
    if mode == "ar":
        return DecodeOptions()
    if mtp is None:
        raise UsageError(
            f"mode {mode} needs a model with multi-token prediction, and this one was trained "
            "without: use mode ar"
        )
    bidirectional = mtp["block_attention"] == "bidirectional"
    block_size = _check_block_size(block_size, int(mtp["block_size"]), bidirectional)
    _check_widths(widths, _least_rows(mtp, layout), layout)
    return DecodeOptions(
        mode,
        block_size,
        _check_threshold("threshold", THRESHOLD if threshold is None else threshold),
        _check_threshold(
            "draft_threshold", DRAFT_THRESHOLD if draft_threshold is None else draft_threshold
        ),
        _check_min_chain(min_chain, block_size),
        layout,
        bidirectional,
        int(mtp["mask_token_id"]),
    )


def _default_mode(mtp: Mapping[str, Any] | None, widths: Sequence[int]) -> str:
    """Drafts that are verified, where the model can draft and a bucket has room for it."""
    return "speculative" if mtp and max(widths) >= _least_rows(mtp, "auto") else "ar"


def _least_rows(mtp: Mapping[str, Any], layout: str) -> int:
    """Rows of a pending token, a draft, and the masks to draft the next one."""
    masks = int(mtp["block_size"]) if mtp["block_attention"] == "bidirectional" else 1
    return 2 + (2 if layout == "outcomes" else 1) * masks


def _known(name: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise UsageError(f"{name} {shown(value)} is unknown: choose one of {', '.join(known)}")
    return value


def _check_read(mode: str, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value is not None and name not in READ[mode]:
            readers = [other for other in MODES if name in READ[other]]
            raise UsageError(
                f"{name} means nothing in mode {mode}: leave it out, or choose a mode that reads "
                f"it ({', '.join(readers)})"
            )


def _check_block_size(block_size: int | None, trained: int, bidirectional: bool) -> int:
    if block_size is None:
        return trained
    if not _whole(block_size) or block_size < 1:
        raise UsageError(
            f"block_size is {shown(block_size)}: ask for 1 to {trained} mask rows, or use mode ar"
        )
    if block_size > trained:
        raise UsageError(
            f"block_size is {block_size} and the model was trained with blocks of {trained}: "
            "fewer may be used at run time with causal blocks; more, never"
        )
    if block_size != trained and bidirectional:
        raise UsageError(
            f"block_size is {block_size} and this model's blocks are bidirectional, which are used "
            f"whole: leave it at {trained}"
        )
    return block_size


def _check_widths(widths: Sequence[int], rows: int, layout: str) -> None:
    if max(widths) >= rows:
        return
    advice = f"use {'layout chain' if layout == 'outcomes' else 'mode ar'}, or compile"
    raise UsageError(
        f"this artifact's widest decode bucket has {max(widths)} rows, and drafting needs {rows}: "
        f"{advice} with a wider bucket"
    )


def _check_threshold(name: str, value: float) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Written so that nan is refused too.
    if not (number and 0 < value <= 1):
        raise UsageError(f"{name} is {shown(value)}: give a probability above 0 and at most 1")
    return float(value)


def _check_min_chain(min_chain: int | None, block_size: int) -> int:
    if min_chain is None:
        return math.ceil(3 * block_size / 4)
    if not _whole(min_chain) or not 1 <= min_chain <= block_size:
        raise UsageError(
            f"min_chain is {shown(min_chain)} and a chain has at most block_size = {block_size} "
            f"tokens: give 1 to {block_size}"
        )
    return min_chain


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
