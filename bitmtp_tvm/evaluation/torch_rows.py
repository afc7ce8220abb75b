"""Rows by PyTorch: a checkpoint as it was trained, on the processor or on a GPU."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.evaluation.rows import Masks, WindowRows

LOGITS_AT_ONCE = 1 << 26
"""Elements of a block of logits, so that a large vocabulary does not fill the memory."""

ROWS_AT_ONCE = 1 << 13
"""Rows of a forward, all windows of a batch together; a GPU is full with that."""


def open_torch(
    directory: Path, device: str, quant: str | None, quant_threshold: float | None
) -> "TorchRows":
    """The checkpoint in `directory` on `device` ("auto", "cpu", "cuda", "cuda:1", …).

    Raises `BitMTPError` without PyTorch and for a checkpoint that does not load, `UsageError` for a
    device that is not there.
    """
    try:
        torch = import_module("torch")
        load = import_module("bitmtp_tvm.training.checkpoint").load
    except ModuleNotFoundError as fault:
        raise BitMTPError(
            f"a checkpoint is evaluated by PyTorch, and {fault.name} is not installed: pip install "
            "'bitmtp-tvm[train]'"
        ) from fault
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.zeros(1, device=place)
    # PyTorch raises RuntimeError, its subclasses, or AssertionError when it was built without CUDA.
    except (RuntimeError, AssertionError) as fault:
        first = str(fault).partition("\n")[0]
        raise UsageError(f"PyTorch has no device {device!r} here ({first}): try cpu") from fault
    model = load(directory, quant=quant, quant_threshold=quant_threshold)
    return TorchRows(model.to(place), str(directory))


class TorchRows:
    """A `RowModel` over a `TrainableDecoder`, whose `config` says how its mask rows work."""

    def __init__(self, model: Any, name: str) -> None:
        self.torch = import_module("torch")
        self.model, self.name = model.eval(), name
        config = model.config
        self.vocab_size, self.context = config.vocab_size, config.max_position_embeddings
        mtp = config.mtp
        self.masks = (
            Masks(mtp.block_size, mtp.mask_token_id, mtp.block_attention == "bidirectional")
            if mtp
            else None
        )
        self.device = next(model.parameters()).device

    def about(self) -> dict[str, str]:
        """PyTorch and its device, for the record."""
        kind = self.device.type
        name = self.torch.cuda.get_device_name(self.device) if kind == "cuda" else kind
        return {"torch": str(self.torch.__version__), "torch_device": name}

    def rows(self, windows: np.ndarray, anchors: np.ndarray) -> Iterator[WindowRows]:
        """See `RowModel`."""
        count = self.masks.count if self.masks else 0
        length, blocks = windows.shape[1], anchors.shape[1]
        batch = max(1, ROWS_AT_ONCE // (length + blocks * count))
        for start in range(0, len(windows), batch):
            part = slice(start, start + batch)
            yield from self._batch(windows[part], anchors[part])

    def nll(self, tokens: Sequence[int]) -> np.ndarray:
        (found,) = self._batch(np.asarray(tokens)[None], np.zeros((1, 0), np.int64))
        return found.nll

    def _batch(self, windows: np.ndarray, anchors: np.ndarray) -> Iterator[WindowRows]:
        torch, (_, length) = self.torch, windows.shape
        tokens, positions, visible = pack(windows, anchors, self.masks)
        given = [torch.from_numpy(array).to(self.device) for array in (tokens, positions, visible)]
        with torch.inference_mode():
            hidden = self.model(*given)
            wanted = torch.from_numpy(windows[:, 1:]).to(self.device)
            nll, top, _ = self._read(hidden[:, : length - 1], wanted)
            _, mask_top, confidence = self._read(hidden[:, length:], None)
        shape = (*anchors.shape, self.masks.count if self.masks else 0)
        mask_top, confidence = mask_top.reshape(shape), confidence.reshape(shape)
        for i, window in enumerate(windows):
            yield WindowRows(window, nll[i], top[i], anchors[i], mask_top[i], confidence[i])

    def _read(self, hidden: Any, wanted: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """nll of `wanted` (zeros if None), likeliest token and its probability, `(B, R)` each."""
        torch, (batch, rows) = self.torch, hidden.shape[:2]
        shape = (batch, rows)
        nll, top, confidence = np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape)
        step = max(1, LOGITS_AT_ONCE // (batch * self.vocab_size))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            logits = torch.log_softmax(self.model.logits(hidden[:, part]).float(), -1)
            best, which = logits.max(-1)
            top[:, part], confidence[:, part] = which.cpu().numpy(), best.exp().cpu().numpy()
            if wanted is not None:
                found = logits.gather(-1, wanted[:, part, None])[..., 0]
                nll[:, part] = -found.double().cpu().numpy()
        return nll, top, confidence


def pack(
    windows: np.ndarray, anchors: np.ndarray, masks: Masks | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One forward of every window and all its blocks: tokens, positions `(B, T)`, int64, and what
    a row sees, bool `(B, 1, T, T)`.

    windows `(B, L)`, anchors `(B, A)` -> T = L + A * K rows: the window, then block after block.
    """
    (batch, length), blocks = windows.shape, anchors.shape[1]
    if masks is None or not blocks:
        positions = np.broadcast_to(np.arange(length), windows.shape)
        seen = np.broadcast_to(np.tri(length, dtype=bool), (batch, 1, length, length))
        return windows, positions.copy(), seen.copy()
    count = masks.count
    total = length + blocks * count
    tokens = np.full((batch, total), masks.token, np.int64)
    tokens[:, :length] = windows
    positions = np.empty_like(tokens)
    positions[:, :length] = np.arange(length)
    behind = anchors[:, :, None] + np.arange(1, count + 1)
    positions[:, length:] = behind.reshape(batch, -1)
    seen = np.zeros((batch, 1, total, total), bool)
    seen[:, 0, :length, :length] = np.tri(length, dtype=bool)
    prefix = np.arange(length) <= anchors.repeat(count, axis=1)[:, :, None]
    seen[:, 0, length:, :length] = prefix
    block = masks.visible()[1:, 1:]
    seen[:, 0, length:, length:] = np.kron(np.eye(blocks, dtype=bool), block)
    return tokens, positions, seen
