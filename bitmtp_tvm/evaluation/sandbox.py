"""Programs that a model wrote, run apart from this one: untrusted, and mostly wrong.

What holds it: a process of its own with a time limit, a limit on memory, on file size and on new
processes, an empty folder to work in, an empty environment, and no network where the system lets an
ordinary process leave it (Linux with user namespaces). What does not: it may read and write what
its user may, and root has no limit on processes, so that one which leaves its session outlives the
program. Run it where that is no loss.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
MOST_ANSWER = 1 << 16
PASSED = "passed"
OUTCOMES = (PASSED, "wrong", "error", "timeout", "memory", "killed")


@dataclass(frozen=True)
class Limits:
    """`seconds`: of wall time, and of the processor; `memory`: bytes of address space."""

    seconds: float = 10.0
    memory: int = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """`kind`: "passed", "wrong" (an assertion failed), "error" (another exception, or no Python),
    "timeout", "memory" or "killed" (it ended without an answer: a crash, or an exit on purpose).

    `network`: "blocked" or "open", and "" where the program did not live to say.
    """

    kind: str
    detail: str = ""
    network: str = ""


def run_program(program: str, limits: Limits) -> Outcome:
    """Run `program` to its end or its limit; it passes when it comes to its end by itself."""
    # What ends without running the checks cannot know it.
    token = secrets.token_hex(16)
    request = {
        "program": program,
        "token": token,
        "memory": limits.memory,
        "seconds": int(limits.seconds) + 1,
    }
    # Files and no pipes: who holds the other end of a pipe could keep this process waiting.
    with (
        tempfile.TemporaryDirectory(prefix="bitmtp-sandbox-") as folder,
        tempfile.TemporaryFile() as question,
        tempfile.TemporaryFile() as answer,
    ):
        question.write(json.dumps(request).encode())
        question.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=question,
            stdout=answer,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "PATH": os.defpath},
            start_new_session=True,
        )
        try:
            child.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            return Outcome("timeout", f"{limits.seconds:g} s")
        finally:
            _end(child)
        answer.seek(0)
        return _outcome(answer.read(MOST_ANSWER), token, child.returncode)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kill the child and what it started, whatever it is doing."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()


def _outcome(answer: bytes, token: str, code: int) -> Outcome:
    try:
        found = json.loads(answer)
        if found["token"] != token:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        if code == -signal.SIGXCPU:
            return Outcome("timeout", "processor time")
        return Outcome("killed", f"exit code {code}")
    return Outcome(found["outcome"], found["detail"], found["network"])


def run_programs(programs: Sequence[str], limits: Limits) -> Iterator[Outcome]:
    """The outcomes in the order of the programs; as many run at once as there are processors."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield from pool.map(lambda program: run_program(program, limits), programs)
