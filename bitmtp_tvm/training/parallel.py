"""One process or several: FSDP2 over what torchrun started, and plain PyTorch without it."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.training.objective import Objective


@dataclass(frozen=True)
class World:
    """Which of how many processes this is, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def summed(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def agreed(self, values: Sequence[float]) -> list[float]:
        """The first process's numbers: clocks differ, and all must take the same way.

        They go from processor to processor, so that nobody waits for what a GPU has still to do.
        """
        if self.size == 1:
            return list(values)
        held = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(held, 0)
        return held.tolist()


SETTLED = 0.2
"""Seconds for gloo's threads to let go of the last exchange's tensors. Such a thread needs the
interpreter for that, which would abort the process if it were on its way out."""


@contextmanager
def world(device: str) -> Iterator[World]:
    """The processes that torchrun started, or this one alone. Raises UsageError without a GPU."""
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"--device is {device!r}; known: auto, cpu, cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch sees no GPU here")
    if not dist.is_torchelastic_launched():
        yield World(0, 1, torch.device(kind))
        return
    place = torch.device("cpu")
    if kind == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(place)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=place)
    else:
        dist.init_process_group("gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), place)
    finally:
        dist.destroy_process_group()
        time.sleep(SETTLED)


WHOLE_BYTES = 1 << 30
"""Parameters up to so many bytes are gathered at once and stay for a whole step: an exchange costs
the processor a millisecond or more, which the steps of a small model do not hide."""


def share(objective: Objective, here: World, most: int = WHOLE_BYTES) -> nn.Module:
    """Shard the parameters over the processes; does nothing for one process.

    Where they are more than `most` bytes, they are gathered layer by layer.
    """
    if here.size == 1:
        return objective
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(here.device.type, (here.size,))
    if sum(parameter.nbytes for parameter in objective.parameters()) > most:
        for layer in objective.decoder.model.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective
