"""Accepts connections at the daemon's sockets, so that a user who connects in a loop does not delay others.

The kernel keeps all connections of a socket in one queue. So nothing expensive happens at accept: the kernel
names the user, and whose quota is full is refused. Everything else is done in that user's share of time.
"""

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fenka import procfs
from fenka.build import build_id
from fenka.hardware.peer_credentials import PeerProcess, peer, process
from fenka.workstation import foreign_descriptors, protocol
from fenka.workstation.admission import Admission

MAX_ACCEPTED = 128
"""Connections that are accepted at once, before the daemon does other work."""

RETRY_S = 0.2
"""After an accept that failed, as it does without a free descriptor."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The process that connected, and the user that it counts for in quotas and fair shares."""

    process: PeerProcess
    account: int


def account_of(process: PeerProcess) -> int:
    """Return the user that a process counts for in quotas and fair shares; its rights stay its own.

    A process in another user namespace may have any of thousands of IDs that its maker has there. It counts
    for the user who made the outermost of these namespaces, unless that is root, who has no quotas.

    Raises ProcessLookupError if the process has ended: nobody can tell its namespace any more.
    """
    owner = None
    with contextlib.suppress(OSError):  # The kernel may not let us read it.
        owner = procfs.user_namespace_owner(process.pid)
    if not process.lives():
        # The PID may be another user's.
        raise ProcessLookupError("the process that connected is gone")
    return owner or process.uid


def admit(connection: socket.socket, quotas: Admission) -> Caller:
    """Count a connection for its user. The caller gives it back, and closes the process's descriptor.

    Raises QuotaExceeded, OSError.
    """
    quotas.check_connections(peer(connection).uid)
    connected = process(connection)
    try:
        account = account_of(connected)
        quotas.add_connection(account)
    except BaseException:
        connected.close()
        raise
    return Caller(connected, account)


def refuse(connection: socket.socket, reason: str) -> None:
    """Send a client of the protocol one sentence, and close the connection. It never waits."""
    messages = (protocol.Hello(build=build_id()), protocol.Failure(reason))
    with connection, contextlib.suppress(OSError):
        connection.send(b"".join(protocol.encode(message) + b"\n" for message in messages))


def hung_up(connection: socket.socket) -> bool:
    """Return whether the other end has closed the connection, so that nobody reads an answer."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always reported.
    return bool(poll.poll(0))


@contextlib.contextmanager
def accepting(
    server: socket.socket, serve: Callable[[socket.socket], None], *, descriptors: bool = False
) -> Iterator[None]:
    """Accept connections while in the context.

    Args:
        server: A listening socket.
        serve: Gets each connection that is still open, which does not block, and closes it. It must not wait.
        descriptors: Whether clients may send descriptors.
    """
    if not descriptors:
        foreign_descriptors.refuse(server)
    loop = asyncio.get_running_loop()
    retry: asyncio.TimerHandle | None = None

    def resume() -> None:
        loop.add_reader(server, accept)

    def accept() -> None:
        nonlocal retry
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = server.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:
                # The socket stays readable, so an immediate second attempt would take all of the time.
                loop.remove_reader(server)
                retry = loop.call_later(RETRY_S, resume)
                return
            if hung_up(connection):
                connection.close()
                continue
            connection.setblocking(False)
            serve(connection)

    server.setblocking(False)
    resume()
    try:
        yield
    finally:
        if retry is not None:
            retry.cancel()
        loop.remove_reader(server)
