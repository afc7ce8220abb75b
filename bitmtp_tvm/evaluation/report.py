"""The parts of an evaluation put together: what is measured, printed, written and drawn."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.evaluation.completions import ModeResult
from bitmtp_tvm.evaluation.human_eval import Solved
from bitmtp_tvm.evaluation.pictures import (
    MASKS,
    MODES,
    RELIABILITY,
    draw_mask_rows,
    draw_modes,
    draw_reliability,
)
from bitmtp_tvm.evaluation.prediction import Cost, Prediction
from bitmtp_tvm.evaluation.tables import (
    Table,
    completion_tables,
    cost_line,
    human_eval_table,
    mask_table,
    prediction_table,
)


@dataclass
class Report:
    """What was found so far; `about`: command, date, seed, data, device.

    `predictions`: of the model (or artifact), then of the baseline. `max_new_tokens`: of the
    completions.
    """

    about: dict[str, Any]
    max_new_tokens: int
    predictions: list[Prediction] = field(default_factory=list)
    cost: Cost | None = None
    completions: list[ModeResult] = field(default_factory=list)
    human_eval: list[Solved] = field(default_factory=list)

    def tables(self) -> list[Table]:
        found = [prediction_table(self.predictions)] if self.predictions else []
        found += [mask_table(one) for one in self.predictions if one.blocks]
        found += completion_tables(self.completions, self.max_new_tokens)
        return found + ([human_eval_table(self.human_eval)] if self.human_eval else [])

    def lines(self) -> list[str]:
        """Sentences that stand in no table."""
        found = [cost_line(self.cost)] if self.cost else []
        if self.completions or self.human_eval:
            found.append(f"tok/s are those of {_said(self.about['device_state'])}")
        return found

    def text(self) -> str:
        return "\n\n".join([*(table.text() for table in self.tables()), *self.lines()])

    def markdown(self) -> str:
        named = [f"- {name}: `{_said(value)}`" for name, value in self.about.items() if value]
        tables = [table.markdown() for table in self.tables()]
        sentences = [f"{line[:1].upper()}{line[1:]}.\n" for line in self.lines()]
        return "\n".join(["## Evaluation\n", *named, "", *tables, *sentences])

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.about,
            "max_new_tokens": self.max_new_tokens,
            "predictions": [one.to_dict() for one in self.predictions],
            "joint_cost": self.cost.to_dict() if self.cost else None,
            "completions": [one.to_dict() for one in self.completions],
            "human_eval": [one.to_dict() for one in self.human_eval],
        }

    def draw(self, folder: Path) -> list[Path]:
        """The pictures there is something to draw for; their paths."""
        made = []
        blocks = self.predictions[0].blocks if self.predictions else None
        if blocks:
            name = Path(self.predictions[0].model).name
            draw_reliability(folder / RELIABILITY, blocks, f"{name}: confidence of mask rows")
            draw_mask_rows(folder / MASKS, blocks, f"{name}: mask rows")
            made += [folder / RELIABILITY, folder / MASKS]
        if self.completions:
            title = f"{Path(str(self.about['artifact'])).name}: completions of held-out prompts"
            draw_modes(folder / MODES, self.completions, title)
            made.append(folder / MODES)
        return made

    def write_json(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n")


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items() if part)
    return ", ".join(value) if isinstance(value, list) else str(value)


def check_outputs(paths: Sequence[Path | None]) -> None:
    """Refuse, before the work, a file that could not be written behind it."""
    given = [path.absolute() for path in filter(None, paths)]
    if len(set(given)) < len(given):
        raise UsageError(f"{given[0]} cannot be two files at once: give each its own")
    for path in given:
        if path.is_dir():
            raise UsageError(f"{path} is a folder: name a file")
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is not there: make the folder first")


def write_text(path: Path, text: str) -> None:
    """Write beside the place and rename, so that nothing half written is ever there."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.absolute().parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # mkstemp gives a file that its owner alone may read.
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be written: {fault.strerror}") from fault
