"""The process at the other end of a Unix socket and the user of a local one, as the kernel reports them."""

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


class NotTheOwner(OSError):
    """An address that a program of this user should serve is another user's program's, or nobody's."""

    def __init__(self, address: str, uid: int | None) -> None:
        found = "nobody listens there" if uid is None else f"user {uid} listens there"
        super().__init__(errno.ECONNREFUSED, f"{address} is not the replica's: {found}")


def listener_uid(place: Place) -> int | None:
    """Return the user whose program accepts connections to this place; None for none. Raises OSError.

    The kernel is asked for one socket (sock_diag(7)): /proc/net/tcp takes milliseconds on a machine with many
    connections, and is read only where the kernel has no inet_diag.
    """
    found = _find(place, _ANY)
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


def peer_uid(place: Place, client: Place) -> int | None:
    """Return the user whose program has a connection to `place`, or will accept it. Raises OSError.

    Args:
        place: Where the program listens.
        client: The connection's own end.
    """
    found = _find(place, client)
    if found is not None and found[1]:
        return found[0]
    # Nobody has accepted it. The connection ends with its listener, so the one of now is the one.
    return listener_uid(place)


def client_uid(client: Place, place: Place) -> int | None:
    """Return the user of a connection's client on this machine; None if it has gone. Raises OSError."""
    found = _find(client, place)
    return found and found[0]


def check_peer(connection: socket.socket, uid: int) -> None:
    """Raise NotTheOwner unless an open connection leads to a program of this user. Raises OSError.

    It is one of IPv4, or of a Unix socket.
    """
    place = connection.getpeername()
    if connection.family == socket.AF_UNIX:
        listener = peer(connection).uid
        if listener != uid:
            raise NotTheOwner(place, listener)
        return
    # Programs of root may listen, give up their rights, and accept as another user.
    found = peer_uid(place, connection.getsockname()) if uid else listener_uid(place)
    if found != uid:
        raise NotTheOwner(f"port {place[1]}", found)


def _find(local: Place, remote: Place) -> tuple[int, int] | None:
    """Return the user and the inode of the socket that gets packets from `remote`; None if there is none."""
    identity = _SOCKET_ID.pack(
        *(local[1], remote[1]), *(socket.inet_aton(end[0]) for end in (local, remote)), _NO_COOKIE
    )
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
