"""Locks a runtime directory, so that at most one daemon serves it."""

import contextlib
import fcntl
import os
from typing import BinaryIO

from fenka.core.errors import FenkaError
from fenka.isolation.files import with_file_name
from fenka.workstation.paths import Runtime


class AlreadyRunning(FenkaError):
    """Another daemon serves this runtime directory."""


def lock_runtime(runtime: Runtime) -> BinaryIO:
    """Lock the directory until the result is closed. Raises AlreadyRunning, UnsafeDirectory, OSError."""
    runtime.create()
    # Whoever may read a file may also lock it, and would then prevent the next daemon's start.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as opened:
        lock = opened.enter_context(open(os.open(runtime.lock, flags, 0o600), "r+b", buffering=0))
        with with_file_name(runtime.lock):
            os.fchmod(lock.fileno(), 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = lock.read(20).decode(errors="replace").strip() or "unknown"
                raise AlreadyRunning(
                    f"a fenka daemon is already running here (process {holder})"
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()).encode())
        opened.pop_all()
        return lock
