"""Which processes the daemon signals when PIDs are reused and connections are passed on."""

import asyncio
import errno
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fenka.core.inventory import Node
from fenka.hardware.peer_credentials import process
from fenka.procfs import send_signal, start_ticks
from fenka.workstation import lease_processes
from fenka.workstation.broker import Broker
from fenka.workstation.lease_processes import (
    MAX_WATCHED,
    LeaseProcesses,
    ProcessScan,
    ProcessWatch,
    Terminator,
)
from tests.builders import job
from tests.workstation.conftest import Workstation
from tests.workstation.reused_pids import start_with_pid
from tests.workstation.users import User, place, stranger, victim

__all__ = ["place", "stranger", "victim"]


@pytest.fixture
def ours() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user."""
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        yield sleeper
        sleeper.kill()


def test_daemon_on_a_terminal_ends_when_the_terminal_is_gone(station: Workstation) -> None:
    """At SIGHUP from elsewhere it reads users.toml again, and goes on."""
    shown, terminal = pty.openpty()
    words = [station.interpreter, "-m", "fenka", "daemon", "--simulate", "T4"]
    daemon = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *words],
        env=station.environment,
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(terminal)
    assert daemon.stdout
    assert daemon.stderr
    assert "leasing simulated cards" in daemon.stdout.readline()
    os.kill(station.daemon_pid(), signal.SIGHUP)
    assert "users.toml was read" in daemon.stderr.readline()
    os.close(shown)
    daemon.communicate()
    assert not (station.root / "daemon.sock").exists()


@pytest.fixture
def stubborn() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user that ignores SIGTERM."""
    ignoring = ["env", "--ignore-signal=TERM", "sleep", "1000"]
    with subprocess.Popen(ignoring) as sleeper:
        while Path(f"/proc/{sleeper.pid}/comm").read_text() != "sleep\n":
            pass
        yield sleeper
        sleeper.kill()


@pytest.fixture
def theirs(victim: User) -> Iterator[subprocess.Popen[bytes]]:
    """A process of an ordinary user."""
    with subprocess.Popen(["sleep", "1000"], user=victim.uid) as sleeper:
        yield sleeper
        sleeper.kill()


def test_peer_is_the_connecting_process_when_its_pid_was_reused() -> None:
    """A child keeps the connection after its process has ended; another process gets that PID."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("")
        server.listen()
        child = os.fork()
        if child == 0:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(server.getsockname())
                keeper = os.fork()
                if keeper == 0:
                    os.read(client.fileno(), 1)
                os._exit(0)
        os.waitpid(child, 0)
        connection, _ = server.accept()
        with connection:
            again = start_with_pid(child)
            try:
                peer = process(connection)
            except ProcessLookupError:
                return
            finally:
                if again:
                    again.kill()
                    again.wait()
            assert not peer.lives(), f"the PID was used again: {again is not None}"
            peer.close()


def test_peer_is_the_same_process_when_it_executed_another_program(place: Path) -> None:
    """A process stays the same by exec."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "socket"))
        server.listen()
        code = (
            "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
            "os.set_inheritable(s.fileno(), True); os.execv('/bin/cat', ['cat'])"
        )
        words = [sys.executable, "-c", code, str(place / "socket")]
        with subprocess.Popen(words, stdin=subprocess.PIPE) as client:
            connection, _ = server.accept()
            with connection:
                peer = process(connection)
                assert (peer.pid, peer.uid) == (client.pid, os.geteuid())
                assert peer.lives()
                assert client.stdin
                client.stdin.close()
                client.wait()
                assert not peer.lives()
                peer.close()


def test_only_processes_of_the_job_s_user_are_signalled_unless_it_is_root(
    theirs: subprocess.Popen[bytes], ours: subprocess.Popen[bytes], victim: User, stranger: User
) -> None:
    """Programs of root's jobs may run as any user; those of other jobs in a lease are not its own."""
    in_lease = cast("LeaseProcesses", SimpleNamespace(lease_of=lambda _: "a"))
    terminator = Terminator(Broker(Node("here", ()), "binpack"), in_lease)
    allowed = {
        uid: [terminator.may_signal(job("a", uid=uid), each.pid) for each in (theirs, ours)]
        for uid in (victim.uid, 0, stranger.uid)
    }
    assert allowed == {victim.uid: [True, False], 0: [True, True], stranger.uid: [False, False]}
    assert not terminator.may_signal(job("b", uid=victim.uid), theirs.pid)


def test_signal_is_sent_when_the_process_is_meant(ours: subprocess.Popen[bytes]) -> None:
    """The result says so."""
    assert send_signal(ours.pid, signal.SIGKILL, lambda: True)
    assert ours.wait() == -signal.SIGKILL


def test_signal_is_not_sent_when_the_process_has_ended(
    ours: subprocess.Popen[bytes],
) -> None:
    """The descriptor is that of the old process, even if another process has its PID."""

    def ends_and_looks_right() -> bool:
        ours.kill()
        ours.wait()
        return True

    assert not send_signal(ours.pid, signal.SIGKILL, ends_and_looks_right)
    assert not send_signal(ours.pid, signal.SIGKILL, lambda: True)


def test_signal_is_not_sent_when_the_process_is_not_the_job_s(
    ours: subprocess.Popen[bytes],
) -> None:
    """The PID alone does not identify the job's process."""
    assert not send_signal(ours.pid, signal.SIGKILL, lambda: False)
    ours.terminate()
    assert ours.wait() == -signal.SIGTERM


async def test_lease_is_not_held_when_its_process_s_pid_was_reused(
    ours: subprocess.Popen[bytes],
) -> None:
    """A restarted daemon compares the recorded start time."""
    ticks = start_ticks(ours.pid)
    assert ticks

    async def nobody() -> ProcessScan:
        return ProcessScan()

    async def ends(recorded: int) -> bool:
        ended: list[int] = []
        watch = ProcessWatch(
            "none", (ours.pid, recorded), lambda: ended.append(1), lambda _: None, nobody
        )
        for _ in range(10):
            await asyncio.sleep(0)
        watch.close()
        return bool(ended)

    assert [await ends(start) for start in (ticks, ticks - 1)] == [False, True]


async def test_few_descriptors_are_used_when_a_lease_has_many_processes(
    ours: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's processes must not use up the daemon's descriptors, which all users need."""
    opened: list[int] = []

    def open_any(pid: int) -> int:
        opened.append(pid)
        return pidfd_open(ours.pid)

    async def many() -> ProcessScan:
        return ProcessScan({"lease": list(range(10**6, 10**6 + 500))})

    pidfd_open = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", open_any)
    watch = ProcessWatch("lease", (ours.pid, 1), lambda: None, lambda _: None, many)
    while len(opened) < 2:
        await asyncio.sleep(0)
    watch.close()
    assert len(opened) == 1 + MAX_WATCHED


async def test_end_is_reported_when_no_descriptor_was_left(
    ours: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease's processes are looked for again until they can be watched, or have ended."""
    monkeypatch.setattr(lease_processes, "RESCAN_DELAY_S", 0)
    ended = asyncio.Event()
    scans = iter([ProcessScan({"lease": [10**6]}), ProcessScan()])

    async def scan() -> ProcessScan:
        return next(scans)

    def open_none(pid: int) -> int:
        if pid == ours.pid:
            return pidfd_open(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    pidfd_open = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", open_none)
    watch = ProcessWatch("lease", (ours.pid, 1), ended.set, lambda _: None, scan)
    await ended.wait()
    watch.close()


async def test_job_is_terminated_once_however_many_ask(stubborn: subprocess.Popen[bytes]) -> None:
    """Requests share one termination; the shortest grace period counts, and gone clients end nothing."""
    scans = 0
    started = start_ticks(stubborn.pid)
    assert started is not None
    stopped = job("a", uid=os.geteuid(), pid=stubborn.pid, start_ticks=started)

    async def scan() -> SimpleNamespace:
        nonlocal scans
        scans += 1
        return SimpleNamespace(holders={})

    processes = SimpleNamespace(scan=scan, lease_of=lambda _: None)
    broker = Broker(Node("here", ()), "binpack")
    broker.jobs["a"] = stopped
    terminator = Terminator(broker, cast("LeaseProcesses", processes))
    requests = [asyncio.create_task(terminator.terminate([stopped], 1000)) for _ in range(100)]
    while not scans:
        await asyncio.sleep(0)
    for request in requests[:50]:
        request.cancel()
    last = asyncio.create_task(terminator.terminate([stopped], 0))
    while stubborn.poll() is None:
        await asyncio.sleep(0)
    assert stubborn.returncode == -signal.SIGKILL
    del broker.jobs["a"]
    assert await asyncio.gather(last, *requests[50:]) == [True] * 51
    assert scans == 2
    assert not terminator._underway
