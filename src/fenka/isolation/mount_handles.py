"""Copies of mounts that another process places in its own mount namespace.

A copy is detached: no path leads to it, and only those who get its descriptor can mount it. It is private:
copies of a shared mount would pass on what is mounted in them, to this machine and to other containers.
"""

import errno
import os
import struct
from pathlib import Path

from fenka.isolation.sandbox import AT_FDCWD, IsolationError, system_call

# The same on all processors; Python does not name them.
_OPEN_TREE, _MOUNT_SETATTR = 428, 442
_CLONE, _CLOEXEC = 0x1, 0o2000000
_AT_EMPTY_PATH = 0x1000
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_PRIVATE = 1 << 18


def copy_mount(path: Path, *, writable: bool = False, device: bool = False) -> int:
    """Return a descriptor of a detached copy of a file or directory, without setuid programs and devices.

    Args:
        path: The file or directory. Mounts below it are not copied.
        writable: Programs may write there, and execute nothing.
        device: It is a device node that programs may open.

    Raises IsolationError, OSError.
    """
    try:
        descriptor = system_call(_OPEN_TREE, AT_FDCWD, os.fsencode(path), _CLONE | _CLOEXEC)
        flags = _NOSUID | (0 if device else _NODEV) | (_NOEXEC if writable or device else _RDONLY)
        attributes = struct.pack("=QQQQ", flags, 0, _PRIVATE, 0)
        try:
            system_call(
                _MOUNT_SETATTR, descriptor, b"", _AT_EMPTY_PATH, attributes, len(attributes)
            )
        except OSError:
            os.close(descriptor)
            raise
    except OSError as why:
        if why.errno == errno.ENOSYS:
            raise IsolationError("slices for containers need Linux 5.12 or newer") from None
        raise OSError(why.errno, why.strerror, str(path)) from None
    return descriptor
