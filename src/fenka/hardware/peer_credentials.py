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
class Process:
    """The process that connected, even if its PID is reused. descriptor: a pidfd, to be closed."""

    pid: int
    uid: int
    gid: int
    descriptor: int

    def lives(self) -> bool:
        """Return whether it has not ended. If so, everything read of its PID before was this process's."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self.descriptor)


def process(connection: socket.socket) -> Process:
    """Return the process that connected, even if it passed the connection on or called exec.

    Raises ProcessLookupError if it has ended, OSError.
    """
    pid, uid, gid = peer(connection)
    try:
        descriptor = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return _by_number(pid, uid, gid)
        # Older kernels return several errors for a process that has ended.
        raise ProcessLookupError(error.errno, "the process that connected is gone") from None
    return Process(pid, uid, gid, descriptor)


def _by_number(pid: int, uid: int, gid: int) -> Process:
    """Return the process by its PID, before Linux 6.5. A PID reused by another user is an error."""
    candidate = Process(pid, uid, gid, os.pidfd_open(pid))
    try:
        users = procfs.user_ids(pid)
    except OSError:
        users = []
    if uid in users and candidate.lives():
        return candidate
    candidate.close()
    raise ProcessLookupError(errno.ESRCH, "the process that connected is gone")


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return PID, user ID and group ID of the other end."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, gid = struct.unpack("3i", credentials)
    return pid, uid, gid


def user_name(uid: int) -> str:
    """Return the user's name, or the number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
