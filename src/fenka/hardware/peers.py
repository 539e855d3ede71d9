"""Who is at the other end of a Unix socket: the kernel knows."""

import pwd
import socket
import struct


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
