"""Sends signals to a job's processes only, although the daemon may have the right to signal any process."""

import os
import signal
from collections.abc import Callable

from fenka.procfs import real_uid


def send_signal(pid: int, number: int, uid: int, belongs: Callable[[int], bool]) -> None:
    """Send a signal to a process, unless it has ended or is not the job's.

    Args:
        pid: The process.
        number: The signal.
        uid: The job's user. Processes of root's jobs may run as any user.
        belongs: Returns whether the current process of a PID is the job's.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # The descriptor is older than these answers. If another process has taken the PID in between, the
        # descriptor's process has ended, and the kernel sends nothing.
        if belongs(pid) and uid in (0, real_uid(pid)):
            signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        os.close(descriptor)
