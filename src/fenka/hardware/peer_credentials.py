"""The process at the other end of a Unix socket, as the kernel reports it."""

import errno
import os
import pwd
import select
import socket
import struct
from dataclasses import dataclass

from fenka import procfs

_SO_PEERPIDFD = 77
"""Linux 6.5; Python does not name it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected or listens. Its PID may be reused once it has ended."""

    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class Process(Peer):
    """The process that connected, even if its PID is reused. descriptor: a pidfd, to be closed."""

    descriptor: int
    start_ticks: int
    """When it started; valid while it lives."""

    def lives(self) -> bool:
        """Return whether it has not ended. If so, everything read of its PID before was this process's."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return self.start_ticks != 0 and not poll.poll(0)

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self.descriptor)


def process(connection: socket.socket) -> Process:
    """Return the process that connected, even if it passed the connection on or called exec.

    Raises ProcessLookupError if it has ended, OSError.
    """
    connected = peer(connection)
    # If it lives after this, the PID was its own.
    started = procfs.start_ticks(connected.pid) or 0
    try:
        descriptor = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return _by_number(connected)
        # Older kernels return several errors for a process that has ended.
        raise ProcessLookupError(error.errno, "the process that connected is gone") from None
    return Process(connected.pid, connected.uid, descriptor, started)


def _by_number(connected: Peer) -> Process:
    """Return the process by its PID, before Linux 6.5. A PID reused by another user is an error."""
    descriptor = os.pidfd_open(connected.pid)
    try:
        users, started = procfs.user_ids(connected.pid), procfs.start_ticks(connected.pid) or 0
    except OSError:
        users, started = [], 0
    candidate = Process(connected.pid, connected.uid, descriptor, started)
    if connected.uid in users and candidate.lives():
        return candidate
    candidate.close()
    raise ProcessLookupError(errno.ESRCH, "the process that connected is gone")


def peer(connection: socket.socket) -> Peer:
    """Return the process at the other end."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", credentials)
    return Peer(pid, uid)


def user_name(uid: int) -> str:
    """Return the user's name, or the number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
