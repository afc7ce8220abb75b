"""From a stamped operation and a target kind to its schedule."""

from collections.abc import Callable, Mapping, Sequence

import tvm
from tvm import tirx

from schedules import cpu, gpu
from schedules.parsing import quick_frames
from schedules.sampled import Sampled, Space, sampled
from schedules.space import LARGE_CARD, Card, Choice, Template, ruled
from schedules.workload import Workload, read, scheduled

Rule = Callable[[tirx.PrimFunc, Workload, tvm.target.Target], tirx.PrimFunc | None]
Pick = Callable[[Workload, Sequence[Template], Card], Choice | None]
Decide = Callable[[Sampled], Mapping[str, int]]

RULES: dict[str, Mapping[str, Rule | Space]] = {"llvm": cpu.RULES, "cuda": gpu.RULES}
TEMPLATES: dict[str, Mapping[str, Sequence[Template]]] = {"llvm": {}, "cuda": gpu.TEMPLATES}


def apply(
    func: tirx.PrimFunc,
    target: tvm.target.Target,
    card: Card = LARGE_CARD,
    pick: Pick = lambda work, templates, card: ruled(templates, work, card),
    decide: Decide = lambda operation: {},
) -> tirx.PrimFunc | None:
    """The scheduled form of a specialised PrimFunc, with its signature and stamp, or None where the
    operation is not ours.

    `pick` chooses among the templates of an operation that has some, `decide` what a schedule space
    leaves open: what it does not name is the rule's. Raises ValueError for a shape that the rule
    does not serve.
    """
    work = read(func)
    templates = TEMPLATES.get(target.kind.name, {}).get(work.op)
    rule = RULES.get(target.kind.name, {}).get(work.op)
    with quick_frames():
        made: tirx.PrimFunc | None
        if templates:
            choice = pick(work, templates, card)
            made = choice and choice.template.make(work, choice.tile, target)
        elif isinstance(rule, Space):
            operation = sampled(func, work, rule, target)
            made = operation and operation.function(decide(operation))
        else:
            made = rule and rule(func, work, target)
    return scheduled(made, func) if made else None


def operation_of(func: tirx.PrimFunc, target: tvm.target.Target) -> Sampled | None:
    """The specialised PrimFunc as a schedule space serves it; None where none does."""
    work = read(func)
    rule = RULES.get(target.kind.name, {}).get(work.op)
    with quick_frames():
        return sampled(func, work, rule, target) if isinstance(rule, Space) else None
