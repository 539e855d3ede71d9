"""Which processes a supervisor ends and signals, and which it does not."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fenka import procfs
from fenka.local import workload
from fenka.local.supervisor import Home, RestartPolicy, SupervisedFunction, Supervisor
from fenka.workstation.paths import Runtime
from tests.workstation.reused_pids import start_with_pid
from tests.workstation.users import User, require_root, victim

__all__ = ["victim"]


def supervise(body: Callable[[], int]) -> int:
    """Run a function in a supervised process. Return its exit code."""
    home = Home(Runtime(Path("/")), Path("/"), contextlib.nullcontext)
    supervisor = Supervisor[SupervisedFunction]()
    group = SupervisedFunction(home, "it", RestartPolicy(0), lambda _: body())
    supervisor.add(group)
    supervisor.run()
    assert group.end
    return group.end.status


def test_process_with_the_pid_of_an_ended_one_is_not_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor gets SIGTERM while it ends orphans: another process may have that PID by now."""
    require_root()
    receive, send = os.pipe()
    codes: list[int | None] = []

    def report_pid() -> int:
        os.write(send, str(os.getpid()).encode())
        return 0

    def get_signal(_kept: object) -> None:
        other = start_with_pid(int(os.read(receive, 20)))
        signal.raise_signal(signal.SIGTERM)
        if other:
            other.kill()
        codes.append(other.wait() if other else None)

    def run() -> int | None:
        supervise(report_pid)
        return codes[0]

    monkeypatch.setattr(workload, "end_orphans", get_signal)
    code = User(0).do(run)
    if code is None:
        pytest.skip("no process could get the PID of another one")
    assert code == -signal.SIGKILL


def test_orphan_is_ended_when_its_environment_cannot_be_read(victim: User) -> None:
    """So it is with programs that no debugger may attach to, such as ssh-agent."""

    def leave_orphan() -> int:
        receive, send = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                os.write(send, b"r")
                signal.pause()
            os._exit(0)
        os.wait()
        os.read(receive, 1)
        return 0

    def left() -> int:
        # This process has changed its user, so no other one may read it or its children.
        supervise(leave_orphan)
        orphans = procfs.children(os.getpid())
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        return len(orphans)

    assert victim.do(left) == 0


def test_result_is_known_when_children_are_ignored() -> None:
    """A program that ignores SIGCHLD passes that on; then the kernel would reap children unasked."""
    code = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from tests.workstation.test_guard import supervise
print(supervise(lambda: 3))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_supervisor_keeps_no_descriptor_when_its_group_has_ended() -> None:
    """A group that fails again and again is started again each time."""

    def kept() -> int:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            supervise(lambda: 0)
        return len(os.listdir("/proc/self/fd")) - before

    assert User(0).do(kept) == 0
