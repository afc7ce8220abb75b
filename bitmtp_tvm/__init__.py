"""Compile and run ultra-low-bit language models with multi-token prediction."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitmtp_tvm.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    # Looked up on first use, so that importing the package stays free of work.
    if name == "Engine":
        from bitmtp_tvm.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
