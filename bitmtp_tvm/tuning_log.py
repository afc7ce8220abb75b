"""measurements.jsonl: a line for everything that was found out, written at once and never lost."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.tuning_plan import MEASUREMENTS

OK = "ok"


@dataclass(frozen=True)
class Chain:
    """choice: the kernel of each task in the fastest chain of a bucket; seconds: that chain's, and
    before: that of the rule's kernels, in the same run."""

    choice: dict[str, str]
    seconds: float
    before: float


@dataclass
class Measurements:
    """What is known of a plan's kernels on one device.

    device: name, clocks and so on, and `gbs`, the measured ceiling; twins: by task, whether the
    rule's kernel is right; alone: by task and function, the status ("ok", "wrong", "failed",
    "crashed", "timeout") and seconds; chains: by bucket.
    """

    path: Path
    device: dict[str, Any] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)
    alone: dict[str, dict[str, tuple[str, float]]] = field(default_factory=dict)
    chains: dict[str, Chain] = field(default_factory=dict)

    def add(self, line: dict[str, Any]) -> None:
        """Take a line in and append it to the file."""
        self._take(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")

    def _take(self, line: dict[str, Any]) -> None:
        what = line["what"]
        if what == "device":
            self.device = {k: v for k, v in line.items() if k != "what"}
        elif what == "twin":
            self.twins[line["task"]] = line["status"]
        elif what == "chain":
            chain = Chain(line["choice"], line["seconds"], line["before"])
            self.chains[line["bucket"]] = chain
        else:
            found = self.alone.setdefault(line["task"], {})
            found[line["function"]] = (line["status"], line.get("seconds", 0.0))

    def seconds(self, task: str) -> dict[str, float]:
        """Seconds alone of every kernel of a task that works; none where the rule's is wrong."""
        if self.twins.get(task) != OK:
            return {}
        found = self.alone.get(task, {})
        return {name: seconds for name, (status, seconds) in found.items() if status == OK}


def open_measurements(directory: Path, resume: bool) -> Measurements:
    """The measurements of a plan's folder: none yet, or with `resume` those that are there.

    Raises `UsageError` where there are some and nobody asked to go on.
    """
    found = Measurements(directory / MEASUREMENTS)
    if not found.path.exists():
        return found
    if not resume:
        raise UsageError(
            f"{found.path} is there already: add --resume to go on, or remove it to begin again"
        )
    return read_measurements(directory)


def read_measurements(directory: Path) -> Measurements:
    """What stands in the folder's file. A last line that was cut short is left out, and dropped
    from the file.

    Raises `BitMTPError` for any other damage, and where nothing was measured.
    """
    found = Measurements(directory / MEASUREMENTS)
    try:
        text = found.path.read_bytes().decode()
    except FileNotFoundError:
        raise BitMTPError(
            f"{directory} holds no {MEASUREMENTS}: measure it first with tune --measure {directory}"
        ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise BitMTPError(f"{found.path} cannot be read: {fault}") from fault
    whole, _, torn = text.rpartition("\n")
    for number, line in _lines(whole):
        try:
            found._take(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError) as fault:
            raise BitMTPError(f"line {number} of {found.path} is damaged: remove it") from fault
    if torn:
        found.path.write_text(f"{whole}\n" if whole else "")
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    return ((i, line) for i, line in enumerate(text.splitlines(), start=1) if line)
