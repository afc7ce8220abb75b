"""Optimisers by name, and the running mean of the weights."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
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
    first = _whole_muon()(
        matrices,
        lr=options.lr,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [first, _adamw([{"params": others, "weight_decay": 0.0}], options, fused)]


def _whole_muon() -> type[Optimizer]:
    """Muon for matrices that are sharded too."""

    class WholeMuon(torch.optim.Muon):
        """Every process orthogonalises whole matrices, and keeps its share of what comes out: to
        gather a gradient once takes less than each of the products over shares would."""

        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if isinstance(parameter.grad, DTensor):
                        everywhere = [Replicate()] * parameter.grad.device_mesh.ndim
                        parameter.grad = parameter.grad.redistribute(placements=everywhere)
            return super().step(closure)

    return WholeMuon


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
