"""The times of a log's lines."""

import os
import struct
from pathlib import Path

import pytest

from fenka.local.gang import LogTimes, LogWriter, times_file


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return the place of a log."""
    return tmp_path / "log"


def write(log: Path, *parts: tuple[float, bytes]) -> None:
    """Write parts at their times."""
    moments = iter([at for at, _ in parts])
    writer = LogWriter(log, lambda: next(moments))
    for _, data in parts:
        writer.write(data)
    writer.close()


def times(log: Path) -> LogTimes:
    """Return what is there now."""
    found = LogTimes(log)
    found.refresh()
    return found


def test_each_byte_has_the_time_at_which_it_was_read(log: Path) -> None:
    """Also after a restart, and what comes within a millisecond shares a time."""
    write(log, (10.0, b"a\nb"), (10.0005, b"c\n"), (20.0, b"d\n"))
    write(log, (30.0, b"e\n"))
    assert log.read_bytes() == b"a\nbc\nd\ne\n"
    assert [times(log).at(place) for place in range(9)] == [10.0] * 5 + [20.0] * 2 + [30.0] * 2
    assert [times(log).first_since(at) for at in (0, 10, 15, 30, 31)] == [0, 0, 5, 7, None]


def test_times_grow_with_the_log_when_it_is_read_meanwhile(log: Path) -> None:
    """An entry of which a part is there is read when it is complete."""
    writer = LogWriter(log, lambda: 10.0)
    reader = LogTimes(log)
    reader.refresh()
    assert reader.at(0) is None
    writer.write(b"a")
    reader.refresh()
    assert reader.at(0) == 10.0
    entry = struct.pack("<Qd", 1, 20.0)
    for part in (entry[:7], entry[7:]):
        with times_file(log).open("ab") as file:
            file.write(part)
        reader.refresh()
    assert reader.at(1) == 20.0


def test_part_of_an_entry_is_removed_when_the_log_is_written_again(log: Path) -> None:
    """A full disk leaves one."""
    write(log, (10.0, b"a\n"))
    with times_file(log).open("ab") as file:
        file.write(b"torn")
    write(log, (20.0, b"b\n"))
    assert times(log).at(2) == 20.0


def test_entries_are_ignored_when_they_make_no_sense(log: Path) -> None:
    """Programs of the same user can write them."""
    write(log, (10.0, b"a\n"))
    with times_file(log).open("ab") as file:
        for at in (float("nan"), float("inf"), -1.0, 1e300):
            file.write(struct.pack("<Qd", 0, at))
        file.write(struct.pack("<Qd", 2**64 - 1, 5.0))
    assert times(log).at(1) == 10.0


def test_pipe_in_place_of_the_times_is_an_error(log: Path) -> None:
    """Opening it would wait for a writer."""
    os.mkfifo(times_file(log))
    with pytest.raises(OSError, match="is not a regular file"):
        LogTimes(log)
