"""Optimisers by name, and the running mean of the weights."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
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
    if torch.distributed.is_initialized():
        raise UsageError("--optimizer muon needs whole matrices: it runs in one process only")
    matrices, others = _split(model)
    if not matrices:
        raise UsageError("--optimizer muon has no matrix to train: leave it out")
    first = torch.optim.Muon(
        matrices,
        lr=options.lr,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [first, _adamw([{"params": others, "weight_decay": 0.0}], options, fused)]


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
