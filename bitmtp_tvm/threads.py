"""How many threads a model on the processor runs in: one a core that this process may use.

TVM takes half the logical processors of an x86-64 machine for its cores, also where they are as
many as the cores, as in most virtual machines, and binds a thread to each of the first ones,
whatever the process may use.
"""

import math
import os
import platform
from pathlib import Path
from typing import Any

# TVM's own, and OpenMP's, which it reads too: who sets one has chosen.
CHOSEN = ("TVM_NUM_THREADS", "OMP_NUM_THREADS")
_SHARED = -3
"""TVM's mode in which the threads share the processors that are named."""

_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def use_cores(tvm: Any) -> None:
    """Let kernels of this process run on all its cores, within what its container may take.

    Only before the first kernel: TVM starts its threads once.
    """
    if platform.machine() != "x86_64" or any(os.environ.get(name) for name in CHOSEN):
        return
    cores = usable_cores()
    threads = max(1, math.ceil(min(len(cores), _quota())))
    configure = tvm.get_global_func("runtime.config_threadpool")
    configure(_SHARED, threads, [str(processor) for processor in cores])


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
    try:
        limit, period = _QUOTA.read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf
