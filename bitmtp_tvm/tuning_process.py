"""The other end of bitmtp_tvm/tuning_worker.py: starts it, asks it, and notices when it is gone."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from bitmtp_tvm.errors import BitMTPError

START_SECONDS = 120.0
ANSWER_SECONDS = 60.0

OK, CRASHED, TIMEOUT = "ok", "crashed", "timeout"


class Asked(Protocol):
    """Whoever answers jobs: see `bitmtp_tvm.tuning_worker.Worker.do`."""

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer; its status is "crashed" or "timeout" where there is none."""

    def close(self) -> None:
        """End it."""


class WorkerProcess:
    """A worker in a child process, which is started when it is needed, and again when it died."""

    def __init__(self, directory: Path, command: Sequence[str] | None = None) -> None:
        self._command = command or [
            *(sys.executable, "-m", "bitmtp_tvm.tuning_worker"),
            str(directory),
        ]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except OSError:
            # It ended behind its last answer.
            self.close()
            return self.ask(job)
        return self._answer(ANSWER_SECONDS)

    def _start(self) -> "subprocess.Popen[str]":
        # A session of its own: Ctrl-C is for the parent, which ends the child.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines = queue.Queue()
        threading.Thread(target=_pump, args=(self._process, self._lines), daemon=True).start()
        answer = self._answer(START_SECONDS)
        if answer["status"] != OK:
            raise BitMTPError(
                answer.get("fault") or "the process that measures does not start: see above"
            )
        return self._process

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.close()
            return {"status": TIMEOUT}
        if not line:
            self.close()
            return {"status": CRASHED}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _pump(process: "subprocess.Popen[str]", lines: "queue.Queue[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    # Nothing more will come.
    lines.put("")
