"""Who is at the other end of a Unix socket: the kernel knows."""

import errno
import os
import pwd
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_SO_PEERPIDFD = 77
"""Linux 6.5; Python does not name it."""


@dataclass(frozen=True, slots=True)
class Process:
    """The process that connected, and no other that gets its PID. descriptor: a pidfd, to be closed."""

    pid: int
    uid: int
    gid: int
    descriptor: int

    def lives(self) -> bool:
        """Whether it has not ended. What was read of its PID before this says yes was the process's own."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Forget it."""
        os.close(self.descriptor)


def process(connection: socket.socket) -> Process:
    """The process at the other end. Raises ProcessLookupError if it is gone, OSError.

    Whoever it has passed the connection to, or become by exec, it is the one that connected.
    """
    pid, uid, gid = peer(connection)
    try:
        descriptor = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as why:
        if why.errno == errno.ENOPROTOOPT:
            return _by_number(pid, uid, gid)
        # Older kernels have no descriptor of what has ended, and say so in several ways.
        raise ProcessLookupError(why.errno, "the process that connected is gone") from None
    return Process(pid, uid, gid, descriptor)


def _by_number(pid: int, uid: int, gid: int) -> Process:
    """Before Linux 6.5: a PID that is used again for another user's process is not taken for the first's."""
    found = Process(pid, uid, gid, os.pidfd_open(pid))
    try:
        users = next(
            line.split()[1:]
            for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
            if line.startswith("Uid:")
        )
    except OSError:
        users = []
    if str(uid) in users and found.lives():
        return found
    found.close()
    raise ProcessLookupError(errno.ESRCH, "the process that connected is gone")


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """PID, user id and group id of the other end, from the kernel."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, gid = struct.unpack("3i", credentials)
    return pid, uid, gid


def user_name(uid: int) -> str:
    """The user's name, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
