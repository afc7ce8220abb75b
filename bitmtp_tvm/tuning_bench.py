"""The kernels of a plan on the device at hand: their buffers, their results, their times."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.timing import Call, Timer
from bitmtp_tvm.tuning_fixed import FIXED, fixed_inputs
from bitmtp_tvm.tuning_inputs import Inputs, Results, is_right, joined, make_inputs
from bitmtp_tvm.tuning_plan import Task, TuningPlan

# Weights in turn until none is in a cache any more.
CACHES = 2.5
LEAST_CALLS = 24
MOST_COPIES = 256
HOST_CACHE = 32 << 20
MEMORY_SHARE = 0.6

Tensors = tuple[Any, ...]


class Workbench:
    """Loaded kernels with arguments. Weights stand in as many copies as a stack of layers has, so
    that nothing is read from a cache that a model would read from memory."""

    def __init__(
        self, plan: TuningPlan, directory: Path, device: Any, timer: Timer, free: int, l2_bytes: int
    ) -> None:
        """`device`: TVM's; `free`: bytes of its memory that may be used; `l2_bytes`: its cache."""
        import tvm

        self._runtime = tvm.runtime
        self._plan, self._directory = plan, directory
        self._device, self._timer = device, timer
        self._cache = l2_bytes or HOST_CACHE
        self._libraries: dict[str, Any] = {}
        self._weights: dict[str, list[Tensors]] = {}
        self._inputs: dict[str, Inputs] = {}
        self._others: dict[str, dict[int, Any]] = {}
        self._expected: dict[str, bytes] = {}
        self._ran: set[str] = set()
        # Names of weights that a fixed kernel may have written: keys and values go into a cache.
        self._written: set[str] = set()
        self._scale = self._fitting(free * MEMORY_SHARE)

    def _fitting(self, room: float) -> float:
        """The part of the wanted copies for which there is memory."""
        sizes = {weights_name(t): t.weight_bytes * self._wanted(t) for t in self._plan.tasks}
        return min(1.0, room / max(1, sum(sizes.values())))

    def _wanted(self, task: Task) -> int:
        """Copies of its weights that a task would like to have: a layer's each, and no cached."""
        same = [t for t in self._plan.tasks if weights_name(t) == weights_name(task)]
        layers = max(max(t.counts.values(), default=1) for t in same)
        uncached = -(-int(CACHES * self._cache) // max(1, task.weight_bytes))
        return max(2, min(MOST_COPIES, max(layers, uncached)))

    def is_rule_right(self, task: Task) -> bool:
        """Whether the rule's kernel agrees with the numpy twin; keeps its result for the others.
        A fixed one is compared with nothing: it is what compile makes."""
        got = self.run(task, task.candidates[0].function)
        if task.fixed:
            return True
        self._expected[task.name] = joined(got)
        return is_right(self._input(task), got)

    def is_same(self, task: Task, function: str) -> bool:
        """Whether a kernel gives the rule's results, bit for bit."""
        if task.fixed:
            return True
        if task.name not in self._expected:
            self.is_rule_right(task)
        return joined(self.run(task, function)) == self._expected[task.name]

    def run(self, task: Task, function: str) -> Results:
        """What a kernel makes of the task's inputs."""
        arguments = self._arguments(task, 0)
        if not task.fixed:
            self._restore(task)
        results = self._input(task).results
        # So that what a kernel leaves out is seen.
        for place in range(-results, 0):
            arguments[place].copyfrom(self._input(task).arguments[place])
        self._function(task, function)(*arguments)
        self._timer.sync()
        self._ran.add(function)
        return [result.numpy() for result in arguments[len(arguments) - results :]]

    def _restore(self, task: Task) -> None:
        name = weights_name(task)
        if name in self._written:
            for place, tensor in zip(task.constants, self._copies(task)[0], strict=True):
                tensor.copyfrom(self._input(task).arguments[place])
            self._written.remove(name)

    def alone(self, task: Task, function: str) -> float:
        """Seconds of one launch, behind launches of the same kernel on other weights."""
        copies = len(self._copies(task))
        uncached = -(-int(CACHES * self._cache) // max(1, task.weight_bytes))
        count = max(LEAST_CALLS, min(copies, uncached))
        calls = [self._call(task, function, i % copies) for i in range(count)]
        return self._timer.seconds(calls) / count

    def chain(self, bucket: str, choice: Mapping[str, str]) -> float:
        """Seconds of all tasks of a bucket in their order; `choice`: the kernel of each task that
        is searched."""
        names = self._plan.buckets[bucket]
        tasks = map(self._plan.task, dict.fromkeys(names))
        chosen = {t.name: choice.get(t.name, t.candidates[0].function) for t in tasks}
        for name, function in chosen.items():
            # A kernel's first launch loads it, which no timing and no graph should hold.
            if function not in self._ran:
                self.run(self._plan.task(name), function)
        return self._timer.seconds(self._chain(names, chosen))

    def _chain(self, names: Sequence[str], choice: Mapping[str, str]) -> list[Call]:
        calls, used = [], dict.fromkeys(names, 0)
        for name in names:
            task = self._plan.task(name)
            copy = used[name] % len(self._copies(task))
            calls.append(self._call(task, choice[name], copy))
            used[name] += 1
        return calls

    def _call(self, task: Task, function: str, copy: int) -> Call:
        return partial(self._function(task, function), *self._arguments(task, copy))

    def _arguments(self, task: Task, copy: int) -> list[Any]:
        if task.fixed:
            self._written.add(weights_name(task))
        weights = dict(zip(task.constants, self._copies(task)[copy], strict=True))
        others = self._variables(task)
        return [weights[i] if i in weights else others[i] for i in range(len(task.shapes))]

    def _variables(self, task: Task) -> dict[int, Any]:
        if task.name not in self._others:
            arrays = enumerate(self._input(task).arguments)
            self._others[task.name] = {
                i: self._tensor(array) for i, array in arrays if i not in task.constants
            }
        return self._others[task.name]

    def _copies(self, task: Task) -> list[Tensors]:
        name = weights_name(task)
        if name not in self._weights:
            arrays = [self._input(task).arguments[i] for i in task.constants]
            count = max(2, int(self._wanted(task) * self._scale))
            self._weights[name] = [tuple(map(self._tensor, arrays)) for _ in range(count)]
        return self._weights[name]

    def _tensor(self, array: np.ndarray) -> Any:
        return self._runtime.tensor(np.ascontiguousarray(array), self._device)

    def _input(self, task: Task) -> Inputs:
        if task.name not in self._inputs:
            make = (
                fixed_inputs(task) if task.key.op in FIXED else make_inputs(task, self._plan.kind)
            )
            self._inputs[task.name] = make
        return self._inputs[task.name]

    def _function(self, task: Task, function: str) -> Any:
        (library,) = [c.library for c in task.candidates if c.function == function]
        if library not in self._libraries:
            try:
                path = self._directory / library
                self._libraries[library] = self._runtime.load_module(str(path))
            except RuntimeError as fault:
                raise BitMTPError(f"{library} cannot be loaded: {fault}") from fault
        return self._libraries[library][function]


def weights_name(task: Task) -> str:
    """Equal for tasks whose weights are the same arrays."""
    key = task.key
    op = key.op.removeprefix("norm_").removeprefix("quantize_")
    shapes = [task.shapes[i] for i in task.constants]
    names = [task.names[i] for i in task.constants if task.names]
    if names in (["cache"], ["table"]):
        return f"{names[0]} {shapes}"
    return f"{op} {key.format} {task.settings.get('segments')} {shapes}"
