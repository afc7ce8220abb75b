"""What a run tells: a progress bar, CSV files, TensorBoard, and a picture at the end."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.training.measures import Measures

TRAINING, VALIDATION = "train.csv", "validation.csv"
PICTURE = "loss.png"
_TRAINING = ("step", "tokens", "seconds", "tokens_per_second", "lr", "grad_norm")
_LOSSES = ("loss", "ntp_loss", "mask_ce", "mask_kl")


class Table:
    """A CSV file that is complete after every row."""

    def __init__(self, path: Path, columns: Sequence[str], keep_to: int) -> None:
        """Rows of an earlier run up to step `keep_to` stay."""
        held = path.read_bytes() if path.is_file() else b""
        try:
            if held and not held.startswith(b"step,"):
                raise ValueError("other columns")
            rows = [row for row in read_rows(path) if int(row["step"]) <= keep_to]
        except ValueError as fault:
            raise BitMTPError(f"{path} is no table of a run: give another --output") from fault
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")
        self._writer.writeheader()
        self._writer.writerows({c: row.get(c, "") for c in columns} for row in rows)
        self._file.flush()

    def add(self, values: Mapping[str, Any]) -> None:
        """Write a row and flush it."""
        self._writer.writerow({key: _short(value) for key, value in values.items()})
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, none where it is missing; a last row that was cut off is left out."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if all(value is not None for value in row.values())]


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


class Logs:
    """All of it, for the process that speaks; the others are silent."""

    def __init__(
        self, folder: Path, block_size: int, keep_to: int, total: float, unit: str, board: bool
    ) -> None:
        self._board = _tensorboard(folder) if board else None
        self._train = Table(folder / TRAINING, (*_TRAINING, *_LOSSES), keep_to)
        names = ("step", "tokens", "seconds", *measure_names(block_size))
        self._validation = Table(folder / VALIDATION, names, keep_to)
        self._bar = tqdm(total=total, unit=unit, unit_scale=True, disable=None, smoothing=0.05)

    def step(self, values: Mapping[str, float], spent: float) -> None:
        """Numbers of some steps; `spent` of the budget, in its unit."""
        self._train.add(values)
        self._bar.update(spent - self._bar.n)
        self._bar.set_postfix(loss=f"{values['loss']:.3f}", lr=f"{values['lr']:.2g}")
        self._on_board("train", values)

    def validation(self, place: Mapping[str, Any], measures: Measures) -> None:
        """What held-out text gave."""
        values = {**place, **measure_values(measures)}
        self._validation.add(values)
        drafts = f", {measures.accepted_length:.2f} tokens a forward" if measures.accuracy else ""
        self._bar.write(
            f"step {place['step']}, {place['tokens'] / 1e6:.1f} M tokens: validation loss "
            f"{measures.ntp_loss:.4f}{drafts}"
        )
        self._on_board("validation", values)

    def say(self, text: str) -> None:
        """A line on stdout that does not break the bar."""
        self._bar.write(text)

    def close(self) -> None:
        self._bar.close()
        self._train.close()
        self._validation.close()
        if self._board is not None:
            self._board.close()

    def _on_board(self, part: str, values: Mapping[str, Any]) -> None:
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{part}/{name}", value, values["step"])


def measure_names(block_size: int) -> list[str]:
    """Columns of `Measures` for blocks of so many mask rows."""
    rows = range(1, block_size + 1)
    drafts = [f"{name}_{i}" for name in ("accuracy", "agreement") for i in rows]
    return ["ntp_loss", *drafts, *(["accepted_length"] if block_size else [])]


def measure_values(measures: Measures) -> dict[str, float]:
    """The measures by the names of `measure_names`."""
    values = [measures.ntp_loss, *measures.accuracy, *measures.agreement]
    if measures.accuracy:
        values.append(measures.accepted_length)
    return dict(zip(measure_names(len(measures.accuracy)), values, strict=True))


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise BitMTPError("--tensorboard: the package tensorboard is not installed") from None
    return SummaryWriter(str(folder / "tensorboard"))


def draw(folder: Path) -> Path | None:
    """The picture of a run's CSV files, `loss.png`; None without matplotlib."""
    from bitmtp_tvm.plotting import BLUE, ORANGE, VERMILION, new_figure, save

    try:
        figure = new_figure(8, 4.2)
    except BitMTPError:
        return None
    axes = figure.add_subplot()
    training, validation = read_rows(folder / TRAINING), read_rows(folder / VALIDATION)
    drawn = [("ntp_loss", "next token", BLUE), ("mask_ce", "mask rows (CE)", ORANGE)]
    for name, label, colour in drawn:
        rows = [row for row in training if float(row[name])]
        places = [float(row["tokens"]) / 1e6 for row in rows]
        if rows:
            axes.plot(places, [float(row[name]) for row in rows], color=colour, lw=1, label=label)
    if validation:
        places = [float(row["tokens"]) / 1e6 for row in validation]
        losses = [float(row["ntp_loss"]) for row in validation]
        axes.plot(places, losses, "o-", color=VERMILION, ms=3, lw=1, label="next token, held out")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("nats a token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save(figure, folder / PICTURE)
    return folder / PICTURE
