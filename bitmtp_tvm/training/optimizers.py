"""Optimisers by name, and the running mean of the weights."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.training.options import TrainOptions

_BETAS = (0.9, 0.95)


def _adamw(groups: list[dict[str, object]], options: TrainOptions, fused: bool) -> AdamW:
    return AdamW(groups, lr=options.lr, betas=_BETAS, fused=fused or None)


def adamw(model: nn.Module, options: TrainOptions, fused: bool) -> list[Optimizer]:
    """AdamW for everything; only the layers' matrices decay."""
    matrices, others = _split(model)
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [_adamw([group for group in groups if group["params"]], options, fused)]


def muon(model: nn.Module, options: TrainOptions, fused: bool) -> list[Optimizer]:
    """Muon for the layers' matrices, with AdamW's size of step, and AdamW for the others."""
    if not hasattr(torch.optim, "Muon"):
        raise UsageError("--optimizer muon needs PyTorch 2.9 or newer")
    matrices, others = _split(model)
    if not matrices:
        raise UsageError("--optimizer muon has no matrix to train: leave it out")
    first = _batched_muon()(matrices, lr=options.lr, weight_decay=options.weight_decay)
    return [first, _adamw([{"params": others, "weight_decay": 0.0}], options, fused)]


def _batched_muon() -> type[Optimizer]:
    """PyTorch's Muon with another `step`; its class is there from PyTorch 2.9 on."""

    class BatchedMuon(torch.optim.Muon):
        """Orthogonalises all matrices of one shape together: one by one, those of twelve layers are
        1,700 launches of a few microseconds each.

        Every process has whole momenta and orthogonalises whole matrices, and keeps its share of
        what comes out: to gather the gradients once takes less than each product over shares would.
        """

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                alike = defaultdict(list)
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        alike[parameter.shape].append(parameter)
                for parameters in alike.values():
                    self._step(group, parameters)

        def _step(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
            gradients = _gathered([parameter.grad for parameter in parameters]).unbind()
            momenta = [self._momentum(p, g) for p, g in zip(parameters, gradients, strict=True)]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
            found = orthogonal(torch.stack(ahead), group["ns_coefficients"], group["ns_steps"])
            # As long a step as AdamW's: torch.optim.Muon calls that match_rms_adamw.
            rate = group["lr"] * 0.2 * max(parameters[0].shape) ** 0.5
            updates = _shares_of(found.float(), parameters[0]).unbind()
            own = [_local(parameter) for parameter in parameters]
            torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(own, updates, alpha=-rate)

        def _momentum(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            return state["momentum_buffer"]

    return BatchedMuon


def orthogonal(matrices: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """The nearest orthogonal matrices, roughly: matrices `(…, N, K)` -> the same in bfloat16.

    The quintic Newton-Schulz iteration of Jordan et al., "Muon" (2024), as torch.optim.Muon runs it
    on one matrix.
    """
    a, b, c = coefficients
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _local(matrix: Tensor) -> Tensor:
    """The rows of a matrix that this process has."""
    return matrix.to_local() if isinstance(matrix, DTensor) else matrix


def _most_rows(matrix: DTensor) -> int:
    """Rows that the first processes have: FSDP2 gives each so many while there are some."""
    assert matrix.placements == (Shard(0),)
    return -(-matrix.shape[0] // matrix.device_mesh.size())


def _gathered(matrices: Sequence[Tensor]) -> Tensor:
    """Whole matrices of one shape `(N, K)` -> `(count, N, K)`, in one exchange.

    One by one, as `DTensor.full_tensor` does it, each takes the processor most of a millisecond.
    """
    first, own = matrices[0], torch.stack([_local(matrix) for matrix in matrices])
    if not isinstance(first, DTensor):
        return own
    most = _most_rows(first)
    own = functional.pad(own, (0, 0, 0, most - own.shape[1]))
    processes = first.device_mesh.size()
    everyone = own.new_empty(processes * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(everyone, own, group=first.device_mesh.get_group())
    rows = everyone.unflatten(0, (processes, -1)).transpose(0, 1).flatten(1, 2)
    return rows[:, : first.shape[0]]


def _shares_of(matrices: Tensor, parameter: Tensor) -> Tensor:
    """This process's rows of whole matrices `(count, N, K)` that are shared out as `parameter`."""
    if not isinstance(parameter, DTensor):
        return matrices
    start = parameter.device_mesh.get_local_rank() * _most_rows(parameter)
    return matrices[:, start : start + parameter.to_local().shape[0]]


OPTIMIZERS: Mapping[str, Callable[[nn.Module, TrainOptions, bool], list[Optimizer]]] = {
    "adamw": adamw,
    "muon": muon,
}


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trained parameters: matrices inside layers, and all others."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (matrices if "_proj." in name else others).append(parameter)
    return matrices, others


class Average:
    """An exponential running mean of the trained parameters."""

    def __init__(self, model: nn.Module, keep: float) -> None:
        self._keep = keep
        self._parameters = dict(model.named_parameters())
        self.values = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the parameters as they are now."""
        for name, parameter in self._parameters.items():
            self.values[name].lerp_(parameter.detach(), 1 - self._keep)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange mean and parameters; a second call undoes it."""
        for name, parameter in self._parameters.items():
            held: Tensor = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(held)
