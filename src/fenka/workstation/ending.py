"""Ends the supervisors of trainings and services."""

import contextlib
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FenkaError

END_TIMEOUT_S = 30.0
"""Beyond the grace period, for a supervisor to end its processes and itself."""


class JobNotEnded(FenkaError):
    """A supervisor does not end."""


def end_process(pid: int, is_meant: Callable[[], bool], name: str, grace_s: float) -> None:
    """End a supervisor, or its guard, with all its processes, and wait for its end. Raises JobNotEnded.

    Args:
        pid: The process. Another one may have taken the PID by now.
        is_meant: Returns whether the current process of the PID is the one to end.
        name: What it supervises.
        grace_s: How long its programs may take.
    """
    try:
        ending = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with contextlib.closing(os.fdopen(ending, "rb", buffering=0)):
        if not is_meant():
            return
        signal.pidfd_send_signal(ending, signal.SIGTERM)
        if not select.select([ending], [], [], grace_s + END_TIMEOUT_S)[0]:
            raise JobNotEnded(f"{name} does not end: see whether process {pid} can be killed")


def end_writers(log: Path, name: str, grace_s: float) -> None:
    """End the supervisor whose output is this file, for which no readable record names it."""
    pids = writers(log)
    # The guard forwards the signal. A second one would kill the programs at once.
    for pid in [pid for pid in pids if procfs.parent_pid(pid) not in pids]:
        end_process(pid, lambda pid=pid: pid in writers(log), name, grace_s)  # type: ignore[misc]


def writers(log: Path) -> set[int]:
    """Return the processes whose output is this file."""
    path, pids = str(log.parent.resolve() / log.name), set[int]()
    for pid in procfs.pids():
        # Those of other users cannot be read, and others may have ended.
        with contextlib.suppress(OSError):
            if os.readlink(procfs.PROC / str(pid) / "fd" / "1").removesuffix(" (deleted)") == path:
                pids.add(pid)
    return pids
