"""Tells commands why the daemon does not start, while no file can be written.

A service manager would start a daemon again every few seconds where a file system is full, and each start
would print the same sentence. The daemon waits instead. It answers at a name in the abstract namespace, which
takes no room on any disk, and then tries again in the same process.
"""

import os
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from fenka.hardware.peer_credentials import peer
from fenka.workstation.paths import Runtime

RETRY_S = 5.0
"""Between two starts."""

_ANSWER_S = 1.0
"""For the sentence of a daemon that waits."""

_MAX_BYTES = 4096
_BACKLOG = 64
_POLL_S = 0.2
_REPORTED = "FENKA_REPORTED_FAILURE"
"""Variable of a daemon that tries again: the sentence that it has printed."""


def take_reported() -> str:
    """Return the failure that this process reported before it tried again. No child inherits it."""
    return os.environ.pop(_REPORTED, "")


def try_again(runtime: Runtime, sentence: str, ended: Callable[[], bool]) -> None:
    """Tell commands the sentence for a while, then start this program again in the same process.

    Return once `ended` does. The service manager takes the unit for started, so that a boot goes on.
    """
    from fenka.workstation import (
        lifetime,
    )  # It imports asyncio, which would cost each command time.

    lifetime.notify(f"READY=1\nSTATUS={sentence}")
    if _answer(runtime, sentence, ended):
        return
    _start_again({**os.environ, _REPORTED: sentence})


def _start_again(environment: dict[str, str]) -> NoReturn:
    os.execve(sys.executable, sys.orig_argv, environment)


def _answer(runtime: Runtime, sentence: str, ended: Callable[[], bool]) -> bool:
    """Answer who connects until the next start is due. Return whether the daemon is to end."""
    deadline = time.monotonic() + RETRY_S
    line = sentence.encode(errors="replace")[:_MAX_BYTES]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.setblocking(False)
        try:
            server.bind(_name(runtime))
            server.listen(_BACKLOG)
            waited = [server]
        except OSError:
            waited = []  # Another user may have taken the name: commands do not believe that user.
        while (left := deadline - time.monotonic()) > 0:
            if ended():
                return True
            if select.select(waited, [], [], min(left, _POLL_S))[0]:
                _tell(server, line)
    return ended()


def _tell(server: socket.socket, line: bytes) -> None:
    """Send one client the sentence. It fits the socket's buffer, so nobody is waited for."""
    try:
        connection, _ = server.accept()
        with connection:
            connection.setblocking(False)
            connection.send(line)
    except OSError:
        return


def failure(runtime: Runtime) -> str:
    """Return why this directory's daemon does not start, if one of a trusted user waits; else nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(_name(runtime))
            if peer(connection).uid not in runtime.owners:
                return ""
            return connection.recv(_MAX_BYTES).decode(errors="replace")
        except OSError:
            return ""


def _name(runtime: Runtime) -> str:
    return f"{runtime.name}/failing"
