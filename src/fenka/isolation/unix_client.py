"""Connects to Unix sockets of the daemon whose queue of connections may be full for a moment."""

import socket
import struct


def connect(
    address: str, timeout_s: int, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket:
    """Return a blocking socket that is connected.

    A socket that does not block gets EAGAIN at once if the queue is full (unix(7)), so the kernel waits here.

    Args:
        address: The path, or the abstract name with its leading zero.
        timeout_s: For room in the queue. A process that accepts no connections must not block its clients.
        kind: The socket's.

    Raises OSError; BlockingIOError if there is no room.
    """
    connection = socket.socket(socket.AF_UNIX, kind)
    try:
        _set_timeout(connection, timeout_s)
        connection.connect(address)
        _set_timeout(connection, 0)
    except OSError:
        connection.close()
        raise
    return connection


def _set_timeout(connection: socket.socket, timeout_s: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", timeout_s, 0))
