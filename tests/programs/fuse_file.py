"""Serve a FUSE file system with one file, from standard input: who closes the file waits for ever.

Only the process whose PID is the argument is answered. The protocol is that of Linux (linux/fuse.h).
"""

import os
import struct
import sys

INIT, LOOKUP, GETATTR, OPEN, RELEASE, FLUSH = 26, 1, 3, 14, 18, 25
WITHOUT_ANSWER = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
ENOSYS = 38


def attributes(node: int) -> bytes:
    """The attributes of the root directory, node 1, or of the file."""
    mode = 0o40755 if node == 1 else 0o100644
    return struct.pack("<6Q10I", node, 10, 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def answer(operation: int, node: int) -> bytes | None:
    """The answer to a request; None for an operation that is not known."""
    if operation == INIT:
        return struct.pack("<4I2H2I2H2I28x", 7, 31, 65536, 0, 10, 10, 65536, 1, 0, 0, 0, 0)[:64]
    if operation == LOOKUP:
        return struct.pack("<4Q2I", 2, 1, 1000, 1000, 0, 0) + attributes(2)
    if operation == GETATTR:
        return struct.pack("<Q2I", 1000, 0, 0) + attributes(node)
    if operation == OPEN:
        return struct.pack("<Q2I", 7, 0, 0)
    return b"" if operation in (RELEASE, FLUSH) else None


def main(friend: int) -> None:
    """Answer requests until the file system is unmounted."""
    while True:
        request = os.read(0, 1 << 18)
        _, operation, unique, node, _, _, pid = struct.unpack_from("<2I2Q3I", request)
        if operation in WITHOUT_ANSWER or (operation == FLUSH and pid != friend):
            continue
        data = answer(operation, node)
        error = -ENOSYS if data is None else 0
        os.write(0, struct.pack("<IiQ", 16 + len(data or b""), error, unique) + (data or b""))


if __name__ == "__main__":
    main(int(sys.argv[1]))
