"""Pictures by matplotlib, which nothing else needs: it is imported when one is drawn."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.step_times import GRAPH, LAUNCHES, Timing

DOTS_PER_INCH = 160

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, YELLOW = "#0072B2", "#E69F00", "#009E73", "#F0E442"
SKY, VERMILION, PURPLE = "#56B4E9", "#D55E00", "#CC79A7"
INK, MUTED, FAINT, WHITE = "#1A1A1A", "#6E6E6E", "#E4E4E4", "#FFFFFF"


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be written: better before the work than behind it.

    Raises `BitMTPError` without matplotlib, `UsageError` for an ending or a folder that is none.
    """
    kinds = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise UsageError(f"{path} names no kind of picture: let it end in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not there: make the folder first")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches; `BitMTPError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BitMTPError(
            "pictures need matplotlib, which is not installed: pip install 'bitmtp-tvm[plot]'"
        ) from None
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor=WHITE)


def save(figure: Any, path: Path) -> None:
    """Write a picture, whose ending names its kind. `BitMTPError` where it cannot be written."""
    try:
        with warnings.catch_warnings():
            # A letter that no font has is drawn as a box, which says enough.
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be written: {fault.strerror}") from fault


STYLES = {GRAPH: ("CUDA graph", BLUE), LAUNCHES: ("kernel by kernel", ORANGE)}


def draw_step_times(
    path: Path, timings: Mapping[str, Mapping[int, Timing]], title: str, floor: float | None
) -> None:
    """Bars of t(W) with their 10-90 % range; `floor`: milliseconds that reading alone takes."""
    figure = new_figure(8, 4.2)
    axes = figure.add_subplot()
    shown = [how for how in STYLES if how in timings]
    size = 0.8 / len(shown)
    for place, how in enumerate(shown):
        at = [i - 0.4 + size * (place + 0.5) for i in range(len(timings[how]))]
        _bars(axes, at, list(timings[how].values()), size * 0.92, *STYLES[how])
    if floor:
        axes.axhline(
            floor,
            color=INK,
            linestyle="--",
            linewidth=1,
            label="all bytes at the data sheet's bandwidth",
        )
    widths = list(timings[shown[0]])
    axes.set_xticks(range(len(widths)), [str(width) for width in widths])
    axes.set_xlabel("rows in the step (bucket)")
    axes.set_ylabel("milliseconds a step")
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    figure.tight_layout()
    save(figure, path)


def _bars(
    axes: Any, at: list[float], times: list[Timing], size: float, label: str, colour: str
) -> None:
    medians = [t.median for t in times]
    ranges = [[t.median - t.low for t in times], [t.high - t.median for t in times]]
    axes.bar(at, medians, size, yerr=ranges, label=label, color=colour, ecolor=INK, capsize=2)
    for x, time in zip(at, times, strict=True):
        axes.annotate(
            f"{time.median:.3g}",
            (x, time.high),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )


# What a bar of a step is made of, from below, and the operations that belong there.
PARTS = {
    "linears": (BLUE, ("low_bit_linear",)),
    "attention": (ORANGE, ("attention",)),
    "norms and codes": (GREEN, ("norm_quantize", "quantize", "final_norm")),
    "RoPE and K/V": (SKY, ("rope", "qk_norm")),
    "head": (PURPLE, ("head",)),
    "the rest": (MUTED, ("",)),
}


def part_of(op: str) -> str:
    """The part of a step's bar that an operation belongs to."""
    for name, (_, words) in PARTS.items():
        if any(word in op for word in words):
            return name
    raise AssertionError


def draw_kernel_times(
    path: Path, report: Mapping[str, Any], before: Mapping[str, Any] | None, title: str
) -> None:
    """Bars of the kernels of every decode bucket, each timed alone, by what they do, and a mark for
    the whole step; of `before`, an earlier report, paler and to the left."""
    figure = new_figure(9, 4.6)
    axes = figure.add_subplot()
    shown = [(before, 0.38, -0.2, 0.45), (report, 0.38, 0.2, 1.0)] if before else []
    widths = sorted(report["whole_us"], key=lambda name: int(name.removeprefix("step_w")))
    for one, size, shift, alpha in shown or [(report, 0.6, 0.0, 1.0)]:
        at = [place + shift for place in range(len(widths))]
        _stack(axes, at, [_sums(one, width) for width in widths], size, alpha, one is report)
        whole = [one["whole_us"].get(width, float("nan")) / 1000 for width in widths]
        label = "whole step" if one is report else "before"
        face = INK if one is report else WHITE
        axes.plot(at, whole, "D", color=INK, markerfacecolor=face, markersize=5, label=label)
    axes.set_xticks(range(len(widths)), [width.removeprefix("step_w") for width in widths])
    axes.set_xlabel("rows in the step (bucket)")
    axes.set_ylabel("milliseconds a step")
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    figure.tight_layout()
    save(figure, path)


def _sums(report: Mapping[str, Any], bucket: str) -> dict[str, float]:
    """Milliseconds of each part of a bucket."""
    sums = dict.fromkeys(PARTS, 0.0)
    for row in report["kernels"]:
        if row["bucket"] == bucket:
            sums[part_of(row["op"])] += row["count"] * row["us"] / 1000
    return sums


def _stack(
    axes: Any,
    at: list[float],
    sums: list[dict[str, float]],
    size: float,
    alpha: float,
    labelled: bool,
) -> None:
    base = [0.0] * len(at)
    for name, (colour, _) in PARTS.items():
        heights = [one[name] for one in sums]
        label = name if labelled else None
        axes.bar(at, heights, size, bottom=base, color=colour, alpha=alpha, label=label)
        base = [low + height for low, height in zip(base, heights, strict=True)]
