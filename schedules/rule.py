"""From a stamped operation and a target kind to its schedule."""

from collections.abc import Callable, Sequence

import tvm
from tvm import tirx

from schedules import cpu, gpu
from schedules.parsing import quick_frames
from schedules.space import LARGE_CARD, Card, Choice, Template, ruled
from schedules.workload import Workload, read, scheduled

Rule = Callable[[tirx.PrimFunc, Workload, tvm.target.Target], tirx.PrimFunc | None]
Pick = Callable[[Workload, Sequence[Template], Card], Choice | None]

RULES: dict[str, dict[str, Rule]] = {"llvm": cpu.RULES, "cuda": gpu.RULES}
TEMPLATES: dict[str, dict[str, Sequence[Template]]] = {"llvm": {}, "cuda": gpu.TEMPLATES}


def apply(
    func: tirx.PrimFunc,
    target: tvm.target.Target,
    card: Card = LARGE_CARD,
    pick: Pick = lambda work, templates, card: ruled(templates, work, card),
) -> tirx.PrimFunc | None:
    """The scheduled form of a specialised PrimFunc, with its signature and stamp, or None where the
    operation is not ours.

    `pick` chooses among the templates of an operation that has some. Raises ValueError for a shape
    that the rule does not serve.
    """
    work = read(func)
    templates = TEMPLATES.get(target.kind.name, {}).get(work.op)
    rule = RULES.get(target.kind.name, {}).get(work.op)
    with quick_frames():
        if templates:
            choice = pick(work, templates, card)
            made = choice and choice.template.make(work, choice.tile, target)
        else:
            made = rule and rule(func, work, target)
    return scheduled(made, func) if made else None
