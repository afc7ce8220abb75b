"""What all commands share: how a fault or a signal ends them."""

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bitmtp_tvm.errors import BitMTPError

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_received: list[int] = []
"""Signals that asked for the end of the command that runs."""


def run(work: Callable[[], object], verbose: bool = False) -> int:
    """Run `work` and return the exit code of the command.

    A `BitMTPError` or a refusal of the operating system becomes one line on stderr and its exit
    code (2 for usage, 1 otherwise), with the traceback only when `verbose`. A signal that asks for
    the end gives 128 and its number, 130 for Ctrl-C, after everything half written is removed.
    """
    _prepare_streams()
    with _stopping() as received:
        try:
            work()
            sys.stdout.flush()
        except BaseException as fault:
            return _ended(fault, received, verbose)
    return 0


def _prepare_streams() -> None:
    """A closed stream takes what is written without a word; a character that a terminal cannot show
    becomes a question mark."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """Signals become KeyboardInterrupt; the list holds their numbers.

    Foreign code on the stack may turn the exception into another, so the list is what counts.
    """

    def stop(number: int, frame: object) -> None:
        _received.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in STOPPING}
    try:
        yield _received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()


def check_stopped() -> None:
    """Raise the KeyboardInterrupt of a signal again where it was lost: numpy drops all that is
    raised while it looks for an attribute, and a loop without end would go on."""
    if _received:
        raise KeyboardInterrupt


def _ended(fault: BaseException, received: list[int], verbose: bool) -> int:
    if received or isinstance(fault, KeyboardInterrupt):
        _report("interrupted", verbose=False)
        return 128 + (received[0] if received else signal.SIGINT)
    if isinstance(fault, BrokenPipeError):
        # The reader of stdout went away (`… | head`): nothing is left to say, and nobody to hear.
        _drop_stdout()
        return 1
    if isinstance(fault, BitMTPError | OSError):
        _drop_stdout()
        _report(f"error: {' '.join(str(fault).split())}", verbose)
        return fault.exit_code if isinstance(fault, BitMTPError) else 1
    raise fault


def _report(line: str, verbose: bool) -> None:
    if verbose:
        traceback.print_exc()
    print(line, file=sys.stderr)


def _drop_stdout() -> None:
    """Where stdout cannot be written, send the rest elsewhere: Python would complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
