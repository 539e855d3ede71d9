"""Ports of this machine for processes that others must find before they listen.

A port is chosen before the process binds it. Until then a lock keeps it from fenka's other jobs. It is below
the kernel's range for outgoing connections, which therefore do not take it.
"""

import contextlib
import socket

from fenka.core.errors import FenkaError

LOOPBACK = "127.0.0.1"

FIRST_PORT = 23456
"""arena's port for PyTorch, and below Linux's range for outgoing connections (32768 to 60999)."""


class NoFreePort(FenkaError):
    """No port is free."""


def reserve_port(
    first: int, address: str = LOOPBACK, *, reuse: bool = False
) -> tuple[int, socket.socket]:
    """Reserve a free port.

    Args:
        first: The lowest acceptable port.
        address: The address on which the process will listen.
        reuse: Accept a port with connections of an earlier process, as a server with SO_REUSEADDR can.

    Returns:
        The port, and a lock that reserves it until all copies of it are closed.

    Raises:
        NoFreePort: All ports from the first on are used.
    """
    for port in range(first, 65536):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as unless_free, socket.socket() as trial:
            unless_free.callback(lock.close)
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            with contextlib.suppress(OSError):
                lock.bind(f"\0fenka/port/{port}")
                trial.bind((address, port))
                unless_free.pop_all()
                return port, lock
    raise NoFreePort(f"no port from {first} on is free on {address}")
