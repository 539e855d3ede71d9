"""Resizing a lease, with accounts that the test writes."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fenka.isolation import account, control
from fenka.isolation.control import Control, InvalidControl, Limit
from fenka.isolation.layout import layout
from fenka.isolation.resize import InUse, resize

UUIDS = tuple(f"GPU-00000000-0000-0000-0000-00000000000{i}" for i in range(2))
GIB = 1 << 30
SLOTS = 1024
FIRST_NAMESPACE = 0xEFFFFFFC


def limits(*gib: float) -> tuple[Limit, ...]:
    """So much of each card."""
    return tuple(Limit(u, int(g * GIB)) for u, g in zip(UUIDS, gib, strict=True))


class Files:
    """A lease of 4 GiB of each of two cards."""

    def __init__(self, folder: Path) -> None:
        self.page, self.slots = folder / "control", folder / "slots"
        control.write(self.page, Control("alice", limits(4, 4)))
        account.create(self.slots)

    def put(self, field: str, index: int, word: int) -> None:
        """One word of the account."""
        with self.slots.open("r+b") as file:
            file.seek(layout().offsetof("struct fenka_account", field) + 8 * index)
            file.write(struct.pack("<Q", word))

    def hold(self, pid: int, start: int, *gib: float, slot: int = 0, namespace: int = 0) -> None:
        """What a process says it has."""
        inode = namespace or Path("/proc/self/ns/pid").stat().st_ino
        self.put("pid_namespaces", slot, inode)
        self.put("identity", slot, pid | slot << 23 | start << 32)
        for card, size in enumerate(gib):
            self.put("memory", card * SLOTS + slot, int(size * GIB))

    def resize(self, *gib: float) -> Control:
        """To so much of each card."""
        return resize(self.page, self.slots, limits(*gib))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A lease that nobody uses."""
    return Files(tmp_path)


def start_time() -> int:
    """Of this process."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def test_a_lease_grows_and_shrinks(files: Files) -> None:
    """Down to what is held, to the byte, and up; each with a new generation."""
    files.hold(os.getpid(), start_time(), 2, 1)
    assert files.resize(8, 1) == Control("alice", limits(8, 1), generation=2)
    assert (
        files.resize(2, 4)
        == control.read(files.page)
        == Control("alice", limits(2, 4), generation=4)
    )


def test_shrinking_below_use_is_refused(files: Files) -> None:
    """With a sentence that says which card, how much and what to do; nothing changes, on no card."""
    files.hold(os.getpid(), start_time(), 1, 2.5)
    files.hold(4_000_000, 1, 0, 0.5, slot=1, namespace=7)
    files.put("pid_namespaces", 1, 0)  # of whom nobody knows where it runs
    before = files.page.read_bytes()
    with pytest.raises(InUse) as refused:
        files.resize(1, 2)
    assert str(refused.value) == (
        f"{UUIDS[1]} cannot shrink to 2048 MiB: the lease's programs hold 3072 MiB of it; "
        "end some of them, or leave it at least that much"
    )
    assert files.page.read_bytes() == before


def test_the_dead_do_not_count(files: Files) -> None:
    """Nor does a predecessor under a PID that was used again."""
    files.hold((1 << 22) - 1, 1, 3, 0)
    files.hold(os.getpid(), start_time() - 1, 3, 0, slot=1)
    assert files.resize(1, 4).limits == limits(1, 4)


def test_the_dead_of_another_namespace_do_not_count(files: Files) -> None:
    """A container's processes are numbered in one of its own; those that live there do count."""
    program = (
        "import os; stat = open('/proc/self/stat').read().rpartition(')')[2].split();"
        "print(os.getpid(), stat[19], os.stat('/proc/self/ns/pid').st_ino, flush=True); input()"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        line = child.stdout.readline()
        if not line:
            pytest.skip("no PID namespace can be made here")
        pid, start, namespace = map(int, line.split())
        files.hold(pid, start, 3, 0, namespace=namespace)
        files.hold(pid + 1, start, 1, 0, slot=1, namespace=namespace)
        with pytest.raises(InUse, match="hold 3072 MiB"):
            files.resize(2, 4)
        assert files.resize(3, 4).limits == limits(3, 4)
        child.stdin.write("\n")
    own = Path("/proc/self/ns/pid").stat().st_ino
    if own == FIRST_NAMESPACE:
        assert files.resize(2, 4).limits == limits(2, 4)
    else:
        with pytest.raises(InUse):
            files.resize(2, 4)


def test_a_lease_that_holds_too_much_may_grow(files: Files) -> None:
    """Where use is beyond the limit already, more is always allowed, though it is not enough."""
    files.hold(os.getpid(), start_time(), 6, 0)
    assert files.resize(5, 4).limits == limits(5, 4)


def test_a_program_that_is_faster_than_we_are_wins(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory taken between the look and the update: the former limits hold again, and the user is told."""
    real = control.update

    def update(path: Path, wanted: Control) -> Control:
        if wanted.limits == limits(1, 4):
            files.hold(os.getpid(), start_time(), 3, 0)
        return real(path, wanted)

    monkeypatch.setattr(control, "update", update)
    with pytest.raises(InUse, match="hold 3072 MiB"):
        files.resize(1, 4)
    assert control.read(files.page) == Control("alice", limits(4, 4), generation=4)


def test_a_half_written_page_is_repaired(files: Files) -> None:
    """What a killed writer left is no reason to refuse."""
    with files.page.open("r+b") as file:
        file.seek(layout().offsetof("struct fenka_control", "generation"))
        file.write(struct.pack("<Q", 5))
    assert (
        files.resize(2, 2)
        == control.read(files.page)
        == Control("alice", limits(2, 2), generation=6)
    )


def test_other_cards_are_no_resize(files: Files) -> None:
    """A lease keeps its cards."""
    with pytest.raises(InvalidControl, match="cannot change which cards"):
        resize(files.page, files.slots, limits(1, 1)[:1])
    assert control.read(files.page).limits == limits(4, 4)
