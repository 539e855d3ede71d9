"""Receives the descriptors of one hook's message, and prints what they hold: a program of its own.

Anybody may send descriptors of anything. Before a file of a FUSE file system is closed, the kernel waits for
its owner's answer, and no signal ends that. So the daemon itself never has them. It starts this program with
the connection as standard input, and without any package.
"""

import contextlib
import fcntl
import os
import re
import select
import socket
import struct
from pathlib import Path

HEADER = struct.Struct("=c3I2Q")
"""A status; the bytes of device, state and config that follow; the init's PID, and when it was started."""

OK, MALFORMED, NOT_SEALED, GONE = b"+", b"m", b"s", b"g"

MAX_DEVICE_BYTES = 1024
MAX_STATE_BYTES, MAX_CONFIG_BYTES = 1 << 20, 4 << 20

_SO_PASSRIGHTS = 83
"""Linux 6.16; Python does not name it."""

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _NoRequest(Exception):
    """The message is no hook's. The argument is the status."""


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the device and the descriptors. No others are left in the connection for the daemon to close."""
    device, descriptors, flags, _ = socket.recv_fds(connection, MAX_DEVICE_BYTES, 3)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    more = False
    with contextlib.suppress(BlockingIOError):
        while connection.recv(1, socket.MSG_DONTWAIT):
            more = True
    if more or len(descriptors) != 3 or flags & socket.MSG_CTRUNC:
        raise _NoRequest(MALFORMED)
    return device, descriptors


def _read_sealed(descriptor: int, most: int) -> bytes:
    """Read sealed memory, which nobody can change or delay; one byte more than the most if there is more."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise _NoRequest(NOT_SEALED)
    return os.pread(descriptor, most + 1, 0)


def _identify(descriptor: int) -> tuple[int, int]:
    """Return the PID of a pidfd's process, and when it was started."""
    try:
        text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        found = re.search(r"^Pid:\t([1-9][0-9]*)$", text, re.MULTILINE)
        if found is None:
            raise _NoRequest(GONE)
        started = int(Path(f"/proc/{found[1]}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        raise _NoRequest(GONE) from None
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if poll.poll(0):
        raise _NoRequest(GONE)
    return int(found[1]), started


def _message(connection: socket.socket) -> bytes:
    try:
        device, (state, config, init) = _receive(connection)
        parts = (
            device,
            _read_sealed(state, MAX_STATE_BYTES),
            _read_sealed(config, MAX_CONFIG_BYTES),
        )
        identity = _identify(init)
    except _NoRequest as why:
        return HEADER.pack(why.args[0], 0, 0, 0, 0, 0)
    return HEADER.pack(OK, *map(len, parts), *identity) + b"".join(parts)


def main() -> None:
    """Print one message."""
    with socket.socket(fileno=os.dup(0)) as connection:
        left = memoryview(_message(connection))
    while left:
        left = left[os.write(1, left) :]
    # The daemon waits for this, and not for the files that are closed at the end.
    os.close(1)


if __name__ == "__main__":
    main()
