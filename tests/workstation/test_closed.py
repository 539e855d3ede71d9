"""`fenka daemon --closed`: only leases open cards. Two real users, on a machine of their own.

No driver has the nodes. So a program that may open one learns that there is no device, and others that they
may not.
"""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from fire.machine import HERE
from tests.control_groups import unused_major
from tests.workstation.conftest import eventually
from tests.workstation.shared_machine import ALICE, BOB, PYTHON, SharedMachine, shared_machine

pytestmark = [pytest.mark.process, pytest.mark.timeout(100)]

ROOT = 0
SIMULATED = ("daemon", "--background", "--simulate", "T4*2")
DEV = "/run/fenka/simulated/host-tree/dev"
CARDS = [f"{DEV}/nvidia0", f"{DEV}/nvidia1"]
SHARED = f"{DEV}/nvidiactl"
OPENED, REFUSED = "No such device or address", "Permission denied"


@pytest.fixture
def machine() -> Iterator[SharedMachine]:
    """Two T4s, each with a node that all users may open, and root's daemon, which has just closed them."""
    with shared_machine() as machine:
        machine.ok(ROOT, *SIMULATED)
        machine.run(f"mkdir -p {DEV}")
        for minor, path in enumerate([*CARDS, SHARED]):
            make_node(machine, path, minor)
        assert opened(machine, ALICE) == CARDS
        restart(machine, "--closed")
        yield machine
        machine.ok(ROOT, "daemon", "--stop", "--force")


def make_node(machine: SharedMachine, path: str, minor: int) -> None:
    """Make a node as nvidia-modprobe does."""
    machine.run(f"rm -f {path}; mknod -m 666 {path} c {unused_major()} {minor}")


def restart(machine: SharedMachine, *options: str) -> None:
    """Kill root's daemon, and start it with other options."""
    pid = machine.read("/run/fenka/daemon.lock")
    machine.run(f"kill -KILL {pid}; flock /run/fenka/daemon.lock true")
    machine.ok(ROOT, *SIMULATED, *options)


def opened(machine: SharedMachine, uid: int) -> list[str]:
    """Return the cards' nodes that a program of a user without a lease may open."""
    return [path for path in CARDS if attempt(machine, uid, path) == OPENED]


def attempt(machine: SharedMachine, uid: int, path: str) -> str:
    """Return what the kernel says to a program without a lease that opens a node."""
    done = subprocess.run(
        machine.words(uid, "cat", path), capture_output=True, text=True, check=False
    )
    return done.stderr.strip().rpartition(": ")[2]


def modes(machine: SharedMachine) -> list[str]:
    """Return the nodes' modes, users and groups."""
    done = subprocess.run(
        machine.words(ROOT, "stat", "-c", "%a %u %g", *CARDS),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@dataclass
class LeasedShell:
    """A shell of a user's in a lease."""

    program: subprocess.Popen[str]

    def opened(self) -> list[str]:
        """Return the cards' nodes that it may open, and check that it may open the shared one."""
        return [path for path in CARDS if self.attempt(path) == OPENED]

    def attempt(self, path: str) -> str:
        """Return what the kernel says to it."""
        assert self.program.stdin
        assert self.program.stdout
        self.program.stdin.write(f"cat {path} 2>&1\n")
        self.program.stdin.flush()
        return self.program.stdout.readline().strip().rpartition(": ")[2]

    def end(self) -> None:
        """End it."""
        self.program.communicate()


def lease(
    machine: SharedMachine, uid: int, *options: str, command: tuple[str, ...] = ("sh",)
) -> LeasedShell:
    """Start a shell in a lease, and wait until it runs."""
    program = subprocess.Popen(
        machine.words(uid, PYTHON, "-m", "fenka", "run", *options, "--", *command),
        env=machine.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    machine.programs.append(program)
    return LeasedShell(program)


def test_lease_opens_its_own_cards_and_nobody_else_any(machine: SharedMachine) -> None:
    """Not the other user's, not one's own outside of the lease, and nothing after its end."""
    assert modes(machine) == ["600 0 0"] * 2
    assert opened(machine, ROOT) == CARDS
    first = lease(machine, ALICE, "--gpu-mem", "14")
    assert (own := first.opened()) in ([CARDS[0]], [CARDS[1]])
    second = lease(machine, BOB, "--gpu-mem", "4")
    assert second.opened() == [path for path in CARDS if path not in own]
    assert first.attempt(SHARED) == second.attempt(SHARED) == OPENED
    assert opened(machine, ALICE) == opened(machine, BOB) == []
    for shell in (first, second):
        shell.end()
    eventually(lambda: not machine.jobs())
    both = lease(machine, BOB, "--gpu-mem", "2", "--cards", "2")
    assert both.opened() == CARDS
    command = ("setpriv", f"--reuid={ALICE}", "sh")
    roots = lease(machine, ROOT, "--gpu-mem", "2", command=command)
    assert len(roots.opened()) == 1
    for shell in (both, roots):
        shell.end()
    assert opened(machine, ALICE) == []


def test_programs_keep_their_nodes_when_daemons_come_and_go(machine: SharedMachine) -> None:
    """The next one closes or opens what is the machine's."""
    shell = lease(machine, ALICE, "--gpu-mem", "4")
    own = shell.opened()
    assert len(own) == 1
    restart(machine, "--closed")
    assert shell.opened() == own
    assert opened(machine, BOB) == []
    restart(machine)
    assert modes(machine) == ["666 0 0"] * 2
    assert opened(machine, BOB) == CARDS
    assert shell.opened() == CARDS
    shell.end()


def test_nodes_are_as_before_when_the_daemon_has_stopped(machine: SharedMachine) -> None:
    """Also where they were a group's."""
    restart(machine)
    machine.run(f"chgrp 61100 {CARDS[1]}; chmod 660 {CARDS[1]}")
    restart(machine, "--closed")
    assert modes(machine) == ["600 0 0"] * 2
    machine.run(
        "mv /run/fenka/simulated/host-tree /run/tree; ln -s /run/tree /run/fenka/simulated/host-tree"
    )
    machine.ok(ROOT, "daemon", "--stop")
    done = subprocess.run(
        machine.words(
            ROOT, "stat", "-c", "%a %g", "/run/tree/dev/nvidia0", "/run/tree/dev/nvidia1"
        ),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == ["666 0", "660 61100"]
    machine.ok(ROOT, *SIMULATED)


def test_node_that_is_made_again_is_closed_again(machine: SharedMachine) -> None:
    """As nvidia-modprobe does for any user, and with another number after the driver was loaded again."""
    make_node(machine, CARDS[0], 0)
    machine.run(f"rm {CARDS[1]}; mknod -m 666 {CARDS[1]} c {unused_major()} 7")
    eventually(lambda: modes(machine) == ["600 0 0"] * 2)
    assert opened(machine, ALICE) == []
    assert f"{CARDS[0]} was open to other users" in machine.read("/run/fenka/daemon.log")
    shell = lease(machine, ALICE, "--gpu-mem", "2", "--cards", "2")
    assert shell.opened() == CARDS
    numbers = subprocess.run(
        machine.words(ROOT, "stat", "-c", "%T", "/run/fenka/nodes/nvidia1"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert numbers.stdout == "7\n"
    shell.end()


ASK = """
import socket
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect("/run/fenka/nodes.sock")
print(socket.recv_fds(connection, 4096, 16)[:2])
"""


def test_stranger_gets_no_node_from_the_daemon(machine: SharedMachine) -> None:
    """Neither by its socket, also while she has a lease, nor by a path."""
    shell = lease(machine, ALICE, "--gpu-mem", "4")
    assert shell.opened()
    for uid in (ALICE, BOB):
        done = subprocess.run(
            machine.words(uid, PYTHON, "-c", ASK), capture_output=True, text=True, check=True
        )
        assert done.stdout == "(b'', [])\n"
        assert attempt(machine, uid, "/run/fenka/nodes/nvidia0") == REFUSED
    shell.end()


@pytest.mark.parametrize(
    ("uid", "words", "sentence"),
    [
        (ROOT, ("daemon", "--closed", "--shim-only", "--simulate", "T4"), "leave out one"),
        (ALICE, ("daemon", "--closed", "--simulate", "T4"), "--closed needs root's daemon"),
        (
            ALICE,
            ("run", "--gpu-mem", "1", "--isolation", "cooperative", "--", "true"),
            "leave out --isolation=cooperative",
        ),
    ],
)
def test_what_cannot_be_gets_a_sentence(
    machine: SharedMachine, uid: int, words: tuple[str, ...], sentence: str
) -> None:
    """And changes nothing."""
    own = {"FENKA_RUNTIME": f"/tmp/of-{uid}"} if words[0] == "daemon" else {}
    done = subprocess.run(
        machine.words(uid, PYTHON, "-m", "fenka", *words),
        env=machine.environment | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert sentence in done.stderr
    assert modes(machine) == ["600 0 0"] * 2


def test_runs_start_when_another_user_connects_and_closes_in_a_loop(machine: SharedMachine) -> None:
    """The loop fills the kernel's queues of all three sockets of the daemon."""
    attack = subprocess.Popen(
        machine.words(BOB, PYTHON, str(HERE / "fire/hostile.py"), "knock"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    machine.programs.append(attack)
    assert attack.stdout
    assert attack.stdout.readline() == "ready\n"
    for _ in range(3):
        machine.ok(ALICE, "run", "--gpu-mem", "1", "--", "true")
    assert attack.poll() is None
