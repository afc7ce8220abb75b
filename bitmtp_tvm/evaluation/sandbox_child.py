"""Runs one program that nobody has read, in a process of its own; started by sandbox.py.

It reads {"program", "token", "memory", "seconds"} from stdin and writes {"outcome", "detail",
"token", "network"} to what was stdout. Nothing of this package is imported here.
"""

import ctypes
import json
import os
import resource
import sys

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
MOST_FILE_BYTES = 1 << 24
MOST_DETAIL = 200


def main() -> None:
    request = json.load(sys.stdin)
    answer = os.dup(1)
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    network = "blocked" if leave_network() else "open"
    limit(request["memory"], request["seconds"])
    outcome, detail = outcome_of(request["program"])
    found = {
        "outcome": outcome,
        "detail": detail[:MOST_DETAIL],
        "token": request["token"],
        "network": network,
    }
    os.write(answer, json.dumps(found).encode())
    # Threads and exit handlers of the program are not waited for.
    os._exit(0)


def leave_network() -> bool:
    """Go into a network of one's own, which has no way out; whether the system allows it."""
    try:
        unshare = ctypes.CDLL(None, use_errno=True).unshare
    except (OSError, AttributeError):
        return False
    return any(unshare(flags) == 0 for flags in (NEW_NETWORK | NEW_USER, NEW_NETWORK))


def limit(memory: int, seconds: int) -> None:
    """Bytes of memory, seconds of the processor, bytes of a file; no core dump, no new process."""
    wanted = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: MOST_FILE_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for what, most in wanted.items():
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def outcome_of(program: str) -> tuple[str, str]:
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except AssertionError as fault:
        return "wrong", repr(fault)
    except MemoryError:
        return "memory", "MemoryError"
    # SystemExit too: a program that leaves early has not passed its checks.
    except BaseException as fault:
        return "error", repr(fault)
    return "passed", ""


main()
