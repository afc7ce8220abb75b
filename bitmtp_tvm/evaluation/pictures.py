"""Pictures of what was found; matplotlib is asked for only when one is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.evaluation.calibration import Calibration
from bitmtp_tvm.evaluation.completions import Group, ModeResult
from bitmtp_tvm.evaluation.intervals import Estimate
from bitmtp_tvm.evaluation.prediction import Blocks
from bitmtp_tvm.evaluation.tables import setting_name
from bitmtp_tvm.plotting import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    check_picture,
    new_figure,
    save,
)

RELIABILITY, MASKS, MODES = "reliability.png", "mask_rows.png", "modes.png"
COLOURS = (BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, MUTED, INK)
LEAST_ROWS = 20
"""A bin with fewer rows says nothing and is not drawn."""


def check_folder(folder: Path) -> None:
    """Make the folder; refuse it before the work when no picture could be written."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder: choose another --plots")
    folder.mkdir(parents=True, exist_ok=True)
    check_picture(folder / RELIABILITY)


def draw_reliability(path: Path, blocks: Blocks, title: str) -> None:
    """Share right by confidence, a line for each place in the block: against the text, and ar."""
    figure = new_figure(9.6, 5.4)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
    grid = figure.add_gridspec(2, 2, height_ratios=(4, 1))
    panels = (
        (blocks.text, "right: the token of the text"),
        (blocks.ar, "right: the token that ar would choose"),
    )
    for column, (found, name) in enumerate(panels):
        axes = figure.add_subplot(grid[0, column])
        _lines(axes, found)
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_ylabel("share right")
        _shares(figure.add_subplot(grid[1, column], sharex=axes), found)
    figure.tight_layout()
    save(figure, path)


def _lines(axes: Any, found: Sequence[Calibration]) -> None:
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1, label="calibrated")
    for place, one in enumerate(found):
        points = [(c, h) for c, h, rows in one.points() if rows >= LEAST_ROWS]
        axes.plot(
            [c for c, _ in points],
            [h for _, h in points],
            marker="o",
            markersize=3,
            linewidth=1.2,
            color=COLOURS[place % len(COLOURS)],
            label=f"mask row {place + 1} (ECE {one.error:.3f})",
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.tick_params(labelbottom=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="lower right")


def _shares(axes: Any, found: Sequence[Calibration]) -> None:
    """How the confidence is spread, a line for each place in the block."""
    for place, one in enumerate(found):
        bins = len(one.counts)
        share = one.counts / max(1, one.counts.sum())
        at = [(b + 0.5) / bins for b in range(bins)]
        axes.plot(at, share, color=COLOURS[place % len(COLOURS)], linewidth=1)
    axes.set_xlabel("confidence of the mask row")
    axes.set_ylabel("share of rows")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)


def draw_mask_rows(path: Path, blocks: Blocks, title: str) -> None:
    """Accuracy, agreement and acceptance by the place in the block, with their intervals."""
    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    curves = (
        (blocks.agreement, "as ar would choose", ORANGE),
        (blocks.accuracy, "right", BLUE),
        (blocks.accepted, "right, and all before it", GREEN),
    )
    places = range(1, len(blocks.accuracy) + 1)
    for estimates, label, colour in curves:
        axes.errorbar(
            places,
            [one.value for one in estimates],
            yerr=_bars(estimates),
            marker="o",
            markersize=4,
            capsize=2,
            color=colour,
            label=label,
        )
    axes.set_xticks(list(places))
    axes.set_xlabel("mask row")
    axes.set_ylabel("share")
    axes.set_ylim(bottom=0)
    length = blocks.accepted_length.text()
    axes.set_title(
        f"{title}\naccepted length on natural text {length}",
        fontsize=10,
        loc="left",
        parse_math=False,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save(figure, path)


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Distances to the ends of the intervals, as errorbar takes them."""
    low = [one.value if one.low is None else one.low for one in estimates]
    high = [one.value if one.high is None else one.high for one in estimates]
    values = [one.value for one in estimates]
    return [
        [max(0.0, v - a) for v, a in zip(values, low, strict=True)],
        [max(0.0, b - v) for v, b in zip(values, high, strict=True)],
    ]


def draw_modes(path: Path, results: Sequence[ModeResult], title: str) -> None:
    """Tokens per forward of every setting: prompts that do not loop beside all."""
    temperatures = list(dict.fromkeys(result.temperature for result in results))
    figure = new_figure(max(6.4, 1.1 * len(results)), 4.2)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
    first = None
    for place, temperature in enumerate(temperatures):
        axes = figure.add_subplot(1, len(temperatures), place + 1, sharey=first)
        first = first or axes
        part = [result for result in results if result.temperature == temperature]
        _mode_bars(axes, part)
        name = "greedy" if not temperature else f"temperature {temperature:g}"
        axes.set_title(name, fontsize=9, loc="left")
    assert first is not None
    first.set_ylabel("tokens per forward")
    first.legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    save(figure, path)


def _mode_bars(axes: Any, results: Sequence[ModeResult]) -> None:
    kinds: tuple[tuple[str, str, list[Group | None]], ...] = (
        ("ar's text does not loop", BLUE, [result.calm for result in results]),
        ("all", SKY, [result.every for result in results]),
    )
    for shift, (label, colour, groups) in zip((-0.2, 0.2), kinds, strict=True):
        shown = [(i, group.tokens_per_forward) for i, group in enumerate(groups) if group]
        estimates = [estimate for _, estimate in shown]
        axes.bar(
            [i + shift for i, _ in shown],
            [estimate.value for estimate in estimates],
            0.38,
            yerr=_bars(estimates) if estimates else None,
            label=label,
            color=colour,
            ecolor=INK,
            capsize=2,
        )
    names = [setting_name(result.every.row.setting) for result in results]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
