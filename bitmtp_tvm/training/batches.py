"""The batches of a run: which windows a process takes at a step, with which anchors."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from bitmtp_tvm.training.data import TokenShards, anchors_of, windows
from bitmtp_tvm.training.packing import Packed, document_numbers, pack
from relax_models.config import MTPConfig

# Held-out windows are the same ones in every run, so that runs can be compared.
_VALIDATION_SEED = 0


class Batches:
    """Packed batches of numbered windows; window i has the same tokens and anchors in any batch."""

    def __init__(
        self,
        shards: TokenShards,
        length: int,
        anchors: int,
        mtp: MTPConfig | None,
        seed: int,
        device: torch.device,
        flex: bool,
    ) -> None:
        """`length`: clean rows; `anchors`: blocks a window, none without `mtp`."""
        self._windows = windows(shards, length + 1, seed)
        self._header, self._length, self._seed = shards.header, length, seed
        self._anchors = anchors if mtp is not None else 0
        self._mtp = mtp or MTPConfig(1, 0)
        self._device, self._flex = device, flex

    def __len__(self) -> int:
        """Windows of one epoch."""
        return len(self._windows)

    def __call__(self, numbers: Sequence[int]) -> Packed:
        """The batch of these windows."""
        mtp = self._mtp
        tokens = self._moved(np.stack([self._windows[i] for i in numbers]))
        chosen = [
            anchors_of(i, self._anchors, self._length, mtp.block_size, self._seed) for i in numbers
        ]
        return pack(
            tokens,
            self._moved(np.stack(chosen)),
            mtp.block_size,
            mtp.block_attention,
            mask_token_id=mtp.mask_token_id,
            documents=document_numbers(tokens, self._header.bos, self._header.eos),
            flex=self._flex,
        )

    def _moved(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor


def shares(first: int, batches: int, size: int, rank: int, world: int) -> Iterator[range]:
    """Window numbers of one process: `batches` batches of `size`, all processes' one after another.

    Together they are the `batches * size * world` windows from `first` on.
    """
    for i in range(batches):
        start = first + (i * world + rank) * size
        yield range(start, start + size)
