"""When a daemon ends: SIGTERM, SIGINT, or the end of the program that it was started for."""

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _nothing() -> None:
    return None


class ShutdownSignals:
    """Notes signals from the beginning to the end of a daemon, also while it cannot act on them.

    A start or a stop that is cut off in the middle would leave a card server or a file behind.
    """

    def __init__(self, lifeline: int | None = None) -> None:
        """lifeline: a descriptor; when it reaches its end, the daemon ends with all that it has started."""
        self.lifeline = lifeline
        self.signals: list[int] = []
        self._stop: Callable[[], None] = _nothing
        for number in SIGNALS:
            signal.signal(number, self._note)
        # Who started this may have held them back.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _note(self, number: int, _: object) -> None:
        self.signals.append(number)
        self._stop()

    def attach(
        self,
        loop: "asyncio.AbstractEventLoop",
        stop: Callable[[], None],
        abandon: Callable[[], None],
    ) -> None:
        """Call these in the loop.

        stop: at a signal, also one that came before. abandon: at the lifeline's end.
        """

        def stop_soon() -> None:
            loop.call_soon_threadsafe(stop)

        self._stop = stop_soon
        if self.signals:
            stop()
        if self.lifeline is not None:
            line = self.lifeline

            def broken() -> None:
                loop.remove_reader(line)
                abandon()

            loop.add_reader(line, broken)

    def detach(self) -> None:
        """The loop is about to end."""
        self._stop = _nothing
