"""Listens at a socket of the daemon's directory for one message of each client, with descriptors."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from fenka.workstation import admission


@contextlib.contextmanager
def listening(path: Path, serve: Callable[[socket.socket], None], mode: int) -> Iterator[None]:
    """Serve while in the context. Raises OSError.

    Args:
        path: The socket's. One that is there belonged to a daemon that was killed.
        serve: Gets each connection, which does not block, and closes it.
        mode: Who may connect, as of a file.
    """
    loop = asyncio.get_running_loop()

    def accept() -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.setblocking(False)
            serve(connection)

    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.setblocking(False)
        former = os.umask(0o777 & ~mode)
        try:
            server.bind(os.fspath(path))
        finally:
            os.umask(former)
        server.listen(admission.BACKLOG)
        loop.add_reader(server, accept)
        try:
            yield
        finally:
            loop.remove_reader(server)
            path.unlink(missing_ok=True)
