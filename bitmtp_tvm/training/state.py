"""What a run needs to go on after any end: written whole, or not at all."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.training.files import written
from bitmtp_tvm.training.parallel import World

NAME = "state.pt"


@dataclass
class Place:
    """Where a run is. Nothing in it is random but by the seed and these numbers."""

    step: int = 0
    # Number of the next window of the training data.
    window: int = 0
    tokens: int = 0
    seconds: float = 0.0
    # Losses of the steps that no row of the table tells yet.
    untold: list[list[float]] = field(default_factory=list)


def whole(model: nn.Module) -> dict[str, Any]:
    """All parameters by name, in memory of the first process; elsewhere empty."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    values = get_model_state_dict(model, options=options)
    # On a processor they are the parameters themselves, and those go on changing.
    return {name: value.clone() for name, value in values.items()}


def write(
    path: Path,
    here: World,
    model: nn.Module,
    optimizers: list[Optimizer],
    place: Place,
    options: Mapping[str, Any],
    average: Mapping[str, Any] | None,
) -> None:
    """Write the state to `path`: beside it first, then renamed, so that a kill leaves the last one.

    `average`: the running mean as `whole` gives it.
    """
    held = StateDictOptions(full_state_dict=True, cpu_offload=True)
    optim = get_optimizer_state_dict(model, optimizers, options=held)
    values = whole(model)
    if here.first:
        state = {
            "model": values,
            "optimizers": optim,
            "average": average,
            "place": vars(place),
            "options": json.dumps(dict(options)),
        }
        with written(path) as partial, partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    here.wait()


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote. Raises BitMTPError for a file that is not such a state."""
    if not path.is_file():
        raise BitMTPError(f"{path} is not there: nothing to resume")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        state["place"] = Place(**state["place"])
        state["options"] = json.loads(state["options"])
    except Exception as fault:  # torch raises many kinds
        kind = type(fault).__name__
        raise BitMTPError(f"{path} is not a readable state of a run: {kind} {fault}") from fault
    return state


def restore_model(values: Mapping[str, Any], model: nn.Module) -> None:
    """Put parameters back."""
    set_model_state_dict(model, dict(values), options=StateDictOptions(full_state_dict=True))


def restore(state: Mapping[str, Any], model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Put parameters and the optimisers' state back."""
    options = StateDictOptions(full_state_dict=True)
    restore_model(state["model"], model)
    set_optimizer_state_dict(model, optimizers, state["optimizers"], options=options)
