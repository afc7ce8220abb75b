"""How many threads a model on the processor runs in: one a core that this process may use.

TVM takes half the logical processors of an x86-64 machine for its cores, also where they are as
many as the cores, as in most virtual machines. And it binds its threads, and the caller's, to the
first ones, for good and whatever the process may use.
"""

import functools
import math
import os
import platform
from pathlib import Path

# TVM's own, and OpenMP's, which it reads too: who sets one has chosen.
CHOSEN = ("TVM_NUM_THREADS", "OMP_NUM_THREADS")
_BINDING = "TVM_BIND_THREADS"
_SHARED = -3
"""TVM's mode in which the threads share the processors that are named."""

_TOPOLOGY = Path("/sys/devices/system/cpu")
_GROUP = Path("/sys/fs/cgroup")
# A limit and a period: of control groups of version 2, and of version 1.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
_UNLIMITED = ("max", "-1")


def use_cores() -> None:
    """Let kernels run on all cores, within what the container may take.

    Each thread of Python that runs kernels gets threads of TVM when it first does, so that the
    environment is the place to say how many. Where a thread had its own before, they stay.
    """
    _survive_forks()
    if platform.machine() != "x86_64":
        return
    os.environ.setdefault(_BINDING, "0")
    if not any(os.environ.get(name) for name in CHOSEN):
        threads = math.ceil(min(len(usable_cores()), _quota()))
        os.environ[CHOSEN[0]] = str(max(1, threads))


def usable_cores() -> list[int]:
    """The first logical processor of each core that this process may run on."""
    first: dict[str, int] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        first.setdefault(_core_of(processor), processor)
    return list(first.values())


def _core_of(processor: int) -> str:
    """What the logical processors of one core have in common."""
    try:
        return (_TOPOLOGY / f"cpu{processor}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(processor)


def _quota() -> float:
    """Processors that the control group may keep busy."""
    for files in _QUOTAS:
        try:
            limit, period = " ".join((_GROUP / file).read_text() for file in files).split()
            return math.inf if limit in _UNLIMITED else int(limit) / int(period)
        except (OSError, ValueError):
            continue
    return math.inf


@functools.cache
def _survive_forks() -> None:
    """A forked child has none of the threads that TVM would wait for: it goes on in one."""
    import tvm

    configure = tvm.get_global_func("runtime.config_threadpool")

    def alone() -> None:
        configure(_SHARED, 1, [str(usable_cores()[0])])

    os.register_at_fork(after_in_child=alone)
