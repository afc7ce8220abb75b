"""The process that runs candidates, so that one that breaks the device takes nothing else with it.

    python -m bitmtp_tvm.tuning_worker DIR

Each line on stdin is a job, each line on stdout its answer, both JSON; it ends with its stdin, and
when the device answers no more.
"""

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from bitmtp_tvm.device import read_device, read_host
from bitmtp_tvm.device_state import device_state
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.libraries import load_tvm_cuda
from bitmtp_tvm.streaming import read_bandwidth
from bitmtp_tvm.targets import get_target
from bitmtp_tvm.threads import usable_cores, use_cores
from bitmtp_tvm.timing import Timer, make_timer
from bitmtp_tvm.tuning_bench import Workbench
from bitmtp_tvm.tuning_plan import TuningPlan, read_plan

OK, WRONG, FAILED = "ok", "wrong", "failed"
BROKEN_DEVICE = 3
"""Exit code after a failure that the device did not survive."""


class Worker:
    """Does jobs on the device at hand: `{"do": "device" | "twin" | "alone" | "chain", …}`."""

    def __init__(self, plan: TuningPlan, directory: Path) -> None:
        """Raises `BitMTPError` where there is no device of the plan's kind."""
        target = get_target(plan.target)
        if target.kind == "cuda":
            load_tvm_cuda()
        import tvm

        if target.kind == "llvm":
            use_cores()
        self._plan, self._target = plan, target
        self._device: Any = tvm.cuda(0) if target.kind == "cuda" else tvm.cpu(0)
        facts = read_device() if target.kind == "cuda" else read_host()
        if facts.compute_capability != target.compute_capability:
            found = ".".join(map(str, facts.compute_capability or ()))
            raise BitMTPError(
                f"the kernels are for {target.description} ({target.arch}), but {facts.name} has "
                f"compute capability {found}: build them for the card at hand"
            )
        # The context that the timer's stream belongs to.
        self._first = tvm.runtime.empty((1,), "int32", self._device)
        self.timer: Timer = make_timer(target.kind, self._device)
        self._bench = Workbench(
            plan, directory, self._device, self.timer, facts.free, target.l2_bytes
        )

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to one job."""
        if job["do"] == "device":
            rate = read_bandwidth(
                self._target.kind, self._device, self.timer, self._target.l2_bytes
            )
            state = device_state(self._target.kind)
            date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
            return {"gbs": rate, "state": state, "cores": self._cores(), "date": date}
        if job["do"] == "chain":
            return {"status": OK, "seconds": self._bench.chain(job["bucket"], job["choice"])}
        task = self._plan.task(job["task"])
        if job["do"] == "twin":
            return {"status": OK if self._bench.is_rule_right(task) else WRONG}
        if not self._bench.is_same(task, job["function"]):
            return {"status": WRONG}
        return {"status": OK, "seconds": self._bench.alone(task, job["function"])}

    def _cores(self) -> int:
        """Multiprocessors, of a processor its cores."""
        if self._target.kind == "cuda":
            return int(self._device.multi_processor_count)
        return len(usable_cores())


def serve(worker: Any, jobs: TextIO, answers: TextIO) -> int:
    """Answer jobs line by line; returns the exit code."""
    for line in jobs:
        try:
            answer = worker.do(json.loads(line))
        except Exception as fault:
            answer = {"status": FAILED, "fault": " ".join(str(fault).split())[:300]}
        print(json.dumps(answer), file=answers, flush=True)
        if answer.get("status") == FAILED and not _alive(worker):
            return BROKEN_DEVICE
    return 0


def _alive(worker: Any) -> bool:
    try:
        worker.timer.sync()
    except Exception:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Serve the folder's plan on stdin and stdout."""
    (directory,) = sys.argv[1:] if argv is None else argv
    # Libraries print to stdout as they please: the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        worker = Worker(read_plan(Path(directory)), Path(directory))
    except BitMTPError as fault:
        print(json.dumps({"status": FAILED, "fault": str(fault)}), file=answers, flush=True)
        return 1
    print(json.dumps({"status": OK}), file=answers, flush=True)
    return serve(worker, sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main())
