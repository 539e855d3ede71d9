"""Ends the daemon at SIGTERM, SIGINT, or the end of the program that it was started for.

Reports to systemd what a daemon does, for units with Type=notify (sd_notify(3)).

The daemon's log: one line for each entry, on standard error.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fenka.formats.printable import escape
from fenka.workstation.protocol import SIGNALS


def _nothing() -> None:
    return None


class ShutdownSignals:
    """Records signals during the daemon's whole life, also while it cannot act on them.

    An interrupted start or stop would leave a card server or a file.
    """

    def __init__(self, lifeline: int | None = None) -> None:
        """lifeline: a descriptor. At its end of file the daemon ends, with all jobs."""
        self.lifeline = lifeline
        self.signals: list[int] = []
        self._stop: Callable[[], None] = _nothing
        for number in SIGNALS:
            signal.signal(number, self._record)
        # The process that started this one may have blocked them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _record(self, number: int, _: object) -> None:
        self.signals.append(number)
        self._stop()

    def attach(
        self,
        loop: "asyncio.AbstractEventLoop",
        stop: Callable[[], None],
        abandon: Callable[[], None],
    ) -> None:
        """Call functions in the loop.

        Args:
            loop: The daemon's loop.
            stop: Called at a signal, also one received earlier.
            abandon: Called at the lifeline's end.
        """

        def stop_soon() -> None:
            loop.call_soon_threadsafe(stop)

        self._stop = stop_soon
        if self.signals:
            stop()
        if self.lifeline is not None:
            lifeline = self.lifeline

            def on_end() -> None:
                loop.remove_reader(lifeline)
                abandon()

            loop.add_reader(lifeline, on_end)

    def detach(self) -> None:
        """Call nothing any more."""
        self._stop = _nothing


_VARIABLE = "NOTIFY_SOCKET"


def environment() -> dict[str, str]:
    """Return what a program that replaces this one needs to report in its place."""
    address = os.environ.get(_VARIABLE)
    return {_VARIABLE: address} if address else {}


def notify(state: str) -> None:
    """Send a state, as READY=1, if a service manager has started this process and wants to know."""
    address = os.environ.get(_VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as report, contextlib.suppress(OSError):
        report.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
        report.sendall(state.encode())


def log(message: str) -> None:
    """Print one line, shortened if it is very long.

    Unprintable characters are escaped. Users choose names, and a terminal executes escape sequences.
    """
    line = escape(f"{message!s:.2000}".replace("\n", " "))
    print(f"fenka daemon: {line}", file=sys.stderr, flush=True)


def log_unhandled(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log in one line what asyncio would print as a traceback; for its exception handler."""
    error = context.get("exception")
    log(f"{context['message']}: {describe(error)}" if error else context["message"])


def describe(error: BaseException) -> str:
    """Return the exception's type, message and the source line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"
