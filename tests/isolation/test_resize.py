"""Resizing a lease, with accounts that the test writes."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fenka.isolation import account, lease_control
from fenka.isolation.lease_control import Control, InvalidControl, Limit, layout
from fenka.isolation.limit_changes import InUse, resize

UUIDS = tuple(f"GPU-00000000-0000-0000-0000-00000000000{i}" for i in range(2))
GIB = 1 << 30
SLOTS = 1024
FIRST_NAMESPACE = 0xEFFFFFFC


def limits(*gib: float) -> tuple[Limit, ...]:
    """Return limits of these sizes, card by card."""
    return tuple(Limit(u, int(g * GIB)) for u, g in zip(UUIDS, gib, strict=True))


class Files:
    """A lease of 4 GiB of each of two cards."""

    def __init__(self, folder: Path) -> None:
        self.page, self.slots = folder / "control", folder / "slots"
        lease_control.write(self.page, Control("alice", limits(4, 4)))
        account.create(self.slots)

    def put(self, field: str, index: int, word: int) -> None:
        """Write one word of the account."""
        with self.slots.open("r+b") as file:
            file.seek(layout().offsetof("struct fenka_account", field) + 8 * index)
            file.write(struct.pack("<Q", word))

    def hold(self, pid: int, start: int, *gib: float, slot: int = 0, namespace: int = 0) -> None:
        """Write what a process reports to hold."""
        inode = namespace or Path("/proc/self/ns/pid").stat().st_ino
        self.put("pid_namespaces", slot, inode)
        self.put("identity", slot, pid | slot << 23 | start << 32)
        for card, size in enumerate(gib):
            self.put("memory", card * SLOTS + slot, int(size * GIB))

    def resize(self, *gib: float) -> Control:
        """Resize the lease to these sizes, card by card."""
        return resize(self.page, self.slots, limits(*gib))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Return a lease that no program uses."""
    return Files(tmp_path)


def start_time() -> int:
    """Return the start time of this process."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def test_lease_gets_its_new_size_when_programs_hold_no_more(files: Files) -> None:
    """It may shrink to what is held, to the byte. Each change has a new generation."""
    files.hold(os.getpid(), start_time(), 2, 1)
    assert files.resize(8, 1) == Control("alice", limits(8, 1), generation=2)
    assert (
        files.resize(2, 4)
        == lease_control.read(files.page)
        == Control("alice", limits(2, 4), generation=4)
    )


def test_resize_fails_when_programs_hold_more(files: Files) -> None:
    """The sentence names the card, the amount and what to do. Nothing changes on any card."""
    files.hold(os.getpid(), start_time(), 1, 2.5)
    files.hold(4_000_000, 1, 0, 0.5, slot=1, namespace=7)
    files.put("pid_namespaces", 1, 0)  # its namespace is unknown
    before = files.page.read_bytes()
    with pytest.raises(InUse) as rejection:
        files.resize(1, 2)
    assert str(rejection.value) == (
        f"{UUIDS[1]} cannot shrink to 2048 MiB: the lease's programs hold 3072 MiB of it; "
        "end some of them, or leave it at least that much"
    )
    assert files.page.read_bytes() == before


def test_process_is_not_counted_when_it_has_ended(files: Files) -> None:
    """Neither is one whose PID was used again."""
    files.hold((1 << 22) - 1, 1, 3, 0)
    files.hold(os.getpid(), start_time() - 1, 3, 0, slot=1)
    assert files.resize(1, 4).limits == limits(1, 4)


def test_process_of_another_namespace_is_counted_when_it_lives(files: Files) -> None:
    """A container's processes have PIDs of its own namespace."""
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


def test_lease_may_grow_when_it_holds_more_than_its_new_size(files: Files) -> None:
    """A larger limit is always allowed, even if it is not enough."""
    files.hold(os.getpid(), start_time(), 6, 0)
    assert files.resize(5, 4).limits == limits(5, 4)


def test_resize_is_undone_when_a_program_allocates_meanwhile(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It allocates between check and update. The former limits are in force again."""
    real = lease_control.update

    def update(path: Path, wanted: Control) -> Control:
        if wanted.limits == limits(1, 4):
            files.hold(os.getpid(), start_time(), 3, 0)
        return real(path, wanted)

    monkeypatch.setattr(lease_control, "update", update)
    with pytest.raises(InUse, match="hold 3072 MiB"):
        files.resize(1, 4)
    assert lease_control.read(files.page) == Control("alice", limits(4, 4), generation=4)


def test_page_is_repaired_when_a_writer_was_killed(files: Files) -> None:
    """An odd generation does not prevent the next resize."""
    with files.page.open("r+b") as file:
        file.seek(layout().offsetof("struct fenka_control", "generation"))
        file.write(struct.pack("<Q", 5))
    assert (
        files.resize(2, 2)
        == lease_control.read(files.page)
        == Control("alice", limits(2, 2), generation=6)
    )


def test_resize_fails_when_the_cards_differ(files: Files) -> None:
    """A lease keeps its cards."""
    with pytest.raises(InvalidControl, match="cannot change which cards"):
        resize(files.page, files.slots, limits(1, 1)[:1])
    assert lease_control.read(files.page).limits == limits(4, 4)
