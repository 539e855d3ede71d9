"""Finds out whether a directory has room, for jobs' output and for errors that name no file.

A program whose output goes to a file on a full disk runs on, or fails, without a word in its log. The kernel
names no file when a write fails.
"""

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PROBE_BYTES = 4096


def has_room(directory: Path) -> bool:
    """Return whether a page can be written there. True if that is not known.

    The page is written and removed: what `statvfs` returns leaves out quotas.
    """
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent  # It is about to be made there.
    probe = directory / f".room.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(probe, flags, 0o600)
        try:
            return os.write(descriptor, bytes(_PROBE_BYTES)) == _PROBE_BYTES
        finally:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                probe.unlink()
    except OSError as why:
        return why.errno not in NO_ROOM


def lack_of_room(directory: Path) -> str:
    """Return in a sentence that a job's output is lost; empty if its directory has room."""
    if has_room(directory):
        return ""
    return (
        f"the output is lost, because {directory} is on a full file system: make room (`df`, `df -i`, "
        "`quota`)"
    )


def with_directory(why: OSError, directories: Iterable[Path]) -> OSError:
    """Return an error of a full disk with the first of these directories that is full.

    Other errors, and those that name a file, are returned unchanged.
    """
    if why.errno not in NO_ROOM or why.filename is not None:
        return why
    for directory in directories:
        if not has_room(directory):
            return OSError(why.errno, why.strerror, str(directory))
    return why
