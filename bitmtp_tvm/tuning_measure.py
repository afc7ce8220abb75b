"""`tune --measure`: every candidate alone, then the chain of every bucket, while there is time."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bitmtp_tvm.cli import check_stopped
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.targets import get_target
from bitmtp_tvm.tuning_chain import Descent, descend, shortlist
from bitmtp_tvm.tuning_log import OK, Measurements
from bitmtp_tvm.tuning_plan import Task, TuningPlan
from bitmtp_tvm.tuning_process import Asked

CHAIN_SECONDS = 3.0
"""What is kept of the time for each bucket's chain."""

Say = Callable[[str, int], None]
"""Told what is going on and how many more candidates are done."""


@dataclass
class Measuring:
    """One run over a plan: what there is to ask, and what is known already."""

    plan: TuningPlan
    worker: Asked
    known: Measurements
    deadline: float = math.inf
    clock: Callable[[], float] = time.monotonic
    say: Say = field(default=lambda text, done: None)
    chains: bool = True

    def run(self) -> Measurements:
        """Measure what is not known; stops at the deadline, with what there is.

        Raises `BitMTPError` where there is no device, and where no time was left for anything.
        """
        try:
            self._device()
            reserve = CHAIN_SECONDS * len(self.plan.buckets) if self.chains else 0.0
            for task, function in self._order():
                check_stopped()
                if self.clock() > self.deadline - reserve:
                    break
                self._alone(task, function)
            self._check()
            for bucket in self.plan.buckets if self.chains else ():
                if self.clock() > self.deadline:
                    break
                self._chain(bucket)
        finally:
            self.worker.close()
        return self.known

    def _device(self) -> None:
        answer = self.worker.ask({"do": "device"})
        if "state" not in answer:
            raise BitMTPError(f"the device does not work: {answer.get('fault', answer['status'])}")
        name = answer["state"].get("device", "")
        before = self.known.device.get("state", {}).get("device", name)
        if name != before:
            raise UsageError(
                f"{self.known.path} is of {before}, and this is {name}: measure in another folder"
            )
        if get_target(self.plan.target).kind == "cuda":
            check_card(self.plan, answer)
        self.known.add({"what": "device", **answer})

    def _order(self) -> Iterator[tuple[Task, str]]:
        """The likeliest candidates of all tasks first, tasks with much of a step before others."""
        rate = self.known.device["gbs"]
        tasks = sorted(
            [task for task in self.plan.tasks if self.chains or not task.fixed],
            key=lambda t: -sum(t.counts.values()) * (1e-6 + t.floor(rate)),
        )
        most = max((len(task.candidates) for task in tasks), default=0)
        for place in range(most):
            for task in tasks:
                if place < len(task.candidates):
                    yield task, task.candidates[place].function

    def _alone(self, task: Task, function: str) -> None:
        if task.name not in self.known.twins:
            answer = self.worker.ask({"do": "twin", "task": task.name})
            self.known.add({"what": "twin", "task": task.name, **answer})
        done = function in self.known.alone.get(task.name, {})
        if self.known.twins[task.name] == OK and not done:
            answer = self.worker.ask({"do": "alone", "task": task.name, "function": function})
            line = {"what": "alone", "task": task.name, "function": function, **answer}
            self.known.add(line)
        self.say(self._standing(task), 1)

    def _standing(self, task: Task) -> str:
        """A task's best so far against the ceiling."""
        seconds = self.known.seconds(task.name)
        if not seconds:
            return f"{task.name}: none works"
        best = min(seconds.values())
        share = task.floor(self.known.device["gbs"]) / best
        return f"{task.name}: {best * 1e6:.2f} us, {share:.0%} of the ceiling"

    def _check(self) -> None:
        if not any(self.known.seconds(task.name) for task in self.plan.searched):
            wrong = [name for name, status in self.known.twins.items() if status != OK]
            if wrong:
                raise BitMTPError(
                    f"the rule's kernel of {wrong[0]} does not agree with the reference "
                    f"({self.known.twins[wrong[0]]}), and nothing else was measured"
                )
            raise BitMTPError("no time was left to measure anything: give more --minutes")

    def _chain(self, bucket: str) -> None:
        tasks = [self.plan.task(name) for name in dict.fromkeys(self.plan.buckets[bucket])]
        seconds = {task.name: self.known.seconds(task.name) for task in tasks}
        searched = [task for task in tasks if not task.fixed]
        if bucket in self.known.chains or not searched or not all(seconds.values()):
            return
        self.say(f"chain of {bucket}", 0)
        found = search(bucket, searched, seconds, self.worker)
        if math.isfinite(found.seconds):
            self.known.add(
                {
                    "what": "chain",
                    "bucket": bucket,
                    "choice": found.choice,
                    "seconds": found.seconds,
                    "before": found.before,
                    "tried": found.tried,
                }
            )


def search(
    bucket: str, tasks: list[Task], seconds: dict[str, dict[str, float]], worker: Asked
) -> Descent:
    """The fastest chain of a bucket; `tasks`: those that are searched; `seconds`: of each task's
    kernels alone."""
    # What weighs most is settled first.
    tasks = sorted(tasks, key=lambda t: -t.counts[bucket] * min(seconds[t.name].values()))
    rule = {task.name: task.candidates[0].function for task in tasks}
    # What compile takes now, so that tuning again makes no step slower.
    current = {
        task.name: task.current if task.current in seconds[task.name] else rule[task.name]
        for task in tasks
    }
    tops = {name: shortlist(seconds[name], [rule[name], current[name]]) for name in rule}
    best = {name: names[0] for name, names in tops.items()}

    def measure(choice: dict[str, str]) -> float:
        check_stopped()
        answer: dict[str, Any] = worker.ask({"do": "chain", "bucket": bucket, "choice": choice})
        return answer["seconds"] if answer["status"] == OK else math.inf

    return descend(tops, [rule, current, best], measure)


def check_card(plan: TuningPlan, answer: dict[str, Any]) -> None:
    """Raise `BitMTPError` where the card at hand is not the one that the plan is for.

    Cards of one architecture run the same kernels; the number of multiprocessors tells them apart.
    """
    target = get_target(plan.target)
    if answer["cores"] != target.multiprocessors:
        name = answer["state"].get("device", "the GPU")
        raise BitMTPError(
            f"{name} has {answer['cores']} multiprocessors, and --target {plan.target} is "
            f"{target.description} with {target.multiprocessors}: build for the card at hand"
        )
