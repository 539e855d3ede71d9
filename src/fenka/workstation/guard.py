"""Leaves no process behind, whichever process of a training is killed.

A training has two processes besides its programs. The guard starts the supervisor. Orphans among the
supervisor's descendants become its children (subreaper); it ends them after each attempt. If it is killed,
they become the guard's, which ends them. If the guard is killed, the supervisor gets SIGTERM. Neither ever
ends a process that is not its own child: without a guard the supervisor's parent is init, whose children
are everybody's. The daemon does the same for programs in leases; this is for those without, and for the
time without a daemon.
"""

import contextlib
import ctypes
import os
import signal
import traceback
from collections.abc import Callable, Collection

from fenka import procfs
from fenka.workstation.client import DAEMON_MARK

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

FORWARDED = (signal.SIGINT, signal.SIGTERM)


def run(body: Callable[[], int]) -> int:
    """Run a supervisor in a child, and return its wait status when nothing of it is left.

    SIGINT and SIGTERM are forwarded to it.
    """
    # Where it is ignored, the kernel reaps children unasked, and others may get their PIDs.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        code = 1
        try:
            die_with_parent(signal.SIGTERM)
            adopt_orphans()
            if os.getppid() == guard:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                code = body()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    # By a descriptor: signals may come after its end, when another process may have its PID.
    supervisor = os.pidfd_open(child)

    def forward(number: int, _frame: object) -> None:
        # It has ended, and its descriptor may be closed.
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(supervisor, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    status = _wait(child)
    os.close(supervisor)
    end_orphans()
    return status


def die_with_parent(number: int) -> None:
    """Send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _wait(child: int) -> int:
    """Wait for the supervisor, and reap orphans meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def end_orphans(kept: Collection[int] = ()) -> None:
    """Kill and reap this process's children, and what they leave behind, also in sessions of their own.

    Args:
        kept: Children that are no orphans.
    """
    me = os.getpid()
    while orphans := [pid for pid in procfs.children(me) if pid not in kept and _is_orphan(pid)]:
        for pid in orphans:
            # PermissionError: it has become root since.
            with contextlib.suppress(ProcessLookupError, ChildProcessError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for pid in procfs.children(me):
        if pid not in kept:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _is_orphan(pid: int) -> bool:
    """Return whether a process lives, may be killed, and is no daemon that was started meanwhile."""
    try:
        os.kill(pid, 0)
        lives = procfs.start_ticks(pid) is not None
    except OSError:
        # It has ended, or it is of another user: a program that has become root.
        return False
    environment = b""
    # Programs may forbid their own user to read it. Daemons do not.
    with contextlib.suppress(OSError):
        environment = (procfs.PROC / str(pid) / "environ").read_bytes()
    return lives and f"{DAEMON_MARK}=1".encode() not in environment.split(b"\0")
