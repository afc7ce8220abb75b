"""What all commands share: how a fault ends them."""

import sys
import traceback
from collections.abc import Callable

from bitmtp_tvm.errors import BitMTPError


def run(work: Callable[[], None], verbose: bool = False) -> int:
    """Run `work` and return the exit code of the command.

    A `BitMTPError` becomes one line on stderr and its exit code (2 for usage, 1 otherwise), with the
    traceback only when `verbose`; Ctrl-C gives 130.
    """
    try:
        work()
    except BitMTPError as fault:
        if verbose:
            traceback.print_exc()
        print(f"error: {' '.join(str(fault).split())}", file=sys.stderr)
        return fault.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout went away (`… | head`): nothing is left to say, and nobody to say it to.
        sys.stderr.close()
        return 1
    return 0
