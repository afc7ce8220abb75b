"""Ranks candidates by what was measured elsewhere, and writes records for cards that nobody has."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bitmtp_tvm.cost_model import CostModel, Sample, learnt_from
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.records import MEASURED, RULE, TRANSFERRED, Record, Records, tuning_folder
from bitmtp_tvm.targets import TARGETS, Target
from bitmtp_tvm.tuning_build import Built, Wanted
from bitmtp_tvm.tuning_tasks import Found
from schedules.space import Choice

LIKELIEST = 3
"""Choices of a task that are built, best first, until one does not spill."""


def all_measured(folders: Mapping[str, Path] | None = None) -> list[tuple[Record, Target]]:
    """Every measured record of every device folder, with the target that it was measured on."""
    found = []
    for name in TARGETS:
        folder = (folders or {}).get(name, tuning_folder(name))
        for records in Records.read(folder).by_key.values():
            found += [
                (record, TARGETS[record.source])
                for record in records
                if record.provenance == MEASURED and record.source in TARGETS
            ]
    return found


def ranked(found: Found, target: Target, model: CostModel | None) -> list[Choice]:
    """A task's choices: the rule's first, then those that the model expects to be fastest; without
    a model in the order of the templates."""
    first, *others = found.choices
    if model and others:
        seconds = model.seconds([sample(found, choice, target) for choice in others])
        order = sorted(range(len(others)), key=lambda i: seconds[i])
        others = [others[i] for i in order]
    return [first, *others]


def sample(found: Found, choice: Choice, target: Target) -> Sample:
    """A choice as the cost model sees it."""
    return Sample(found.task.key, choice.template.name, choice.arguments(), target)


def learn(folders: Mapping[str, Path] | None = None, source: str | None = None) -> CostModel:
    """The model of all measured records, or of those of one device.

    Raises `BitMTPError` where they are too few.
    """
    records = all_measured(folders)
    if source is not None:
        records = [item for item in records if item[0].source == source]
    return CostModel.fit(learnt_from(records))


def predict(
    found: Sequence[Found],
    target: Target,
    source: str,
    model: CostModel,
    folder: Path,
    builds: Callable[[Sequence[Wanted]], Sequence[Built]],
) -> int:
    """Write into `folder` a record for every task: the choice that a model learnt from `source`
    ranks first on `target`, of those that can be built for it without spills (`builds` tells).
    Returns how many they are.

    Nobody has measured them: their provenance is "transferred" between cards of one compute
    capability and "rule" otherwise, and what was measured on the target stays.
    """
    relative = TARGETS[source].compute_capability == target.compute_capability
    provenance = TRANSFERRED if relative else RULE
    records, written = Records.read(folder), 0
    open_tasks = [item for item in found if not _is_measured(records, item, target)]
    wanted = [w for item in open_tasks for w in _likeliest(item, target, model)]
    built = [item for item in builds(wanted) if item.candidate is not None]
    for item in open_tasks:
        mine = [b.wanted for b in built if b.wanted.task.name == item.task.name]
        if mine:
            best = mine[0]
            arguments = dict(best.arguments)
            records.put([Record(item.task.key, best.template, arguments, None, provenance, source)])
            written += 1
    records.write(folder, None)
    return written


def _is_measured(records: Records, found: Found, target: Target) -> bool:
    known = records.of(found.task.key)
    return bool(known) and (known[0].provenance, known[0].source) == (MEASURED, target.name)


def _likeliest(found: Found, target: Target, model: CostModel) -> list[Wanted]:
    """The few choices that the model ranks first, of the rule's template.

    Which template serves how many rows is for the rule: of those that lose there are hardly any
    records, and the model would take them for as fast as those that won elsewhere.
    """
    choices = [c for c in found.choices if c.template is found.choices[0].template]
    seconds = model.seconds([sample(found, choice, target) for choice in choices])
    order = sorted(range(len(choices)), key=lambda i: seconds[i])[:LIKELIEST]
    return [
        Wanted(found.task, choices[i].template.name, choices[i].arguments(), rule=False)
        for i in order
    ]


def check_source(source: str, target: Target) -> None:
    """Raise `UsageError` where `source` is no device to learn from."""
    if source not in TARGETS or TARGETS[source].kind != target.kind:
        known = [name for name, other in TARGETS.items() if other.kind == target.kind]
        raise UsageError(f"--from {source} is no device of that kind: one of {', '.join(known)}")
    if source == target.name:
        raise UsageError(f"--from {source} is the target itself, whose records are measured")


def check_learnt(source: str, folder: Path) -> None:
    """Raise `BitMTPError` where nothing was measured on `source`."""
    if not any(
        r.provenance == MEASURED for found in Records.read(folder).by_key.values() for r in found
    ):
        raise BitMTPError(f"{folder} holds nothing measured: tune {source} first")
