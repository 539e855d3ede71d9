"""The process at the other end of a Unix socket and the user of a local one, as the kernel reports them."""

import contextlib
import ctypes
import errno
import grp
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
class PeerProcess(Peer):
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


def process(connection: socket.socket) -> PeerProcess:
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
    return PeerProcess(connected.pid, connected.uid, descriptor, started)


def _by_number(connected: Peer) -> PeerProcess:
    """Return the process by its PID, before Linux 6.5. A PID reused by another user is an error."""
    descriptor = os.pidfd_open(connected.pid)
    try:
        users, started = procfs.user_ids(connected.pid), procfs.start_ticks(connected.pid) or 0
    except OSError:
        users, started = [], 0
    candidate = PeerProcess(connected.pid, connected.uid, descriptor, started)
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


def group_name(uid: int) -> str:
    """Return the name of the user's primary group, or its number; empty for an unknown user."""
    try:
        gid = pwd.getpwuid(uid).pw_gid
    except KeyError:
        return ""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


_SYS_PIDFD_GETFD = 438
"""The same on all processors; Python does not name it."""
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_ALL_STATES = 0xFFFFFFFF
_NO_COOKIE = 2**64 - 1

_HEADER = struct.Struct("=IHHII")
_OPTIONS = struct.Struct("=BBBxI")
_SOCKET_ID = struct.Struct(">HH16s16s4xQ")
_ANSWER = struct.Struct("=BBBB48xIIIII")
"""inet_diag_msg: family, state, timer, retransmissions, socket, expiry, two queues, user, inode."""

_ANY = ("0.0.0.0", 0)

Place = tuple[str, int]
"""An address of IPv4 and a port."""


def listener_uid(place: Place) -> int | None:
    """Return the user whose program accepts connections to this place; None for none. Raises OSError.

    The kernel is asked for one socket (sock_diag(7)): /proc/net/tcp takes milliseconds on a machine with many
    connections, and is read only where the kernel has no inet_diag.
    """
    found = _find(place)
    if found is not None:
        return found[0]
    # A kernel without inet_diag finds nothing.
    return procfs.listeners().get(place[1])


def socket_listener_uid(path: str) -> int | None:
    """Return the user whose program listens at a Unix socket; None for nobody. It sees a connection."""
    with socket.socket(socket.AF_UNIX) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except OSError:
            return None
        return peer(trial).uid


def copy_listener(place: Place, pid: int) -> "ListenerCopy | None":
    """Return a copy of the socket on which a process or a descendant listens.

    Return None if none of them does, or if the kernel does not allow it: it takes Linux 5.6, and processes
    that this user may trace (pidfd_getfd(2)). Raises OSError.
    """
    found = _find(place)
    if found is None:
        return None
    for process in procfs.with_descendants(pid):
        for number in procfs.descriptors_of_socket(process, found[1]):
            with contextlib.suppress(OSError):
                return ListenerCopy(_copy_descriptor(process, number), found[1], pid)
    return None


@dataclass(frozen=True, slots=True)
class ListenerCopy:
    """A copy of a listening socket. While it is open, no other program can listen at the address.

    Attributes:
        descriptor: The copy, to be closed.
        inode: The socket.
        pid: The process that has it, or whose descendant has it.
    """

    descriptor: int
    inode: int
    pid: int

    def is_served(self) -> bool:
        """Return whether the process or a descendant still has the socket open."""
        processes = procfs.with_descendants(self.pid)
        return any(procfs.descriptors_of_socket(process, self.inode) for process in processes)

    def close(self) -> None:
        """Close the copy."""
        os.close(self.descriptor)


def _copy_descriptor(pid: int, number: int) -> int:
    """Return a copy of another process's descriptor. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy: int = libc.syscall(_SYS_PIDFD_GETFD, process, number, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return copy
    finally:
        os.close(process)


def _find(place: Place) -> tuple[int, int] | None:
    """Return the user and the inode of the socket that accepts connections; None if there is none."""
    ends = (place, _ANY)
    addresses = (socket.inet_aton(end[0]) for end in ends)
    identity = _SOCKET_ID.pack(*(end[1] for end in ends), *addresses, _NO_COOKIE)
    request = _OPTIONS.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, _ALL_STATES) + identity
    header = _HEADER.pack(
        _HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, os.getpid(), 0
    )
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.send(header + request)
            answer = kernel.recv(1 << 13)
    except OSError as why:
        if why.errno != errno.EPROTONOSUPPORT:
            raise
        return None
    if _HEADER.unpack_from(answer)[1] == _NLMSG_ERROR:
        return None
    *_, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    return uid, inode
