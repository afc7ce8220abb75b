"""The one folder that this package keeps things in between runs."""

import os
import tempfile
from pathlib import Path

from bitmtp_tvm.errors import BitMTPError

CACHE_VARIABLE = "BITMTP_CACHE_DIR"


def cache_directory() -> Path:
    """The folder for files that can be made again; created on demand.

    `BITMTP_CACHE_DIR` names it, `~/.cache/bitmtp_tvm` is the default.
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        folder = Path(named) if named else Path.home() / ".cache" / "bitmtp_tvm"
        folder.mkdir(parents=True, exist_ok=True)
        # A folder that exists may still be read-only.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as fault:
        raise BitMTPError(
            f"the cache folder cannot be written ({fault}): set {CACHE_VARIABLE} to one that can"
        ) from fault
    return folder.absolute()
