"""A daemon whose directory is removed, as at its user's logout."""

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from fenka.workstation import presence
from fenka.workstation.paths import Runtime
from tests.workstation.conftest import HOLD, Program, Workstation, eventually, refused


@contextlib.contextmanager
def directory_removed(station: Workstation) -> Iterator[None]:
    """Remove the directory of a daemon that is stopped, because it writes there, until the block ends."""
    daemon = station.daemon_pid()
    os.kill(daemon, signal.SIGSTOP)
    shutil.rmtree(station.root)
    yield
    os.kill(daemon, signal.SIGCONT)


@pytest.fixture
def holder(t4: Workstation) -> Program:
    """A program that holds 4 units."""
    program = t4.run("--gpu-mem", "4", "--name", "holder", "--", *HOLD, "100")
    program.report()
    return program


def test_daemon_makes_its_directory_again_when_it_was_removed(
    t4: Workstation, holder: Program
) -> None:
    """The first command afterwards finds the same daemon, its jobs and its options."""
    daemon = t4.daemon_pid()
    with directory_removed(t4):
        pass
    assert t4.jobs()["holder"]["pids"] == [holder.pid]
    assert t4.daemon_pid() == daemon
    refused = t4.fenka("run", "--gpu-mem", "12", "--no-wait", "--", "true")
    assert refused.stderr == "fenka: no GPU fits: 1 of 1 has too little memory\n"
    assert holder.end() == 0
    eventually(lambda: not t4.jobs())
    assert t4.ok("run", "--gpu-mem", "14", "--no-wait", "--", "echo", "free") == "free\n"


def test_pending_request_keeps_its_place_when_the_directory_was_removed(
    t4: Workstation, holder: Program
) -> None:
    """Its command reconnects."""
    waiting = t4.run("--gpu-mem", "12", "--name", "waits", "--", *HOLD, "1")
    assert "position 1" in waiting.says()
    with directory_removed(t4):
        pass
    assert holder.end() == 0
    waiting.report()


def test_daemon_is_stopped_when_its_directory_cannot_be_made_again(
    t4: Workstation, holder: Program
) -> None:
    """A file in the directory's place stands for logind, which lets nobody make it before the next login."""
    daemon = t4.daemon_pid()
    with directory_removed(t4):
        t4.root.write_text("")
    refused(t4.fenka("daemon", "--stop"), 1, r"1 jobs are still here \(holder\): .*")
    assert t4.ok("daemon", "--stop", "--force") == "the fenka daemon has ended\n"
    assert not os.path.exists(f"/proc/{daemon}/exe")
    assert holder.process.poll() is None
    t4.root.unlink()
    t4.root.mkdir()


def test_directory_is_restored_only_once_it_can_be_made(t4: Workstation) -> None:
    """Until then nothing is recorded."""
    runtime, recorded = Runtime(t4.root / "own"), list[str]()
    runtime.create()
    runtime.lock.touch()
    runtime.socket.touch()
    files = presence.Presence(runtime, lambda: recorded.append("all"))
    files.begin()
    assert not files.restored()
    shutil.rmtree(runtime.root)
    runtime.root.write_text("")
    assert not files.restored()
    runtime.root.unlink()
    assert recorded == []
    assert files.restored()
    assert recorded == ["all"]


def test_directory_is_locked_against_systemd_tmpfiles(t4: Workstation) -> None:
    """systemd-tmpfiles skips what is below a directory that it cannot lock."""
    directory = os.open(t4.root, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(directory)
