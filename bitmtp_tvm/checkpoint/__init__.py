"""Checkpoints: a file on disk (or a preset's shape) to a configuration and named tensors."""

from pathlib import Path

from bitmtp_tvm.checkpoint.base import Checkpoint, dense_shapes, matrix_shapes
from bitmtp_tvm.checkpoint.hf import open_hf_directory
from bitmtp_tvm.checkpoint.random import random_checkpoint

__all__ = ["Checkpoint", "dense_shapes", "matrix_shapes", "open_checkpoint", "random_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, its configuration and all headers checked; tensors are read later.

    Only Hugging Face directories are known; anything else raises BitMTPError, one sentence.
    """
    return open_hf_directory(Path(path))
