"""Restricts a lease's directory to the lease's user."""

import errno
import os
import struct
from pathlib import Path

_ACL, _ACL_VERSION = "system.posix_acl_access", 2
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_READ_WRITE_ENTER, _ENTER, _NOTHING = 7, 1, 0
_NOBODY = 0xFFFFFFFF


def restrict_to_user(directory: Path, uid: int) -> None:
    """Let only this process's user and `uid` enter the directory, and only the former change it.

    `uid` gets an entry in the access control list instead of ownership, which would allow it to replace
    files. On a file system without such lists all users may enter, and the modes of the files decide. Raises
    OSError.
    """
    directory.chmod(0o700)
    if uid == os.geteuid():
        return
    entries = (
        (_OWNER, _READ_WRITE_ENTER, _NOBODY),
        (_USER, _ENTER, uid),
        (_GROUP, _NOTHING, _NOBODY),
        (_MASK, _ENTER, _NOBODY),
        (_OTHERS, _NOTHING, _NOBODY),
    )
    packed = struct.pack("<I", _ACL_VERSION) + b"".join(
        struct.pack("<HHI", *entry) for entry in entries
    )
    try:
        os.setxattr(directory, _ACL, packed)
    except OSError as why:
        if why.errno != errno.EOPNOTSUPP:
            raise
        directory.chmod(0o711)
