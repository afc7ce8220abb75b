"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from bitmtp_tvm.errors import BitMTPError


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A place beside `path`, which takes its name when the block ends well, and vanishes otherwise.

    Raises BitMTPError where it cannot be written: PyTorch and safetensors have errors of their own
    for a full disk.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except (OSError, RuntimeError, SafetensorError) as fault:
        raise BitMTPError(f"{path} cannot be written: {fault}") from fault
    finally:
        partial.unlink(missing_ok=True)
