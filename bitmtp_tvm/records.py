"""One device's tuning records: which template and tile a kernel gets, and where that comes from.

A folder a device, `tuning_logs/<target>`: `templates.json` holds the records of this module,
`device.json` what they were measured on, and MetaSchedule's two files stand beside them
(bitmtp_tvm/databases.py). No compiler is needed to read or write these two.
"""

import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.manifest import decode

if TYPE_CHECKING:
    from bitmtp_tvm.targets import Target
    from schedules.space import Card
    from schedules.workload import Workload

FORMAT_VERSION = 1
TEMPLATES = "templates.json"
DEVICE = "device.json"

MEASURED, TRANSFERRED, RULE, FIXED = "measured", "transferred", "rule", "fixed"
"""Provenance of a kernel: measured on this device, or on a relative; never measured; nothing to
choose. Records are of the first three."""


def tuning_folder(target_name: str) -> Path:
    """Where this installation keeps the records of a target: `tuning_logs` lies beside the
    packages, in a clone and in a wheel alike."""
    return Path(__file__).parents[1] / "tuning_logs" / target_name


def records_folder(target: "Target", given: Path | None) -> Path:
    """The folder that a command was given, which must be there, or that of the target."""
    if given is not None and not given.is_dir():
        raise UsageError(f"--records {given} is no folder")
    return given or tuning_folder(target.name)


@dataclass(frozen=True, order=True)
class Key:
    """What a record is about; the device is the folder's.

    op, format: as the kernel is stamped, format "" where the operation has none, and that of the
    weights around it for attention; n, k: elements of one row of the last result and of the first
    input (outputs and inputs of a matrix, k padded), 0 where those have no rows; overlap:
    programmatic dependent launch.
    """

    op: str
    format: str
    n: int
    k: int
    width: int
    residual: bool
    overlap: bool

    @classmethod
    def of(cls, work: "Workload", card: "Card") -> "Key":
        return cls(
            op=work.op,
            format=str(work.settings.get("format", "")),
            n=_row(work.shapes[-1]),
            k=_row(work.shapes[0]),
            width=work.width,
            residual=bool(work.settings.get("residual", False)),
            overlap=card.overlaps,
        )

    def __str__(self) -> str:
        parts = [self.op, self.format, f"{self.n}x{self.k}", f"width {self.width}"]
        parts += ["residual"] * self.residual + ["overlap"] * self.overlap
        return " ".join(part for part in parts if part)


def _row(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:]) if len(shape) > 1 else 0


@dataclass(frozen=True)
class Record:
    """A tile of a template, and what is known of it.

    seconds: of one launch, alone; None where never measured. source: the target that was measured,
    or that the ranking was learnt on; "" for a plain rule. chain_seconds: this kernel's share in
    the whole chain, where the chain decided.
    """

    key: Key
    template: str
    arguments: dict[str, int]
    seconds: float | None
    provenance: str
    source: str
    chain_seconds: float | None = None

    def fault(self) -> str:
        """What makes no sense about this record, or ""."""
        times = [t for t in (self.seconds, self.chain_seconds) if t is not None]
        if self.provenance not in (MEASURED, TRANSFERRED, RULE):
            return f"the provenance {self.provenance!r} is unknown"
        if not all(0 < t < math.inf for t in times):
            return "a time is not positive"
        if self.provenance != RULE and not self.source:
            return f"it is {self.provenance} and names no source"
        if self.provenance == MEASURED and self.seconds is None:
            return "it is measured and has no time"
        if self.key.width < 1 or min(self.key.n, self.key.k) < 0:
            return "a size is negative"
        return ""


@dataclass(frozen=True)
class DeviceInfo:
    """What a folder's records were measured on; "" or None for what is not known.

    target: as `--target` names it; device: the driver's name of it; clocks in MHz, power in watts;
    date: ISO 8601; commit: of this package's repository.
    """

    target: str
    device: str
    compute_capability: str = ""
    multiprocessors: int | None = None
    driver: str = ""
    toolkit: str = ""
    tvm: str = ""
    clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_limit_w: int | None = None
    power_mode: str = ""
    date: str = ""
    command: str = ""
    commit: str = ""
    notes: str = ""


@dataclass
class Records:
    """The records of one device: for every key the winner, then what else was measured."""

    folder: Path
    by_key: dict[Key, list[Record]] = field(default_factory=dict)
    device: DeviceInfo | None = None

    @classmethod
    def read(cls, folder: Path) -> "Records":
        """The records in `folder`; missing files are empty. Raises `BitMTPError` that names a
        damaged or foreign file."""
        found = cls(folder)
        data = read_object(folder / TEMPLATES)
        if data is not None:
            for record in _parsed(data, folder / TEMPLATES):
                found.by_key.setdefault(record.key, []).append(record)
        found.device = read_device_info(folder)
        return found

    def of(self, key: Key) -> list[Record]:
        """The winner first; [] where there is none. What is known of the operation in any company
        stands in for what is not known of it beside weights of a format."""
        found = self.by_key.get(key) or self.by_key.get(replace(key, format=""))
        return list(found or ())

    def put(self, records: Sequence[Record]) -> None:
        """Replace what is known of one key: the winner first. Raises ValueError for records of
        several keys, and for one that makes no sense."""
        if len({record.key for record in records}) != 1:
            raise ValueError("records of one key are put at a time")
        faults = [record.fault() for record in records if record.fault()]
        if faults:
            raise ValueError(f"{records[0].key}: {faults[0]}")
        self.by_key[records[0].key] = list(records)

    def prune(self, most: int) -> None:
        """Keep `most` of each key: the winner, and others from the fastest to the slowest."""
        for key, (winner, *others) in self.by_key.items():
            others.sort(key=lambda record: record.seconds or math.inf)
            room = min(max(most, 1) - 1, len(others))
            steps = [i * (len(others) - 1) // max(room - 1, 1) for i in range(room)]
            self.by_key[key] = [winner, *(others[step] for step in steps)]

    def write(self, folder: Path, device: DeviceInfo | None) -> None:
        """Put both files into `folder`, each whole or not at all; without `device` the
        `device.json` that is there stays. Raises `BitMTPError` where it cannot be written."""
        lines = [
            json.dumps(asdict(record), sort_keys=True)
            for key in sorted(self.by_key)
            for record in self.by_key[key]
        ]
        body = ",\n".join(lines)
        text = f'{{"format_version": {FORMAT_VERSION}, "records": [\n{body}\n]}}\n'
        replace_text(folder / TEMPLATES, text)
        if device is not None:
            write_device_info(folder, device)


def read_device_info(folder: Path) -> DeviceInfo | None:
    """What the records in `folder` were measured on; None where it does not say."""
    path = folder / DEVICE
    data = read_object(path)
    if data is None:
        return None
    try:
        info: DeviceInfo = decode(DeviceInfo, data, "device")
    except ValueError as fault:
        raise damaged(path, fault) from fault
    return info


def write_device_info(folder: Path, device: DeviceInfo) -> None:
    data = {"format_version": FORMAT_VERSION, **asdict(device)}
    replace_text(folder / DEVICE, json.dumps(data, indent=1) + "\n")


def damaged(path: Path, fault: object) -> BitMTPError:
    return BitMTPError(f"{path} is damaged ({fault}): remove it, or tune again")


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object of this format version in the file, without the version; None where there is
    no file."""
    try:
        data = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as fault:
        raise damaged(path, fault) from fault
    version = data.pop("format_version", None) if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise damaged(path, f"format version {version} instead of {FORMAT_VERSION}")
    return dict(data)


def _parsed(data: dict[str, Any], path: Path) -> list[Record]:
    if data.keys() != {"records"} or not isinstance(data["records"], list):
        raise damaged(path, "no list of records")
    found = []
    for number, item in enumerate(data["records"], start=1):
        try:
            record: Record = decode(Record, item, "record")
        except ValueError as fault:
            raise damaged(path, f"record {number}: {fault}") from fault
        if record.fault():
            raise damaged(path, f"record {number}: {record.fault()}")
        found.append(record)
    return found


def replace_text(path: Path, text: str) -> None:
    """Write a file beside its place and rename it; `BitMTPError` where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with open(handle, "w") as file:
                file.write(text)
            # mkstemp gives a file that its owner alone may read.
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be written: {fault.strerror}") from fault
