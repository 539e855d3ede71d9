"""Reading accounts, whatever a program has written."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fenka.isolation import account
from fenka.isolation.account import AccountSlot, InvalidAccount
from fenka.isolation.lease_control import constant, layout

CARDS = 16
SLOTS = 1024


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a new account."""
    account.create(tmp_path / "slots")
    return tmp_path / "slots"


def put(path: Path, field: str, index: int, word: int) -> None:
    """Write one word of the account, as a program could."""
    offset = layout().offsetof("struct fenka_account", field) + 8 * index
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<Q", word))


def identity(pid: int, start: int, namespace: int = 0, emptying: int = 0) -> int:
    """Return the word that names a slot's owner."""
    return pid | emptying << 22 | namespace << 23 | start << 32


def held(*by_card: int) -> tuple[int, ...]:
    """Return bytes by card: these on the first cards, none on the others."""
    return by_card + (0,) * (CARDS - len(by_card))


def test_empty_account_has_the_golden_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shim of another version must know the file: its header and size do not change."""
    own = Path("/proc/self/ns/pid").stat().st_ino
    monkeypatch.setattr(account, "INITIAL_PID_NAMESPACE", own)
    account.create(tmp_path / "golden")
    data = (tmp_path / "golden").read_bytes()
    assert data[:24] == b"FNKACCNT" + struct.pack("<IIQ", 6, 1024, 0)
    assert len(data) == 64 + 2 * 8 * 256 + 3 * 8 * 16 + 8 * 1024 + 3 * 16 * 8 * 1024 + 16 * 128
    assert not any(data[24:])


def test_account_is_writable_by_all_when_it_has_no_owner(path: Path) -> None:
    """Programs of any user in the lease may write it; nobody holds anything."""
    assert path.stat().st_mode & 0o777 == 0o666
    assert account.read(path).processes == ()
    assert account.read(path).memory_bytes == held()


def test_account_is_closed_to_others_when_it_has_an_owner(tmp_path: Path) -> None:
    """Others can neither read what its programs hold, nor fill it, nor cut it."""
    account.create(tmp_path / "slots", os.geteuid())
    status = (tmp_path / "slots").stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, os.geteuid())


def test_slot_is_not_counted_when_its_namespace_has_ended(path: Path) -> None:
    """The agent has seen that nobody of it lives; a process will empty the slot when it needs the memory."""
    put(path, "pid_namespaces", 3, 77)
    put(path, "identity", 4, identity(100, 5000, namespace=3))
    put(path, "memory", 4, 1 << 30)
    assert account.read(path).memory_bytes == held(1 << 30)
    put(path, "namespace_states", 3, constant("FENKA_NAMESPACE_ENDED"))
    assert account.read(path).processes == ()


def test_create_fails_when_the_account_exists(path: Path) -> None:
    """Programs that have mapped the file must not lose it."""
    with pytest.raises(FileExistsError):
        account.create(path)


def test_read_returns_processes_and_totals(path: Path) -> None:
    """Each slot is one process, its bytes by card; the totals are their sums."""
    put(path, "pid_namespaces", 0, 4026531836)
    put(path, "identity", 0, identity(100, 5000))
    put(path, "memory", 0, 1 << 30)
    put(path, "memory", SLOTS, 7)
    put(path, "identity", 1023, identity((1 << 22) - 1, (1 << 32) - 1))
    put(path, "memory", 1023, 1)
    content = account.read(path)
    assert content.processes == (
        AccountSlot(100, 5000, 4026531836, held(1 << 30, 7)),
        AccountSlot((1 << 22) - 1, (1 << 32) - 1, 4026531836, held(1)),
    )
    assert content.memory_bytes == held((1 << 30) + 1, 7)


def test_namespace_is_zero_when_it_is_unknown(path: Path) -> None:
    """Index 255 says that the table had no room."""
    put(path, "pid_namespaces", 255, 9)
    put(path, "identity", 0, identity(1, 1, namespace=255))
    put(path, "identity", 1, identity(2, 1, namespace=3))
    assert [p.namespace for p in account.read(path).processes] == [0, 0]


def test_slot_is_not_counted_when_it_is_being_emptied(path: Path) -> None:
    """Its owner is dead, and the process that it names holds nothing there."""
    put(path, "identity", 4, identity(100, 5000, emptying=1))
    put(path, "memory", 4, 1 << 30)
    assert account.read(path).processes == ()


@pytest.mark.parametrize(
    ("word", "bytes_"), [(identity(5, 5), 1 << 50), (identity(5, 5), (1 << 64) - 1), (0, 4096)]
)
def test_slot_counts_as_empty_when_its_content_is_impossible(
    path: Path, word: int, bytes_: int
) -> None:
    """A pebibyte counts as nothing. Memory without an owner counts."""
    put(path, "identity", 9, word)
    put(path, "memory", 9, bytes_)
    put(path, "identity", 10, identity(6, 6))
    put(path, "memory", 10, 10)
    content = account.read(path)
    assert content.memory_bytes[0] == 10 + (4096 if bytes_ == 4096 else 0)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(2, 18_600), st.integers(0, (1 << 64) - 1)), max_size=50),
    st.integers(24, 200_000),
)
def test_read_succeeds_when_the_content_is_arbitrary(
    path: Path, words: list[tuple[int, int]], size: int
) -> None:
    """Whatever a program writes behind the header, wherever it cuts the file, reading gives an account."""
    for index, word in words:
        put(path, "slots_used", index, word)
    os.truncate(path, size)
    content = account.read(path)
    assert all(0 <= total < 3 * SLOTS << 50 for total in content.memory_bytes)


def test_shared_memory_is_counted_once_when_its_exporter_has_freed_it(path: Path) -> None:
    """Of 5 + 7 bytes that two hold, 4 are exported; another two imported 6 and 3: max(6, 3) - 4 = 2 more."""
    put(path, "slots_used", 0, 8)
    put(path, "shared_cards", 0, 1)
    for slot, (memory, exported, imported) in enumerate([(5, 4, 0), (7, 0, 6), (0, 0, 3)]):
        put(path, "identity", slot, identity(100 + slot, 5000))
        put(path, "memory", slot, memory)
        put(path, "exported", slot, exported)
        put(path, "imported", slot, imported)
    assert account.read(path).memory_bytes == held(5 + 7 + 2)
    put(path, "exported", 1, 3)
    assert account.read(path).memory_bytes == held(5 + 7)


def test_shared_memory_is_counted_when_its_exporter_has_ended(path: Path) -> None:
    """What a dead process has exported, and what makers gave up that others hold."""
    put(path, "identity", 0, identity(100, 5000) | 1 << constant("FENKA_IDENTITY_ORPHANED"))
    put(path, "exported", 0, 6)
    put(path, "identity", 1, identity(101, 5000))
    put(path, "memory", 1, 3)
    put(path, "imported", 1, 7)
    put(path, "released", 0, 1)
    content = account.read(path)
    assert content.memory_bytes == held(3 + 6 + 1)
    assert [p.orphaned for p in content.processes] == [True, False]


def test_slot_has_pid_and_time_namespace(path: Path) -> None:
    """PID namespace and time namespace together say who may judge whom."""
    put(path, "pid_namespaces", 0, 4026531836 | 4026531834 << 32)
    put(path, "identity", 0, identity(100, 5000))
    (process,) = account.read(path).processes
    assert (process.namespace, process.time_namespace) == (4026531836, 4026531834)


NOT_ACCOUNTS = {
    "empty": b"",
    "short": b"FNKACCNT",
    "another magic": struct.pack("<QII", 1, 1, 1024),
    "another version": b"FNKACCNT" + struct.pack("<II", 1, 1024),
    "another number of slots": b"FNKACCNT" + struct.pack("<II", 2, 64),
}


@pytest.mark.parametrize("data", NOT_ACCOUNTS.values(), ids=NOT_ACCOUNTS)
def test_read_fails_when_the_file_is_no_account(tmp_path: Path, data: bytes) -> None:
    """A file that does not begin as an account does is named in the error."""
    path = tmp_path / "slots"
    path.write_bytes(data)
    with pytest.raises(InvalidAccount, match=f"{path}: does not begin as an account"):
        account.read(path)


def test_read_fails_at_once_when_the_file_is_special(tmp_path: Path, path: Path) -> None:
    """What a program puts in the file's place cannot make the agent wait, or read something else."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidAccount, match="is not a regular file"):
        account.read(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="Too many levels"):
        account.read(tmp_path / "link")


def test_header_s_offsets_match_its_structs() -> None:
    """Its arrays have the lengths that its constants state."""
    page = layout().new("struct fenka_account *")
    assert len(page.identity) == constant("FENKA_MAX_SLOTS") == SLOTS
    assert len(page.memory) == constant("FENKA_MAX_CARDS") == CARDS
    assert len(page.memory[0]) == SLOTS
    assert len(page.pid_namespaces) == constant("FENKA_MAX_NAMESPACES") + 1
