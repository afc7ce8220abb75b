"""Kernel templates and what of them can be tuned.

A template makes the kernel of an operation from a tile: a frozen dataclass of integers. What a tile
changes is speed alone. The results are the same bits for every tile, so that a tile can be chosen
for each width and device without a row's result depending on it.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import tvm
from tvm import tirx

from schedules.workload import Workload


@dataclass(frozen=True)
class Card:
    """The figures of a GPU that a tile is chosen by.

    bandwidth_gbs: 10^9 bytes a second; l2_bytes, shared_bytes (of one block): bytes; registers: of
    one multiprocessor; overlaps: whether kernels start while the one before still runs.
    """

    multiprocessors: int
    bandwidth_gbs: float
    l2_bytes: int
    shared_bytes: int
    registers: int
    overlaps: bool


LARGE_CARD = Card(132, 4800, 60 << 20, 227 << 10, 65536, overlaps=True)
"""What tiles are made for where no card is named: smaller ones have work for all as well."""


@dataclass(frozen=True)
class Template:
    """One way to make the kernel of an operation.

    name: as records call it; tile: the type of its tiles; serves: whether it can make a workload's
    kernel; choose: the tile of the rule, without any measurement; candidates: tiles worth
    measuring, the rule's among them; make: the kernel, scheduled, with the operation's signature.
    `make` raises ValueError for a tile that does not fit the workload.
    """

    name: str
    tile: type
    serves: Callable[[Workload, Card], bool]
    choose: Callable[[Workload, Card], Any]
    candidates: Callable[[Workload, Card], Iterable[Any]]
    make: Callable[[Workload, Any, tvm.target.Target], tirx.PrimFunc]


@dataclass(frozen=True)
class Choice:
    """A template, and the tile that it is filled with."""

    template: Template
    tile: Any

    def arguments(self) -> dict[str, int]:
        """The tile as records hold it."""
        return asdict(self.tile)


def choices(templates: Iterable[Template], work: Workload, card: Card) -> list[Choice]:
    """All that is worth measuring for a workload; the first is the rule's."""
    found: list[Choice] = []
    for template in templates:
        if template.serves(work, card):
            first = template.choose(work, card)
            others = [tile for tile in template.candidates(work, card) if tile != first]
            found += [Choice(template, tile) for tile in (first, *dict.fromkeys(others))]
    return found


def has_choice(templates: Iterable[Template], work: Workload, card: Card) -> bool:
    """Whether there is more than one way to make a workload's kernel."""
    serving = [template for template in templates if template.serves(work, card)]
    if len(serving) != 1:
        return len(serving) > 1
    first = serving[0].choose(work, card)
    return any(tile != first for tile in serving[0].candidates(work, card))


def ruled(templates: Iterable[Template], work: Workload, card: Card) -> Choice | None:
    """The rule's choice: the first template that serves, with the tile that it would choose."""
    template = next((t for t in templates if t.serves(work, card)), None)
    return template and Choice(template, template.choose(work, card))
