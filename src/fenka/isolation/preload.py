"""Keeps the host's /etc/ld.so.preload in place while leases mount their own over it."""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

from fenka import procfs

PRELOAD = Path("/etc/ld.so.preload")


def remove() -> None:
    """Remove the empty file that `sandbox.enter` may have created as root, if no lease needs it.

    Removing a file drops the mounts over it in all namespaces. The lock also protects leases in other PID
    namespaces, whose processes are not visible.
    """
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError), PRELOAD.open("r+b") as file:
        # Fails at once while there is a lease. The file then stays, which is harmless.
        _lock(file.fileno(), fcntl.F_WRLCK, fcntl.F_OFD_SETLK)
        if not file.read(1) and not _is_mounted():
            PRELOAD.unlink()


def _is_mounted() -> bool:
    """Return whether any process sees a mount over the file. Raises OSError."""
    seen: set[int] = set()
    for pid in procfs.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            thread = procfs.living_thread(pid)
            inode = procfs.namespace_inode(thread, "mnt")
            mounts = procfs.mounts(thread) if inode not in seen else ()
            if any(mount.point == PRELOAD for mount in mounts):
                return True
            seen.add(inode)
    return False


def lock() -> int | None:
    """Keep /etc/ld.so.preload in place while any process has the returned descriptor open.

    Return None if the file does not exist and cannot be created: then no host file is mounted over.
    """
    while True:
        try:
            descriptor = os.open(PRELOAD, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return None
        _lock(descriptor, fcntl.F_RDLCK, fcntl.F_OFD_SETLKW)
        status = os.fstat(descriptor)
        if status.st_nlink:
            if not status.st_size and os.geteuid() == 0:
                os.fchmod(descriptor, 0o644)  # regardless of the umask: all users' linkers read it
            return descriptor
        os.close(descriptor)  # it was removed between open and lock


def _lock(descriptor: int, kind: int, command: int) -> None:
    """Lock a file until its open file description is closed, across exec and fork. Raises OSError.

    Unlike with flock(2), users who may only read the file cannot lock it exclusively and block others.
    """
    fcntl.fcntl(descriptor, command, struct.pack("@hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))
