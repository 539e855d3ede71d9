"""Whatever is wrong with the file, what is lost is history, and a sentence says so."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fenka.core.metering import SECOND_US
from fenka.history.history_store import HistoryStore
from tests.history.records import MIB, charged, observed, sample

FILE = "history.db"


def written(directory: Path) -> HistoryStore:
    """A history with some content, closed."""
    store = HistoryStore(directory / FILE, 8 * MIB)
    for at in range(0, 600, 5):
        assert store.write(sample(at, at)), store.problem
    store.close()
    return store


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    """The kind and the content of each file."""
    return {
        path.name: (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in directory.iterdir()
    }


def break_begin(file: Path) -> None:
    """Overwrite the header."""
    file.write_bytes(b"no database at all" + file.read_bytes()[18:])


def break_pages(file: Path) -> None:
    """Overwrite all pages but the first."""
    content = file.read_bytes()
    file.write_bytes(content[:4096] + os.urandom(len(content) - 4096))


@pytest.mark.parametrize("damage", [break_begin, break_pages])
def test_history_begins_again_when_its_file_is_broken(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """The broken file is put aside, and the next reading is recorded."""
    store = written(tmp_path)
    damage(store.database.file)
    assert store.write(sample(600, 1))
    assert store.problem == (
        f"history begins again: {tmp_path / FILE} was broken, and is now {FILE}.broken"
    )
    assert (tmp_path / f"{FILE}.broken").stat().st_size > 4096
    series = store.series("program", "j1", 0, 10**10, 1)
    assert series is not None


def make_link(file: Path) -> None:
    """Replace the file by a symbolic link to another database."""
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def make_hard_link(file: Path) -> None:
    """Give the file a second name."""
    os.link(file, file.with_name("second"))


def make_directory(file: Path) -> None:
    """Replace the file by a directory."""
    file.unlink()
    file.mkdir()


def make_pipe(file: Path) -> None:
    """Replace the file by a pipe, which nobody reads."""
    file.unlink()
    os.mkfifo(file)


def open_directory(file: Path) -> None:
    """Let everybody write its directory."""
    file.parent.chmod(0o777)


def make_foreign(file: Path) -> None:
    """Give the file to another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(file, 1234, -1)


def make_newer(file: Path) -> None:
    """Write a later schema's version."""
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (make_link, "it is a symbolic link: remove it"),
        (make_hard_link, f"it is no file of user {os.geteuid()} alone: remove it"),
        (make_directory, "Is a directory"),
        (make_pipe, f"it is no file of user {os.geteuid()} alone: remove it"),
        (make_foreign, f"it is no file of user {os.geteuid()} alone: remove it"),
        (open_directory, "other users can write DIRECTORY: `chmod go-w DIRECTORY`"),
        (make_newer, "a newer fenka has written it: use that one, or remove the file"),
    ],
)
def test_nothing_is_written_when_the_file_is_not_this_users(
    tmp_path: Path, change: Callable[[Path], None], sentence: str
) -> None:
    """A link, another's file, and one in a directory of others are left as they are."""
    store = written(tmp_path)
    change(store.database.file)
    before = contents(tmp_path)
    assert not store.write(sample(600, 1))
    assert store.problem == (
        f"history is not recorded: {tmp_path / FILE}: {sentence.replace('DIRECTORY', str(tmp_path))}"
    )
    assert store.usage(0, 10**6) is None
    assert store.series("program", "j1", 0, 9, 1) is None
    assert contents(tmp_path) == before


def test_usage_is_written_later_when_another_program_has_the_file(tmp_path: Path) -> None:
    """A locked file is tried again at the next write."""
    store = written(tmp_path)
    other = sqlite3.connect(store.database.file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    batch = charged(observed(0), observed(60))
    assert not store.write(batch)
    assert store.problem == (f"history is not recorded: {tmp_path / FILE}: another program uses it")
    other.close()
    assert store.write(batch)
    assert store.problem == ""
    records = store.usage(0, 10**6)
    assert records is not None
    assert sum(record.amounts.card_us for record in records) == 60 * SECOND_US


def test_history_goes_on_when_a_full_disk_has_room_again(tmp_path: Path) -> None:
    """Files of this process may not grow for a while."""
    store = written(tmp_path)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, former[1]))
    try:
        results = [store.write(sample(at, 1)) for at in range(600, 900, 5)]
        assert not any(results)
        assert store.problem.startswith(f"history is not recorded: {tmp_path / FILE}: the disk ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert store.write(sample(900, 5))
    assert store.problem == ""


def test_there_is_no_directory_when_nothing_was_written(tmp_path: Path) -> None:
    """A path through a file is no directory, and no exception."""
    (tmp_path / "file").write_text("")
    store = HistoryStore(tmp_path / "file" / FILE, MIB)
    assert not store.write(sample(0, 1))
    assert "Not a directory" in store.problem or "File exists" in store.problem


def test_no_second_is_lost_or_counted_twice_when_the_writer_is_killed(tmp_path: Path) -> None:
    """SIGKILL at any moment, again and again: usage is what the last whole batch says."""
    file = tmp_path / FILE
    for number in range(4):
        with subprocess.Popen(
            [sys.executable, "-m", "tests.history.writer", str(file), f"observer-{number}"],
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout
            said = [int(writer.stdout.readline()) for _ in range(30 + 17 * number)]
            writer.send_signal(signal.SIGKILL)
            said += map(int, writer.stdout.read().split())
        store = HistoryStore(file, 8 * MIB)
        records = store.usage(0, 10**6)
        assert records is not None, store.problem
        total_s = sum(record.amounts.card_us for record in records) // SECOND_US
        assert said[-1] <= total_s <= said[-1] + 5
        begin = records[0].day * 86400
        readings = store.series("program", "j1", begin, begin + total_s + 5, 9999)
        assert readings is not None
        assert max(filter(None, readings.most["used_mib"])) == total_s - 5
        store.close()
