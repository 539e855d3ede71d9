"""What ended with its PID namespace is charged to nobody any more, and nobody who lives is taken for dead."""

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
from fenka.isolation.control import Limit
from fenka.isolation.layout import constant
from fenka.isolation.pid_namespaces import NamespaceReaper
from tests.native.shim_kit import CARDS, GIB, OUT_OF_MEMORY, Client, Lease, client

ENDED = constant("FENKA_NAMESPACE_ENDED")
RETIRING = constant("FENKA_NAMESPACE_RETIRING")
NESTED = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

needs_namespaces = pytest.mark.skipif(
    subprocess.run([*NESTED, "true"], check=False, capture_output=True).returncode != 0,
    reason="PID namespaces need root here",
)


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Lease]:
    """4 GiB of one card."""
    made = Lease(tmp_path / "lease", (Limit(CARDS[0], 4 * GIB),))
    yield made
    made.close()


def in_a_namespace(folder: Path) -> Path:
    """A script that starts the client in a PID namespace that ends with it."""
    script = folder / "nested"
    script.write_text(f"#!/bin/sh\nexec {' '.join(NESTED)} {client(0)}\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def nested(lease: Lease, tmp_path: Path) -> Client:
    """A client in a PID namespace of its own, which ends with it."""
    started = Client(in_a_namespace(tmp_path), lease.environment())
    lease.clients.append(started)
    return started.enter()


@pytest.fixture
def judge(lease: Lease) -> Iterator[NamespaceReaper]:
    """An agent that looks at the lease's account until the test ends."""
    judge, ended = NamespaceReaper(), threading.Event()

    def work() -> None:
        while not ended.wait(0.01):
            judge.run_once([lease.account])

    thread = threading.Thread(target=work)
    thread.start()
    yield judge
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


def named(path: Path, inode: int, owner: int = 0) -> None:
    """Name a namespace in entry 3; with `owner`, let a slot's owner be of it."""
    put(path, "pid_namespaces", 3, inode)
    if owner:
        put(path, "slots_used", 0, 8)
        put(path, "identity", 0, owner | 3 << 23 | 5 << 32)
        put(path, "memory", 0, GIB)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A new account."""
    account.create(tmp_path / "slots")
    return tmp_path / "slots"


@needs_namespaces
def test_memory_of_a_namespace_that_was_killed_is_free_for_siblings(
    lease: Lease, nested: Client, judge: NamespaceReaper
) -> None:
    """A sandbox is killed with its PID namespace; a process outside it gets all of its memory at once."""
    sibling = lease.start().enter()
    assert nested.ask("alloc", 4 * GIB).code == 0
    assert sibling.ask("alloc", GIB).code == OUT_OF_MEMORY
    nested.kill()
    nested.process.wait()
    assert sibling.ask("alloc", 4 * GIB).code == 0
    assert lease.held() == 4 * GIB
    judge.run_once([lease.account])
    assert [p.pid for p in account.read(lease.account).processes] == [sibling.process.pid]


@needs_namespaces
def test_a_living_namespace_keeps_its_memory_however_often_others_ask(
    lease: Lease, nested: Client, judge: NamespaceReaper
) -> None:
    """A request that the agent must deny ends as out of memory, and takes nothing from anybody."""
    assert nested.ask("alloc", 3 * GIB).code == 0
    sibling = lease.start().enter()
    for _ in range(5):
        assert sibling.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert sibling.ask("alloc", GIB).code == 0
    assert lease.held() == 4 * GIB


@needs_namespaces
def test_an_ended_namespace_makes_room_for_the_next(lease: Lease, tmp_path: Path) -> None:
    """Its index is used again once its slots are empty: 255 sandboxes are not the end of a lease."""
    script = in_a_namespace(tmp_path)
    for _ in range(3):
        sandbox = Client(script, lease.environment()).enter()
        assert sandbox.ask("alloc", GIB).code == 0
        sandbox.kill()
        sandbox.process.wait()
        NamespaceReaper().run_once([lease.account])
        assert ENDED in words(lease.account, "namespace_states")
        # A process that begins empties the slots of all who are known to be dead.
        lease.start().enter().kill()
        NamespaceReaper().run_once([lease.account])
        assert not any(words(lease.account, "namespace_states"))
        assert sum(map(bool, words(lease.account, "pid_namespaces"))) == 1


def test_a_process_that_appears_meanwhile_keeps_its_namespace(path: Path) -> None:
    """The kernel uses inodes again: a namespace that has a process at the second look goes on as it was."""
    named(path, 77, owner=100)
    looks = iter([{1}, {1, 77}])
    states = []

    def living() -> set[int]:
        states.append(words(path, "namespace_states")[3])
        return next(looks)

    NamespaceReaper(living).run_once([path])
    assert states == [0, RETIRING]
    assert words(path, "namespace_states")[3] == 0
    assert account.read(path).memory_bytes[0] == GIB


def test_nothing_is_ended_where_not_all_processes_can_be_seen(path: Path) -> None:
    """A process that cannot be inspected may be of any namespace."""
    named(path, 77, owner=100)
    NamespaceReaper(lambda: None).run_once([path])
    assert not any(words(path, "namespace_states"))


def test_what_a_killed_agent_began_the_next_one_decides(path: Path) -> None:
    """An index that no process may take is decided, whether the namespace lives or has ended."""
    for state, now in ((0, {77}), (ENDED, {1})):
        named(path, 77, owner=100)
        put(path, "namespace_states", 3, RETIRING)
        NamespaceReaper(lambda now=now: now).run_once([path])  # type: ignore[misc]
        assert words(path, "namespace_states")[3] == state


def test_requests_are_answered_at_once_and_looks_are_rare(path: Path) -> None:
    """Without a request an account is looked at every few seconds; tenants cannot have more than a share."""
    now, looks = [100.0], []

    def living() -> set[int]:
        looks.append(now[0])
        now[0] += 0.01
        return {1, 77}

    named(path, 77, owner=100)
    judge = NamespaceReaper(living, lambda: now[0])
    judge.run_once([path])
    now[0] = 101
    judge.run_once([path])
    assert looks == [100]
    put(path, "reap_requested", 0, 5)
    for _ in range(3):
        judge.run_once([path])
        put(path, "reap_requested", 0, 6)
    assert looks == [100, 101]
    assert words(path, "reap_completed") == (5,)


def test_hostile_files_neither_stop_nor_delay_the_agent(tmp_path: Path, path: Path) -> None:
    """A pipe, a link, a directory, a cut, a huge and a locked file do not keep others waiting."""
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


def test_own_processes_are_seen() -> None:
    """The namespaces of the machine's processes include this one's."""
    found = pid_namespaces.populated_namespaces()
    assert found is not None
    assert Path("/proc/self/ns/pid").stat().st_ino in found
