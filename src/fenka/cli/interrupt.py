"""What Ctrl-C does where nothing has to be undone. It is imported first, so it imports almost nothing."""

import os
import signal

from fenka.core.errors import INTERRUPTED


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
