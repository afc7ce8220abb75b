"""Measures on a board that an RPC tracker knows: the kernels are built here and run there.

The board needs TVM's runtime and its RPC server alone. A kernel is timed by itself, by TVM's
evaluator: there is no chain of kernels.
"""

import datetime
import socket
from pathlib import Path
from typing import Any

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.targets import get_target
from bitmtp_tvm.tuning_inputs import Inputs, Results, is_right, joined, make_inputs
from bitmtp_tvm.tuning_plan import Task, TuningPlan

SESSION_SECONDS = 600
REQUEST_SECONDS = 30
LAUNCHES, REPEATS = 3, 10
INSTALL = "pip install -e '.[tune]' in the checkout of this package"

# What TVM calls to empty the caches in front of a run, by kind of device. Its runtime has nothing of
# that kind for CUDA: there weights that fit the L2 come from it.
FLUSH = {"cuda": "", "llvm": "cache_flush_cpu_non_first_arg"}

OK, WRONG, FAILED, CRASHED = "ok", "wrong", "failed", "crashed"


def parse_tracker(text: str) -> tuple[str, int]:
    """HOST:PORT; raises `UsageError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--rpc {text} is not HOST:PORT")
    return host, int(port)


class RpcWorker:
    """Answers the jobs of `bitmtp_tvm.tuning_worker`, but chains, on a device behind a tracker."""

    def __init__(self, plan: TuningPlan, directory: Path, tracker: tuple[str, int], key: str):
        self._plan, self._directory = plan, directory
        self._tracker, self._key = tracker, key
        self._kind = get_target(plan.target).kind
        self._session: Any = None
        self._libraries: dict[str, Any] = {}
        self._inputs: dict[str, Inputs] = {}
        self._arguments: dict[str, list[Any]] = {}
        self._expected: dict[str, bytes] = {}

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            self._session = connect(self._tracker, self._key)
        try:
            return self._do(job)
        except BitMTPError:
            raise
        except Exception as fault:
            # The server has a process for every session, so a new one begins afresh. Where the
            # process was killed the server gives up too: then the next question says so.
            self.close()
            return {"status": CRASHED, "fault": " ".join(str(fault).split())[-300:]}

    def _do(self, job: dict[str, Any]) -> dict[str, Any]:
        if job["do"] == "device":
            return self._facts()
        task = self._plan.task(job["task"])
        if job["do"] == "twin":
            got = self._run(task, task.candidates[0].function)
            return {"status": OK if is_right(self._input(task), got) else WRONG}
        if task.name not in self._expected:
            self._expected[task.name] = joined(self._run(task, task.candidates[0].function))
        if joined(self._run(task, job["function"])) != self._expected[task.name]:
            return {"status": WRONG}
        return {"status": OK, "seconds": self._seconds(task, job["function"])}

    def _device(self) -> Any:
        return self._session.device("cuda" if self._kind == "cuda" else "cpu", 0)

    def _facts(self) -> dict[str, Any]:
        device, target = self._device(), get_target(self._plan.target)
        if not device.exist:
            raise BitMTPError(f"the board behind {self._key} shows no {self._kind} device")
        name, cores = target.description, 0
        if self._kind == "cuda":
            name, cores = str(device.device_name), int(device.multi_processor_count)
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        # The ceiling is that of the data sheet: nothing here reads the board's memory alone.
        rate = target.bandwidth_gbs or 1.0
        return {"gbs": rate, "state": {"device": name}, "cores": cores, "date": date}

    def _run(self, task: Task, function: str) -> Results:
        arguments, given = self._tensors(task), self._input(task)
        for place in range(-given.results, 0):
            arguments[place].copyfrom(given.arguments[place])
        self._library(task, function)[function](*arguments)
        return [result.numpy() for result in arguments[-given.results :]]

    def _seconds(self, task: Task, function: str) -> float:
        timed = self._library(task, function).time_evaluator(
            function, self._device(), LAUNCHES, repeat=REPEATS, f_preproc=FLUSH[self._kind]
        )
        return float(timed(*self._tensors(task)).median)

    def _tensors(self, task: Task) -> list[Any]:
        import tvm

        if task.name not in self._arguments:
            # A board has little memory: the arguments of one task at a time.
            self._arguments = {
                task.name: [
                    tvm.runtime.tensor(array, self._device())
                    for array in self._input(task).arguments
                ]
            }
        return self._arguments[task.name]

    def _input(self, task: Task) -> Inputs:
        if task.name not in self._inputs:
            self._inputs = {task.name: make_inputs(task, self._kind)}
        return self._inputs[task.name]

    def _library(self, task: Task, function: str) -> Any:
        (name,) = [c.library for c in task.candidates if c.function == function]
        if name not in self._libraries:
            self._libraries[name] = upload_library(self._session, self._directory / name)
        return self._libraries[name]

    def close(self) -> None:
        self._libraries, self._arguments, self._expected = {}, {}, {}
        self._session = None


def connect(tracker: tuple[str, int], key: str) -> Any:
    """A session with a free device of that key; `BitMTPError` where there is none."""
    try:
        from tvm import rpc
    except ImportError as fault:
        raise BitMTPError(f"RPC needs more packages ({fault}): {INSTALL}") from fault
    host, port = tracker
    try:
        # TVM tries for a minute: whether anybody is there is known at once.
        socket.create_connection(tracker, REQUEST_SECONDS).close()
        found = rpc.connect_tracker(host, port)
        # It waits for a free device, and for ever where there is none.
        found._sock.settimeout(REQUEST_SECONDS)
        return found.request(key, session_timeout=SESSION_SECONDS, max_retry=1)
    except Exception as fault:
        raise BitMTPError(
            f"no device {key} behind the RPC tracker {host}:{port} "
            f"({' '.join(str(fault).split())[:120]}): start rpc_tracker there and rpc_server with "
            f"--key {key} on the board"
        ) from fault


def upload_library(session: Any, path: Path) -> Any:
    """The library on the other side, loaded. It was linked here, so no compiler is needed there."""
    session.upload(str(path))
    return session.load_module(path.name)
