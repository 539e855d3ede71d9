"""Processes that ended with their PID namespace are charged no more; living ones are never taken for dead."""

import fcntl
import os
import shutil
import signal
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.isolation import account, pid_namespaces
from fenka.isolation.lease_control import Limit, constant
from fenka.isolation.pid_namespaces import NamespaceReaper
from tests.native.clients import CARDS, GIB, OUT_OF_MEMORY, Client, Lease, client
from tests.waiting import wait_until

ENDED = constant("FENKA_NAMESPACE_ENDED")
RETIRING = constant("FENKA_NAMESPACE_RETIRING")
NESTED = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

needs_namespaces = pytest.mark.skipif(
    subprocess.run([*NESTED, "true"], check=False, capture_output=True).returncode != 0,
    reason="PID namespaces need root here",
)


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Lease]:
    """Return a lease of 4 GiB of one card."""
    made = Lease(tmp_path / "lease", (Limit(CARDS[0], 4 * GIB),))
    yield made
    made.close()


def in_a_namespace(folder: Path) -> Path:
    """Return a script that starts the client in a PID namespace that ends with it."""
    script = folder / "nested"
    script.write_text(f"#!/bin/sh\nexec {' '.join(NESTED)} {client(0)}\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def nested(lease: Lease, tmp_path: Path) -> Client:
    """Start a client in a PID namespace of its own, which ends with it."""
    started = Client(in_a_namespace(tmp_path), lease.environment())
    lease.clients.append(started)
    return started.enter()


@pytest.fixture
def reaper(lease: Lease) -> Iterator[NamespaceReaper]:
    """Return an agent that answers the lease's requests until the test ends.

    Its clock stands still, so it neither scans without a request nor rests, however busy the machine is.
    """
    reaper, ended = NamespaceReaper(clock=lambda: 0.0), threading.Event()

    def work() -> None:
        while not ended.wait(0.01):
            reaper.run_once([lease.account])

    thread = threading.Thread(target=work)
    thread.start()
    yield reaper
    ended.set()
    thread.join()


def put(path: Path, field: str, index: int, word: int) -> None:
    """Write one word of the account, as a program could."""
    with path.open("r+b") as file:
        file.seek(account.offset(field) + 8 * index)
        file.write(struct.pack("<Q", word))


def words(path: Path, field: str) -> tuple[int, ...]:
    """Read a row of the account."""
    descriptor = account.open_file(path)
    try:
        return account.words(descriptor, field)
    finally:
        os.close(descriptor)


def states_after_a_round(path: Path) -> tuple[int, ...]:
    """Let an agent check the account once, and return the states of its namespaces."""
    NamespaceReaper().run_once([path])
    return words(path, "namespace_states")


def named(path: Path, inode: int, owner: int = 0) -> None:
    """Write a namespace to entry 3, and a slot's owner in it if `owner` is given."""
    put(path, "pid_namespaces", 3, inode)
    if owner:
        put(path, "slots_used", 0, 8)
        put(path, "identity", 0, owner | 3 << 23 | 5 << 32)
        put(path, "memory", 0, GIB)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a new account."""
    account.create(tmp_path / "slots")
    return tmp_path / "slots"


@needs_namespaces
def test_memory_is_free_for_siblings_when_a_namespace_was_killed(
    lease: Lease, nested: Client, reaper: NamespaceReaper
) -> None:
    """A sandbox is killed with its PID namespace; a process outside of it gets its memory on request."""
    sibling = lease.start().enter()
    assert nested.ask("alloc", 4 * GIB).code == 0
    assert sibling.ask("alloc", GIB).code == OUT_OF_MEMORY
    nested.kill()
    nested.process.wait()
    # On a busy machine the shim may give up waiting for the answer, and requests it again.
    while sibling.ask("alloc", 4 * GIB).code == OUT_OF_MEMORY:
        continue
    assert lease.held() == 4 * GIB
    NamespaceReaper().run_once([lease.account])
    assert [p.pid for p in account.read(lease.account).processes] == [sibling.process.pid]


@needs_namespaces
def test_memory_of_a_short_sandbox_is_free_when_the_agent_is_nested_itself(
    lease: Lease, tmp_path: Path, reaper: NamespaceReaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows only namespaces that it has seen alive, so a program lets itself be seen at first."""
    monkeypatch.setattr(pid_namespaces, "in_initial_namespace", lambda: False)
    put(lease.account, "nested_agent", 0, 1)
    sibling = lease.start().enter()
    sandbox = Client(in_a_namespace(tmp_path), lease.environment())
    lease.clients.append(sandbox)
    assert sandbox.enter().ask("alloc", 4 * GIB).code == 0
    sandbox.kill()
    sandbox.process.wait()
    wait_until(lambda: sibling.ask("alloc", 4 * GIB).code == 0)


@pytest.mark.parametrize("initial", [True, False])
def test_account_says_whether_its_agent_sees_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, initial: bool
) -> None:
    """Programs need not wait for one that does."""
    own = Path("/proc/self/ns/pid").stat().st_ino
    monkeypatch.setattr(account, "INITIAL_PID_NAMESPACE", own if initial else 1)
    account.create(tmp_path / "slots")
    assert words(tmp_path / "slots", "nested_agent") == (int(not initial),)


@needs_namespaces
def test_living_namespace_keeps_its_memory_when_others_request_it(
    lease: Lease, nested: Client, reaper: NamespaceReaper
) -> None:
    """A request that the agent must deny ends as out of memory, and changes nothing."""
    assert nested.ask("alloc", 3 * GIB).code == 0
    sibling = lease.start().enter()
    for _ in range(5):
        assert sibling.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert sibling.ask("alloc", GIB).code == 0
    assert lease.held() == 4 * GIB


@needs_namespaces
def test_index_of_an_ended_namespace_is_reused_when_its_slots_are_empty(
    lease: Lease, tmp_path: Path
) -> None:
    """A lease may have more than 255 sandboxes, one after another."""
    script = in_a_namespace(tmp_path)
    for _ in range(3):
        sandbox = Client(script, lease.environment()).enter()
        assert sandbox.ask("alloc", GIB).code == 0
        sandbox.kill()
        # The kernel kills what is in the namespace a moment after the process that made it.
        wait_until(lambda: ENDED in states_after_a_round(lease.account))
        # A process that starts empties the slots of all ended processes.
        lease.start().enter().kill()
        assert not any(states_after_a_round(lease.account))
        assert sum(map(bool, words(lease.account, "pid_namespaces"))) == 1


def test_namespace_is_kept_when_a_process_appears_between_two_scans(path: Path) -> None:
    """The kernel reuses inodes: a namespace with a process at the second scan is not retired."""
    named(path, 77, owner=100)
    scans = iter([{1}, {1, 77}])
    states = []

    def living() -> set[int]:
        states.append(words(path, "namespace_states")[3])
        return next(scans)

    NamespaceReaper(living).run_once([path])
    assert states == [0, RETIRING]
    assert words(path, "namespace_states")[3] == 0
    assert account.read(path).memory_bytes[0] == GIB


def test_no_namespace_ends_when_a_process_cannot_be_inspected(path: Path) -> None:
    """That process may be in any namespace."""
    named(path, 77, owner=100)
    NamespaceReaper(lambda: None).run_once([path])
    assert not any(words(path, "namespace_states"))


def test_retiring_namespace_is_decided_when_the_agent_was_killed(path: Path) -> None:
    """The next agent decides whether the namespace lives or has ended."""
    for state, now in ((0, {77}), (ENDED, {1})):
        named(path, 77, owner=100)
        put(path, "namespace_states", 3, RETIRING)
        NamespaceReaper(lambda now=now: now).run_once([path])  # type: ignore[misc]
        assert words(path, "namespace_states")[3] == state


def test_account_is_scanned_rarely_when_there_is_no_request(path: Path) -> None:
    """Every few seconds. With requests the agent rests in proportion to its work."""
    now, scans = [100.0], []

    def living() -> set[int]:
        scans.append(now[0])
        now[0] += 0.01
        return {1, 77}

    named(path, 77, owner=100)
    reaper = NamespaceReaper(living, lambda: now[0])
    reaper.run_once([path])
    now[0] = 101
    reaper.run_once([path])
    assert scans == [100]
    put(path, "reap_requested", 0, 5)
    for _ in range(3):
        reaper.run_once([path])
        put(path, "reap_requested", 0, 6)
    assert scans == [100, 101]
    assert words(path, "reap_completed") == (5,)


def test_agent_goes_on_when_files_are_hostile(tmp_path: Path, path: Path) -> None:
    """A pipe, a link, a directory, a truncated, a huge and a locked file delay no other account."""
    named(path, 77, owner=100)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(path)
    shutil.copy(path, tmp_path / "cut")
    os.truncate(tmp_path / "cut", 16)
    shutil.copy(path, tmp_path / "huge")
    os.truncate(tmp_path / "huge", 1 << 40)
    shutil.copy(path, tmp_path / "locked")
    with (tmp_path / "locked").open() as file:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        names = ("pipe", "link", "", "cut", "huge", "locked", "absent")
        NamespaceReaper(lambda: {1}).run_once([*(tmp_path / name for name in names), path])
    assert words(path, "namespace_states")[3] == ENDED
    assert words(tmp_path / "huge", "namespace_states")[3] == ENDED


def test_populated_namespaces_include_this_process_s() -> None:
    """The namespaces of the machine's processes include this one's."""
    inodes = pid_namespaces.populated_namespaces()
    assert inodes is not None
    assert Path("/proc/self/ns/pid").stat().st_ino in inodes
