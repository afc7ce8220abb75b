"""Checkpoints damaged on purpose, and the sentence that each damage gets."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors_bytes

from bitmtp_tvm.checkpoint import dense_shapes, matrix_shapes, open_checkpoint
from bitmtp_tvm.errors import BitMTPError


def edit_json(path: Path, change) -> None:
    """`change` the object in a JSON file, an empty one where there is no file."""
    values = json.loads(path.read_text()) if path.exists() else {}
    change(values)
    path.write_text(json.dumps(values))


def edit_tensors(path: Path, change) -> None:
    """`change` the tensors of a safetensors file, as `safetensors_bytes.load` gives them."""
    tensors = safetensors_bytes.load(path)
    change(tensors)
    safetensors_bytes.save(path, tensors)


def read_all(path: Path, **options: Any):
    """Open a checkpoint and read every tensor of it."""
    checkpoint = open_checkpoint(path, **options)
    for name in matrix_shapes(checkpoint.config):
        checkpoint.low_bit(name)
    for name in dense_shapes(checkpoint.config):
        checkpoint.dense(name)
    return checkpoint


def refused(path: Path, *parts: str, **options: Any) -> None:
    """Reading the checkpoint is refused in one sentence that names all `parts`."""
    with pytest.raises(BitMTPError) as caught:
        read_all(path, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence
