"""What Ctrl-C does where there is nothing to undo; imports nothing, since it comes before all else."""

import os
import signal

INTERRUPTED = 130
"""Exit code, as shells have it."""


def leave_at_once() -> None:
    """From now on Ctrl-C ends this process without a traceback, unless it is ignored or handled already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_it() -> None:
    """From now on it is a KeyboardInterrupt again, if it was not ignored to begin with."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)
