"""Checkpoints: a file on disk (or a preset's shape) to a configuration and named tensors."""

from pathlib import Path

from bitmtp_tvm.checkpoint.base import Checkpoint, Scale, dense_shapes, matrix_shapes
from bitmtp_tvm.checkpoint.gguf_header import is_gguf
from bitmtp_tvm.checkpoint.hf import open_hf_directory
from bitmtp_tvm.checkpoint.options import CheckpointOptions
from bitmtp_tvm.checkpoint.random import random_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointOptions",
    "Scale",
    "dense_shapes",
    "matrix_shapes",
    "open_checkpoint",
    "random_checkpoint",
]


def open_checkpoint(
    path: Path,
    *,
    quant: str | None = None,
    quant_threshold: float | None = None,
    mask_token_id: int | None = None,
    block_size: int | None = None,
) -> Checkpoint:
    """The checkpoint at `path`, a Hugging Face directory or a GGUF file; tensors are read later.

    Its configuration and all headers are checked here.

    `quant` (a key of QUANTIZERS) and `quant_threshold` say by which rule the weights of a Qwen3
    become low-bit; `mask_token_id` and `block_size` are those that a model with multi-token
    prediction was trained with, where its files do not say. Raises BitMTPError, one sentence, for
    whatever cannot be read; UsageError for options that are wrong, missing or too much.
    """
    options = CheckpointOptions(quant, quant_threshold, mask_token_id, block_size)
    path = Path(path)
    if not is_gguf(path):
        return open_hf_directory(path, options)
    # Reading a directory does not need the gguf package, and training may run where it is missing.
    from bitmtp_tvm.checkpoint.gguf_checkpoint import open_gguf

    return open_gguf(path, options)
