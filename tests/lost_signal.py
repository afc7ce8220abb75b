"""A Ctrl-C that foreign code drops, as numpy does where it looks for an attribute."""

import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bitmtp_tvm.cli import run


class Losing:
    """Calls `real` (or nothing) and loses a signal each time. `calls`: how often it was called."""

    def __init__(self, real: Callable[..., Any] | None = None) -> None:
        self.real, self.calls = real, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return self.real(*arguments, **named) if self.real else None


def ended_at_once(work: Callable[[], object], losing: Losing) -> bool:
    """Whether `work` ends as interrupted after one call of `losing`."""
    return run(work) == 128 + signal.SIGINT and losing.calls == 1
