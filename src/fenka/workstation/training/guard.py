"""Leaves no process behind, whichever process of a training is killed.

A training has two processes besides its programs. The guard starts the supervisor, and all orphans among its
descendants become its children (subreaper). If the supervisor is killed, the guard ends them. If the guard is
killed, the supervisor gets SIGTERM. The daemon does the same for programs in leases; this is for those
without, and for the time without a daemon.
"""

import contextlib
import ctypes
import os
import select
import signal
import traceback
from collections.abc import Callable

from fenka import procfs
from fenka.workstation.client import DAEMON_MARK

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

FORWARDED = (signal.SIGINT, signal.SIGTERM)


def run(body: Callable[[], int]) -> int:
    """Run a supervisor in a child, and return its wait status when nothing of it is left.

    SIGINT and SIGTERM are forwarded to it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        code = 1
        try:
            die_with_parent(signal.SIGTERM)
            if os.getppid() == guard:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                code = body()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    status = _wait(child)
    end_orphans(guard, child)
    return status


def die_with_parent(number: int) -> None:
    """Send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _wait(child: int) -> int:
    """Wait for the supervisor, and reap orphans meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def end_orphans(guard: int, supervisor: int) -> None:
    """Kill what the processes of a training have left behind, also in sessions of their own."""
    while orphans := [
        pid for pid in procfs.children(guard) if pid != supervisor and _is_orphan(pid)
    ]:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                ending = os.pidfd_open(pid)
                os.kill(pid, signal.SIGKILL)
                select.select([ending], [], [])
                os.close(ending)


def _is_orphan(pid: int) -> bool:
    """Return whether a process lives, may be killed, and is no daemon that was started meanwhile."""
    try:
        os.kill(pid, 0)
        environment = (procfs.PROC / str(pid) / "environ").read_bytes().split(b"\0")
        return (
            procfs.start_ticks(pid) is not None and f"{DAEMON_MARK}=1".encode() not in environment
        )
    except OSError:
        # It has ended, or it is of another user: a program that has become root.
        return False
