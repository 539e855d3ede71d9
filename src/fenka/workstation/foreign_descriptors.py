"""Keeps descriptors that strangers send from holding the daemon.

A process that connects to a Unix socket can send descriptors beside the bytes. Nobody receives them, so the
kernel closes them in the thread that reads or closes the connection. To close a TCP connection with SO_LINGER
takes until its data is sent, which its owner can delay for days (socket(7), unix(7)). A signal ends that.
"""

import asyncio
import contextlib
import itertools
import signal
import socket
import threading
import time
from collections.abc import Iterator

_SO_PASSRIGHTS = 83
"""Linux 6.16; Python does not name it."""

_SIGNAL = signal.SIGURG
"""By default ignored, so that nothing ends by it. Programs in Go interrupt their threads by it as well."""

PERIOD_S = 0.25
"""Between two questions whether the loop goes on."""

PATIENCE_S = 0.25
"""Until the loop counts as held."""

ALERT_S = 60.0
"""After the loop was held: it is asked often, since whoever did it may go on."""

ALERT_PERIOD_S = 0.01

LAST_PAUSE_S = 1.0
PAUSES_S = (*[0.002] * 150, *[0.1] * 50)
"""The times after the first signals, each of which ends one wait. LAST_PAUSE_S is the time after others.

Signals do not help a loop that is busy. asyncio has room for about 270 that it has not handled, and each
further one leaves lines in the log.
"""


def refuse(server: socket.socket) -> None:
    """Refuse descriptors of those who connect to a listening socket, from Linux 6.16 on: they get EPERM."""
    with contextlib.suppress(OSError):
        server.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


@contextlib.contextmanager
def interrupted(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """While in the context, interrupt what holds the loop, which runs in the main thread.

    A call of Python goes on after a signal, except for one that closes: there it ends the wait.
    """
    watch = _Watch(loop, threading.get_ident())
    loop.add_signal_handler(_SIGNAL, _nothing)
    thread = threading.Thread(target=watch.run, name="interrupter", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.ended.set()
        thread.join()
        loop.remove_signal_handler(_SIGNAL)


def pauses() -> Iterator[float]:
    """Return the times after the signals to a loop that stays held, in seconds."""
    return itertools.chain(PAUSES_S, itertools.repeat(LAST_PAUSE_S))


class _Watch:
    """Asks a loop whether it goes on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self._loop, self._thread = loop, thread
        self._alert_until = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        """Ask until the end."""
        while not self.ended.wait(ALERT_PERIOD_S if self._alert else PERIOD_S):
            answered = threading.Event()
            self._loop.call_soon_threadsafe(answered.set)
            if answered.wait(ALERT_PERIOD_S if self._alert else PATIENCE_S):
                continue
            self._alert_until = time.monotonic() + ALERT_S
            for pause_s in pauses():
                if self.ended.is_set():
                    break
                signal.pthread_kill(self._thread, _SIGNAL)
                if answered.wait(pause_s):
                    break

    @property
    def _alert(self) -> bool:
        return time.monotonic() < self._alert_until


def _nothing() -> None:
    return None
