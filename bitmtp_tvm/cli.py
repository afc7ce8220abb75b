"""What all commands share: how a fault or a signal ends them."""

import signal
import sys
import traceback
from collections.abc import Callable

from bitmtp_tvm.errors import BitMTPError


def run(work: Callable[[], object], verbose: bool = False) -> int:
    """Run `work` and return the exit code of the command.

    A `BitMTPError` or a refusal of the operating system becomes one line on stderr and its exit
    code (2 for usage, 1 otherwise), with the traceback only when `verbose`. Ctrl-C gives 130;
    SIGTERM ends the process with 143 after everything half written is removed.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        work()
    except BitMTPError as fault:
        return _report(fault, fault.exit_code, verbose)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout went away (`… | head`): there is nobody left to say anything to.
        sys.stderr.close()
        return 1
    except OSError as fault:
        return _report(fault, 1, verbose)
    return 0


def _report(fault: Exception, code: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exc()
    print(f"error: {' '.join(str(fault).split())}", file=sys.stderr)
    return code


def _terminate(number: int, frame: object) -> None:
    sys.exit(128 + number)
