"""Root's daemon whose file system has no room, as its service manager and its users see it."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.workstation.conftest import eventually
from tests.workstation.shared_machine import ALICE, PYTHON, SharedMachine, shared_machine

UNIT = """
import os, socket, subprocess, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
    manager.bind("\\0fenka-unit")
    manager.settimeout(1)
    unit = os.environ | {"NOTIFY_SOCKET": "@fenka-unit"}
    words = [sys.executable, "-m", "fenka", "daemon"]
    with open("/tmp/printed", "wb") as printed, subprocess.Popen(words, env=unit, stderr=printed) as daemon:
        while daemon.poll() is None:
            try:
                print(repr(manager.recv(10000).decode()), flush=True)
            except TimeoutError:
                pass
"""
"""Runs the daemon as a unit with Type=notify, and prints what it reports."""


@pytest.fixture
def machine() -> Iterator[SharedMachine]:
    """A machine of several users, without a daemon."""
    with shared_machine() as made:
        yield made


def unit(machine: SharedMachine) -> subprocess.Popen[str]:
    """Start root's daemon as a service manager does."""
    started = subprocess.Popen(
        machine.words(0, PYTHON, "-c", UNIT),
        env=machine.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    machine.programs.append(started)
    return started


FULL = {
    "/var/lib/fenka": "mkdir -p /var/lib/fenka && mount -t tmpfs -o mode=755,size=64k small /var/lib/fenka",
    "/run/fenka": "mkdir -p /run/fenka && mount -t tmpfs -o mode=755,size=64k small /run/fenka && "
    "{ cat /dev/zero > /run/fenka/filler || true; } 2>/dev/null",
}


@pytest.mark.parametrize("place", FULL)
def test_unit_says_once_what_is_full_and_starts_when_it_has_room(
    machine: SharedMachine, place: str
) -> None:
    """A user's program that waits is told the reason, and starts."""
    machine.run(FULL[place])
    # By it users' commands know that the machine has a daemon of root's.
    machine.write("/etc/fenka/daemon.toml", 'simulate = "T4"\n')
    daemon = unit(machine)
    assert daemon.stdout
    for _ in range(2):  # The second report comes from the second attempt.
        report = daemon.stdout.readline()
        assert report.startswith(f"'READY=1\\nSTATUS=cannot use {place}/"), report
        assert "No space left on device" in report
    (line,) = machine.read("/tmp/printed").splitlines()
    assert line.startswith(f"fenka: cannot use {place}/")
    assert "[" not in line
    waiter = machine.hold(ALICE, "--gpu-mem", "1")
    assert waiter.stderr
    assert any(f"does not start: cannot use {place}/" in line for line in waiter.stderr)
    # It does not answer while it tries again.
    eventually(lambda: f"cannot use {place}/" in machine.fenka(ALICE, "ps").stderr)
    machine.run(f"rm -f {place}/filler; mount -o remount,size=256m {place}")
    assert any(line == "'READY=1\\nSTATUS='\n" for line in daemon.stdout)
    eventually(lambda: [job["state"] for job in machine.jobs().values()] == ["running"])
    assert len(machine.read("/tmp/printed").splitlines()) == 1


def test_user_is_told_what_is_full_when_the_home_directory_is(machine: SharedMachine) -> None:
    """Where a file cannot be written, and where the output is lost. With room again nobody says anything."""
    home = "/tmp/.local"
    machine.run(f"mkdir {home} && mount -t tmpfs -o mode=700,uid={ALICE},size=64k small {home}")
    machine.write("/etc/fenka/daemon.toml", 'simulate = "T4"\n')
    machine.ok(0, "daemon", "--background")
    fill = f"{{ cat /dev/zero > {home}/filler || true; }} 2>/dev/null"
    machine.run(fill)
    words = ("run", "--gpu-mem", "1", "--name", "a", "-d", "--", "sleep", "1000")
    refused = machine.fenka(ALICE, *words)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(
        f"fenka: cannot use {home}/state/fenka/jobs/a/run: No space left"
    )
    # Less than a page is free: files of a few bytes exist already, and can be written again.
    machine.run(f"rm {home}/filler")
    machine.ok(ALICE, *words)
    machine.run(fill)
    shown = machine.fenka(ALICE, "logs", "a").stderr
    assert shown.startswith(
        f"fenka: the output is lost, because {home}/state/fenka/jobs/a is on a full"
    )
    machine.run(f"rm {home}/filler")
    assert "lost" not in machine.fenka(ALICE, "logs", "a").stderr
