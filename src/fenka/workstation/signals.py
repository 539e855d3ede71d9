"""Signals to a job's processes, and to no others: the daemon's rights may reach every process."""

import os
import signal
from collections.abc import Callable

from fenka.isolation.processes import real_uid


def send_signal(pid: int, number: int, uid: int, belongs: Callable[[int], bool]) -> None:
    """Send a signal to a process of a job; nothing to one that is gone, is not the job's, or another user's.

    uid: the job's. Root's jobs may have processes of any user. belongs: whether the process that has this
    PID now is the job's.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # The descriptor is older than these answers. If they are about a process that has got the PID since,
        # the one that it stands for is gone, and the kernel sends nothing.
        if belongs(pid) and uid in (0, real_uid(pid)):
            signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        os.close(descriptor)
