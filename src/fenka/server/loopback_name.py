"""Host names of servers on a loopback address that nobody can guess.

Browsers keep cookies by host without the port, and pages by host and port. A port of a loopback address
changes hands when its server ends: any user of the machine may bind it. So each server has a name of its own,
new at each start, and refuses other names. So no server gets the cookies and pages of another one.

Browsers resolve names below `localhost` to the loopback address themselves, as RFC 6761, section 6.3 says.
"""

import os
import secrets

NAME_BYTES = 16
DOMAIN = "localhost"


def new_name() -> str:
    """Return a name of 128 random bits below `localhost`."""
    return f"{secrets.token_hex(NAME_BYTES)}.{DOMAIN}"


def tunnel_sentence(port: int, socket_path: str) -> str:
    """Return how a browser of another machine reaches a server through its Unix socket.

    Args:
        port: The port of the server's address, which is then valid on the other machine, too.
        socket_path: The Unix socket, which only its user can enter.
    """
    machine = os.uname().nodename
    return f"from another machine: `ssh -L {port}:{socket_path} {machine}`, then open the same address there"
