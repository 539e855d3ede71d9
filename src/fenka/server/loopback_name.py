"""Host names of servers on a loopback address that nobody can guess.

Browsers keep cookies by host without the port, and pages by host and port. A port of a loopback address
changes hands when its server ends: any user of the machine may bind it. So each server has a name of its own,
new at each start, and refuses other names. So no server gets the cookies and pages of another one.

Browsers resolve names below `localhost` to the loopback addresses themselves, as RFC 6761, section 6.3 says:
first to ::1, then to 127.0.0.1. If a server listens at one address alone, any user may answer at the
other one. So each server with a name holds its port at both.
"""

import errno
import os
import secrets
import socket
from collections.abc import Iterable

NAME_BYTES = 16
DOMAIN = "localhost"

RESOLVED = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}
"""Where browsers look for a server whose name ends with `.localhost`, with the addresses' families."""

_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
"""Errors of a machine that has no such address, so that nobody listens there."""


def new_name() -> str:
    """Return a name of 128 random bits below `localhost`."""
    return f"{secrets.token_hex(NAME_BYTES)}.{DOMAIN}"


def hold_other_address(address: str, port: int) -> list[socket.socket]:
    """Bind a server's port at the loopback addresses at which it does not listen, so that nobody else can.

    Connections there are refused, and browsers try the next address.

    Args:
        address: Where the server listens: a loopback address, or the unspecified one of a family.
        port: Of the server.

    Returns:
        Sockets, to be kept open as long as the server is.

    Raises:
        OSError: EADDRINUSE if another program has the port there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = []
    for other, other_family in RESOLVED.items():
        if other_family == family:
            continue
        try:
            place = socket.socket(other_family)
            held.append(place)
            place.bind((other, port))
        except OSError as why:
            if why.errno not in _ABSENT:
                release(held)
                raise
    return held


def release(held: Iterable[socket.socket]) -> None:
    """Let others have the addresses."""
    for place in held:
        place.close()


def tunnel_sentence(port: int, socket_path: str) -> str:
    """Return how a browser of another machine reaches a server through its Unix socket.

    Args:
        port: The port of the server's address, which is then valid on the other machine, too.
        socket_path: The Unix socket, which only its user can enter.
    """
    machine = os.uname().nodename
    return f"from another machine: `ssh -L {port}:{socket_path} {machine}`, then open the same address there"
