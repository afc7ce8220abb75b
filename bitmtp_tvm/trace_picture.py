"""The picture of a decode: a line for each step, its rows as cells, and the token axis beside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitmtp_tvm.plotting import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    MUTED,
    PURPLE,
    SKY,
    VERMILION,
    WHITE,
    new_figure,
    save,
)
from bitmtp_tvm.recording import TracedStep
from relax_models.state import Kind

# Inches. 10 wide at the usual resolution are 1600 points across.
PAGE, LINE, HEADER, FOOTER = 10.0, 0.40, 1.0, 0.5
LEFT, SPLIT, RIGHT = 0.045, 0.74, 0.985
"""Shares of the width: rows from LEFT to SPLIT, the token axis from there to RIGHT."""

CELL_WIDTH, CELL_HEIGHT = 0.92, 0.84
LETTER = 0.066
"""Inches that a character of the cells' text takes."""

LEAST_COLUMNS = 8

FILLS = {
    "pending": ("pending token", SKY),
    "right": ("draft, right", GREEN),
    "wrong": ("draft, wrong", FAINT),
    "mask": ("mask, drafts", PURPLE),
    "unverified": ("mask, committed unverified", VERMILION),
    "void": ("mask, unused", WHITE),
}
MARKS = {"right": "✓", "wrong": "✗"}
AXIS = {
    "in place": ("K/V in place, [0, b)", FAINT),
    "pending": ("pending, [b, n)", SKY),
    Kind.DRAFT: ("accepted drafts", GREEN),
    Kind.TARGET: ("target", BLUE),
    Kind.UNVERIFIED: ("unverified", VERMILION),
}

VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "↵"})

Text = Callable[[int], str]


@dataclass(frozen=True)
class Cell:
    """A row of a step: the token that went in, and what came out, "" where nobody used it."""

    kind: str
    token: str
    output: str = ""


def cells(step: TracedStep, text: Text) -> list[Cell]:
    """The rows in their order; of several blocks, the one that counted."""
    outputs = [show(token, text) for token, _ in step.committed[: step.accepted + 1]]
    # The last pending row says the first new token, and each right draft another one.
    outputs = [""] * (len(step.pending) - 1) + outputs
    known = [("pending", token) for token in step.pending]
    known += [("right" if i < step.accepted else "wrong", t) for i, t in enumerate(step.drafts)]
    outputs += [""] * (len(known) - len(outputs))
    found = [
        Cell(kind, show(token, text), output)
        for (kind, token), output in zip(known, outputs, strict=True)
    ]
    used = "unverified" if step.unverified else "mask"
    found += [Cell(used, "mask", show(token, text)) for token in step.proposed]
    return found + [Cell("void", "mask")] * (step.masks - len(step.proposed))


def show(token: int, text: Text) -> str:
    """A token on one line: spaces visible, its number where it has no text."""
    visible = text(token).translate(VISIBLE)
    return "".join(c if c.isprintable() else "·" for c in visible) or f"#{token}"


def draw_trace(path: Path, steps: Sequence[TracedStep], text: Text, mode: str) -> None:
    """Draw the steps of one generation; `text` gives a token's text, "" where it has none."""
    height = HEADER + FOOTER + LINE * len(steps)
    figure = new_figure(PAGE, height)
    bottom, share = FOOTER / height, LINE * len(steps) / height
    rows = figure.add_axes((LEFT, bottom, SPLIT - LEFT - 0.015, share))
    axis = figure.add_axes((SPLIT, bottom, RIGHT - SPLIT, share))
    columns = max([LEAST_COLUMNS, *(len(cells(step, text)) + 1 for step in steps)])
    letters = int(PAGE * (SPLIT - LEFT - 0.015) / columns * CELL_WIDTH / LETTER)
    for line, step in enumerate(steps):
        found = cells(step, text)
        for column, cell in enumerate(found):
            _draw_cell(rows, line, column, cell, letters)
        _draw_rest(rows, line, len(found), step)
        _draw_progress(axis, line, step, steps[0].boundary[0] - 2)
    _finish_rows(rows, len(steps), columns)
    _finish_axis(axis, steps)
    _head(figure, steps, mode, height)
    save(figure, path)


def _draw_cell(axes: Any, line: int, column: int, cell: Cell, letters: int) -> None:
    faded = cell.kind in ("wrong", "void")
    _box(axes, column, line, FILLS[cell.kind][1], edge=MUTED if faded else INK, dashed=faded)
    ink, middle = MUTED if faded else INK, column + CELL_WIDTH / 2
    mark = MARKS.get(cell.kind, "")
    token = cut(cell.token, letters - 2 if mark else letters)
    small = cell.token == "mask"
    axes.text(
        middle,
        line + 0.27,
        f"{token} {mark}".strip(),
        color=ink,
        fontsize=5.5 if small else 6.5,
        fontweight="normal" if small else "bold",
        ha="center",
        va="center",
        parse_math=False,
    )
    if cell.output:
        axes.text(
            middle,
            line + 0.63,
            f"→{cut(cell.output, letters - 1)}",
            color=ink,
            fontsize=6.5,
            ha="center",
            va="center",
            parse_math=False,
        )


def cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: max(1, letters - 1)] + "…"


def _box(axes: Any, column: float, line: int, fill: str, edge: str, dashed: bool) -> None:
    axes.broken_barh(
        [(column, CELL_WIDTH)],
        (line + (1 - CELL_HEIGHT) / 2, CELL_HEIGHT),
        facecolor=fill,
        edgecolor=edge,
        linewidth=0.7,
        linestyle=(0, (2, 2)) if dashed else "-",
    )


def _draw_rest(axes: Any, line: int, column: int, step: TracedStep) -> None:
    """Behind the cells: all blocks in small, where there are several, and the padding's number."""
    if step.blocks > 1:
        size, high = CELL_WIDTH / step.masks, CELL_HEIGHT / step.blocks
        for block in range(step.blocks):
            fill = PURPLE if block == step.valid else WHITE
            for j in range(step.masks):
                axes.broken_barh(
                    [(column + j * size, size)],
                    (line + (1 - CELL_HEIGHT) / 2 + block * high, high),
                    facecolor=fill,
                    edgecolor=MUTED,
                    linewidth=0.3,
                )
        column += 1
    if step.padding:
        label = f"+{step.padding} pad"
        axes.text(column + 0.05, line + 0.5, label, color=MUTED, fontsize=6, va="center")


def _draw_progress(axes: Any, line: int, step: TracedStep, first: int) -> None:
    """The token axis of a step: what is in place, pending, and committed by it."""
    (length, _), (boundary, _) = step.length, step.boundary
    spans = [(first, boundary, AXIS["in place"][1]), (boundary, length, AXIS["pending"][1])]
    for place, (_, kind) in enumerate(step.committed, start=length):
        spans.append((place, place + 1, AXIS[kind][1]))
    for start, end, colour in spans:
        axes.broken_barh(
            [(start, end - start)],
            (line + 0.2, 0.6),
            facecolor=colour,
            edgecolor=WHITE,
            linewidth=0.3,
        )


def _finish_rows(axes: Any, lines: int, columns: int) -> None:
    axes.set_xlim(-0.05, columns)
    axes.set_ylim(lines, 0)
    axes.set_yticks([line + 0.5 for line in range(lines)], range(1, lines + 1), fontsize=7)
    axes.set_xticks([])
    axes.set_ylabel("step", fontsize=8)
    axes.set_xlabel("rows of the step, in their order", fontsize=8)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _finish_axis(axes: Any, steps: Sequence[TracedStep]) -> None:
    axes.set_xlim(steps[0].boundary[0] - 2, steps[-1].length[1] + 1)
    axes.set_ylim(len(steps), 0)
    axes.set_yticks([])
    axes.tick_params(labelsize=7)
    axes.set_xlabel("position in the sequence", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for name, place, side in (
        ("b", steps[0].boundary[0], "right"),
        ("n", steps[0].length[0], "left"),
    ):
        axes.text(place, 0.12, name, fontsize=8, fontstyle="italic", ha=side)


def _head(figure: Any, steps: Sequence[TracedStep], mode: str, height: float) -> None:
    """Title and legends, in inches from the top."""
    tokens = sum(len(step.committed) for step in steps)
    title = f"{mode}: {tokens} tokens in {len(steps)} steps, {tokens / len(steps):.2f} a step"
    figure.text(LEFT, 1 - 0.22 / height, title, fontsize=11, fontweight="bold", va="center")
    note = "upper text: token that goes in; →: token that comes out and is used"
    if any(step.blocks > 1 for step in steps):
        note += "; grid: all blocks of mask rows, filled the one that counts"
    figure.text(LEFT, 1 - 0.45 / height, note, fontsize=7.5, color=MUTED, va="center")
    at = LEFT
    for label, colour in FILLS.values():
        _legend(figure, at, 1 - 0.72 / height, label, colour)
        at += 0.034 + 0.0051 * len(label)
    for place, (label, colour) in enumerate(AXIS.values()):
        line, column = divmod(place, 2)
        middle = 1 - (0.34 + 0.19 * line) / height
        _legend(figure, SPLIT + 0.13 * column, middle, label, colour)


def _legend(figure: Any, left: float, middle: float, label: str, colour: str) -> None:
    """A coloured square and its words."""
    figure.text(
        left,
        middle,
        "  ",
        fontsize=6,
        va="center",
        bbox={"facecolor": colour, "edgecolor": INK, "linewidth": 0.5, "pad": 1.5},
    )
    figure.text(left + 0.016, middle, label, fontsize=7, va="center")
