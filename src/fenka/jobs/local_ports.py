"""Ports of this machine for processes that others must find before they listen.

A port is chosen before the process binds it. Until then a lock keeps it from the user's other jobs. The lock
is in a directory of the user's own, and the port is drawn at random, so that other users cannot bind it
first. It is below the kernel's range for outgoing connections, which therefore do not take it.
"""

import contextlib
import errno
import fcntl
import os
import random
import socket
import struct
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path

from fenka.core.errors import FenkaError

LOOPBACK = "127.0.0.1"


_RANDOM_PORTS = range(23456, 32768)
"""From arena's port for PyTorch up to Linux's range for outgoing connections (32768 to 60999)."""


_LOCKS = "ports.lock"


MAX_TAKEN = 10
"""How often in a row other programs may take a job's ports before it has failed."""


class NoFreePort(FenkaError):
    """No port is free."""


class PortReservations:
    """The ports that a user's jobs have reserved.

    Args:
        directory: A directory of the user's own, which is created. In a file each port has a byte to lock.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def reserve(
        self,
        ports: Sequence[int] | None = None,
        address: str = LOOPBACK,
        *,
        reuse: bool = False,
    ) -> tuple[int, FileIO]:
        """Reserve a free port.

        Args:
            ports: The first free one of these; None for any port, drawn at random.
            address: The address on which the process will listen.
            reuse: Accept a port with connections of an earlier process, as a server with SO_REUSEADDR can.

        Returns:
            The port, and a lock that reserves it until all copies of it are closed.

        Raises:
            NoFreePort: None of the ports is free.
            OSError: The locks cannot be written.
        """
        ports = ports or _shuffled()
        with contextlib.ExitStack() as unless_free:
            lock = unless_free.enter_context(self._open())
            for port in ports:
                if _lock(lock, port) and _is_free(port, address, reuse=reuse):
                    unless_free.pop_all()
                    return port, lock
                _unlock(lock, port)
        raise _none_free(ports, address)

    def _open(self) -> FileIO:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / _LOCKS
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return FileIO(os.open(path, flags, 0o600), "r+")


def taken_port(ports: Iterable[int]) -> int | None:
    """Return a port that a program has taken; None if a server can bind each of them. Raises OSError."""
    return next((port for port in ports if not _is_free(port, "0.0.0.0", reuse=True)), None)


def _shuffled() -> Sequence[int]:
    return random.SystemRandom().sample(_RANDOM_PORTS, len(_RANDOM_PORTS))


def _none_free(ports: Sequence[int], address: str) -> NoFreePort:
    if len(ports) == 1:
        return NoFreePort(f"port {ports[0]} of {address} is used or not allowed: choose another")
    return NoFreePort(f"no port from {min(ports)} to {max(ports)} is free on {address}")


def _is_free(port: int, address: str, *, reuse: bool) -> bool:
    with socket.socket(_family(address)) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        return _binds(trial, port, address)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _binds(trial: socket.socket, port: int, address: str) -> bool:
    """Bind a socket, and return whether the port was free. Raises OSError."""
    try:
        trial.bind((address, port))
    except OSError as why:
        if why.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise
    return True


def _lock(file: FileIO, port: int) -> bool:
    """Return whether the port is reserved now. The lock ends with the last copy of the descriptor."""
    try:
        _set_lock(file, port, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


def _unlock(file: FileIO, port: int) -> None:
    _set_lock(file, port, fcntl.F_UNLCK)


def _set_lock(file: FileIO, port: int, kind: int) -> None:
    """Change the lock on the byte of a port. Raises OSError."""
    fields = struct.pack("@hhqqi4x", kind, os.SEEK_SET, port, 1, 0)
    fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, fields)
