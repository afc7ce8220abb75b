"""What a run leaves behind: its state, its checkpoint, its card; the mean of its weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bitmtp_tvm.training import state as states
from bitmtp_tvm.training.card import write_card
from bitmtp_tvm.training.checkpoint import save
from bitmtp_tvm.training.measures import Measures
from bitmtp_tvm.training.model import TrainableDecoder
from bitmtp_tvm.training.optimizers import Average
from bitmtp_tvm.training.options import TrainOptions
from bitmtp_tvm.training.parallel import World
from bitmtp_tvm.training.schedule import Budget
from bitmtp_tvm.training.setup import Source


@dataclass
class Keeper:
    """Writes into the output directory; all processes call it, the first one writes."""

    options: TrainOptions
    here: World
    source: Source
    decoder: TrainableDecoder
    # The decoder inside its objective, sharded where there are several processes.
    model: nn.Module
    optimizers: list[Optimizer]
    average: Average | None

    def __post_init__(self) -> None:
        self._output = Path(str(self.options.output))

    def averaged(self, work: Callable[[], Any]) -> Any:
        """What `work` gives with the running mean, if there is one, in place of the parameters."""
        if self.average is None:
            return work()
        self.average.swap()
        try:
            return work()
        finally:
            self.average.swap()

    def _values(self) -> dict[str, Any]:
        return self.averaged(lambda: states.whole(self.model))

    def write_state(self, place: states.Place) -> None:
        """The state to go on from."""
        average = None if self.average is None else self._values()
        options = self.options.to_dict()
        path = self._output / states.NAME
        states.write(path, self.here, self.model, self.optimizers, place, options, average)

    def write_checkpoint(self, budget: Budget, measures: Measures | None) -> None:
        """The checkpoint as it is now, and its packed twin where that is asked for."""
        values = self._values()
        if not self.here.first:
            return
        tensors = {name.removeprefix("decoder."): value for name, value in values.items()}
        packings = {self._output: False}
        if self.options.packed:
            packings[self._output / "packed"] = True
        for folder, packed in packings.items():
            save(
                self.decoder,
                folder,
                tensors=tensors,
                text_files=self.source.text_files,
                ids=self.source.ids,
                packed=packed,
                shard_bytes=self.options.shard_mb * 1_000_000,
            )
            parameters = sum(tensor.numel() for tensor in tensors.values())
            self._write_card(folder, parameters, budget, measures)

    def _write_card(
        self, folder: Path, parameters: int, budget: Budget, measures: Measures | None
    ) -> None:
        device = "the processor"
        if self.here.device.type == "cuda":
            device = f"{self.here.size} x {torch.cuda.get_device_name(self.here.device)}"
        dtype = str(self.decoder.linears.dtype).removeprefix("torch.")
        options, config = replace(self.options, dtype=dtype), self.decoder.config
        path = folder / "README.md"
        write_card(path, options, config, parameters, budget, measures, device)
