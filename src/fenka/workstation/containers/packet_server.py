"""Listens at a socket of the daemon's directory for one message of each client, with descriptors."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from fenka.workstation import admission
from fenka.workstation.accepting import accepting


@contextlib.contextmanager
def listening(
    path: Path, serve: Callable[[socket.socket], None], mode: int, *, descriptors: bool = False
) -> Iterator[None]:
    """Serve while in the context. Raises OSError.

    Args:
        path: The socket's. One that is there belonged to a daemon that was killed.
        serve: Gets each connection, which does not block, and closes it.
        mode: Who may connect, as of a file.
        descriptors: Whether clients may send descriptors.
    """
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        former = os.umask(0o777 & ~mode)
        try:
            server.bind(os.fspath(path))
        finally:
            os.umask(former)
        server.listen(admission.BACKLOG)
        try:
            with accepting(server, serve, descriptors=descriptors):
                yield
        finally:
            path.unlink(missing_ok=True)
