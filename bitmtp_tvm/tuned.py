"""Applies one device's records: what every kernel is made with, and where that comes from."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target as TVMTarget

from bitmtp_tvm.cards import card_of
from bitmtp_tvm.databases import first_line, read_database, recorded_decisions
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.manifest import KernelRecord
from bitmtp_tvm.records import (
    DEVICE,
    FIXED,
    MEASURED,
    RULE,
    TEMPLATES,
    TRANSFERRED,
    Key,
    Record,
    Records,
)
from bitmtp_tvm.targets import Target
from schedules import rule
from schedules.sampled import Sampled
from schedules.space import LARGE_CARD, Card, Choice, Template, has_choice, ruled
from schedules.workload import Workload

MOST_NAMES = 5
"""Kernels that one message names."""


@dataclass(frozen=True)
class Origin:
    """What a kernel is made with, in the terms of `manifest.KernelRecord`."""

    provenance: str = FIXED
    source: str = ""
    template: str = ""
    arguments: dict[str, int] = field(default_factory=dict)


class Tuned:
    """The records of a folder, on behalf of one target.

    A record that fits no more (an unknown template or argument, a tile or decision that the kernel
    refuses) is an error: whoever has records wants them used.
    """

    def __init__(
        self,
        records: Records | None = None,
        database: ms.database.Database | None = None,
        target: str = "",
        card: Card = LARGE_CARD,
    ):
        self.records = records or Records(Path())
        self.database = ms.database.MemoryDatabase() if database is None else database
        self.target = target
        self.card = card

    @classmethod
    def open(cls, folder: Path, target: Target) -> "Tuned":
        """What `folder` holds; a folder that does not exist holds nothing. `BitMTPError` for
        damaged files, and for MetaSchedule's without a `device.json`."""
        records, database = Records.read(folder), read_database(folder)
        if len(database) and records.device is None:
            raise BitMTPError(
                f"{folder} has no {DEVICE} to say where its schedules were measured: tune again"
            )
        return cls(records, database, target.name, card_of(target))

    def schedule(
        self, func: tirx.PrimFunc, target: TVMTarget
    ) -> tuple[tirx.PrimFunc | None, Origin]:
        """The scheduled form of a specialised PrimFunc, None where no rule knows it.

        Raises `BitMTPError` for a record that does not fit.
        """
        origin, used = Origin(), False

        def pick(work: Workload, templates: Sequence[Template], card: Card) -> Choice | None:
            nonlocal origin, used
            record = next(iter(self.records.of(Key.of(work, card))), None)
            used = record is not None
            choice = (
                self._chosen(record, templates, work) if record else ruled(templates, work, card)
            )
            if choice:
                plain = RULE if has_choice(templates, work, card) else FIXED
                provenance, source = self._provenance(record) if record else (plain, "")
                origin = Origin(provenance, source, choice.template.name, choice.arguments())
            return choice

        def decide(operation: Sampled) -> dict[str, int]:
            nonlocal origin, used
            folder = self.records.folder
            found = recorded_decisions(self.database, operation, target, folder)
            used = found is not None
            origin = self._decided(operation, found)
            return origin.arguments

        try:
            made = rule.apply(func, target, self.card, pick, decide)
        except BitMTPError:
            raise
        except Exception as fault:
            if not used:
                raise
            raise BitMTPError(
                f"{self.records.folder} has a record for {func.attrs['bitmtp.op']} that its kernel "
                f"refuses ({origin.template} {origin.arguments}: {first_line(fault)}): tune again"
            ) from fault
        return made, origin

    def _chosen(self, record: Record, templates: Sequence[Template], work: Workload) -> Choice:
        """The choice that a record names."""
        by_name = {template.name: template for template in templates}
        template = by_name.get(record.template)
        if template is None:
            known = ", ".join(by_name)
            raise self._misfit(record, f"the template {record.template} is none of {known}")
        names = {field.name for field in fields(template.tile)}
        odd = sorted(names ^ set(record.arguments))
        if odd:
            raise self._misfit(record, f"{odd[0]} is a missing or unknown argument")
        if not template.serves(work, self.card):
            raise self._misfit(record, f"{record.template} does not serve it")
        tile: Any = template.tile(**record.arguments)
        return Choice(template, tile)

    def _misfit(self, record: Record, fault: str) -> BitMTPError:
        path = self.records.folder / TEMPLATES
        return BitMTPError(f"{path} does not fit {record.key} any more ({fault}): tune again")

    def _provenance(self, record: Record) -> tuple[str, str]:
        """A record that was measured somewhere else is no measurement of this target."""
        if record.provenance == MEASURED and record.source != self.target:
            return TRANSFERRED, record.source
        return record.provenance, record.source

    def _decided(self, operation: Sampled, found: dict[str, int] | None) -> Origin:
        _, own = operation.schedule()
        if found is None:
            return Origin(RULE if operation.is_open() else FIXED, arguments=own.made)
        assert self.records.device
        source = self.records.device.target
        return Origin(MEASURED if source == self.target else TRANSFERRED, source, "", found)


def require_tuned(kernels: Sequence[KernelRecord], target: str) -> None:
    """Raise `BitMTPError` unless every kernel was measured on `target` or has nothing to choose."""
    missing = [kernel.name for kernel in kernels if kernel.provenance not in (MEASURED, FIXED)]
    if missing:
        names = ", ".join(missing[:MOST_NAMES]) + (", …" if len(missing) > MOST_NAMES else "")
        raise BitMTPError(
            f"{len(missing)} of {len(kernels)} kernels were not measured on {target} ({names}): "
            "tune them, or leave out --require-tuned"
        )
