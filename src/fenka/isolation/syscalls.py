"""System calls for mounts and namespaces that Python 3.11 lacks. Each raises OSError."""

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, RECURSIVE = 1, 2, 4, 8, 32, 4096, 16384
SLAVE = 1 << 19
DETACH = 2
_PAGE = 4096

NEW_MOUNTS = 0x00020000
NEW_USER = 0x10000000

_CAPBSET_DROP = 24


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, *names: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), *names)


def unshare(flags: int) -> None:
    """Move this process to new namespaces of these kinds."""
    _check(_libc().unshare(flags))


def join(pidfd: int, flags: int) -> None:
    """Move this process to a process's namespaces of these kinds."""
    _check(_libc().setns(pidfd, flags))


def drop_capabilities() -> None:
    """Prevent programs that this process executes from gaining capabilities, also by their file."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for number in range(last + 1):
        _check(_libc().prctl(_CAPBSET_DROP, number, 0, 0, 0))


def mount(
    source: Path | str | None, target: Path, flags: int, kind: str = "", data: str = ""
) -> None:
    """Call mount(2). kind and data: for a new file system."""
    origin = os.fsencode(source) if source is not None else (kind or "none").encode()
    _check(
        _libc().mount(
            origin,
            os.fsencode(target),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            data.encode() or None,
        ),
        str(target),
    )


def mount_small(directory: Path, size: int) -> None:
    """Mount a tmpfs with room for one file of `size` bytes, rounded up to pages."""
    size = -(-size // _PAGE) * _PAGE
    flags = NOSUID | NODEV | NOEXEC
    mount("fenka", directory, flags, "tmpfs", f"mode=0755,size={size},nr_inodes=2")


def unmount_all(directory: Path, unmount: Callable[[Path], None]) -> None:
    """Remove all mounts on a directory, if any."""
    while True:
        try:
            unmount(directory)
        except OSError as why:
            if why.errno in (errno.EINVAL, errno.ENOENT):  # nothing is mounted there
                return
            raise


def unmount(target: Path) -> None:
    """Remove a mount at once. Open files in it stay usable."""
    _check(_libc().umount2(os.fsencode(target), DETACH), str(target))
