"""Ends the daemon at SIGTERM, SIGINT, or the end of the program that it was started for."""

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
