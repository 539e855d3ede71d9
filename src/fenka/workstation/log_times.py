"""The times of a log's lines, in a file beside it: pairs of a place in the log and a time.

The log itself stays what its process has printed. Programs of the same user can write both files. So a
reader ignores entries that make no sense, and waits for neither file.
"""

import bisect
import contextlib
import struct
import time
from collections.abc import Callable
from pathlib import Path

from fenka.isolation.files import open_regular_file

_ENTRY = struct.Struct("<Qd")
"""A place in the log, and the Unix time at which the bytes from there on were read."""

RESOLUTION_S = 0.001
"""Bytes that are read within this time share an entry, which bounds the file of times."""

_MAX_TIME = 253_402_300_799
"""The last second of the year 9999."""


def times_file(log: Path) -> Path:
    """Return the file with a log's times."""
    return log.with_name(f"{log.name}-times")


class LogWriter:
    """Appends to a log, and to its times. No error ends the program whose output it is."""

    def __init__(self, log: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises OSError."""
        self._clock, self._noted_at = clock, 0.0
        with contextlib.ExitStack() as opened:
            # First: where there is a log, its times are there.
            self._times = opened.enter_context(times_file(log).open("ab", buffering=0))
            self._drop_part()
            self._log = opened.enter_context(log.open("ab", buffering=0))
            self._opened = opened.pop_all()

    def write(self, data: bytes) -> None:
        """Append what was read now. Raises OSError."""
        now = self._clock()
        if abs(now - self._noted_at) >= RESOLUTION_S:
            if self._times.write(_ENTRY.pack(self._log.tell(), now)) == _ENTRY.size:
                self._noted_at = now
            else:
                self._drop_part()
        self._log.write(data)

    def _drop_part(self) -> None:
        """Remove a part of an entry, as a full disk leaves it: it would shift all later ones."""
        self._times.truncate(self._times.tell() // _ENTRY.size * _ENTRY.size)

    def close(self) -> None:
        """Close both files."""
        self._opened.close()


class LogTimes:
    """Reads the times of a log, which may be growing."""

    def __init__(self, log: Path) -> None:
        """Raises OSError, FileNotFoundError for a log without times."""
        self._file = open_regular_file(times_file(log))
        self._entries: list[tuple[int, float]] = []

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def refresh(self) -> None:
        """Read what was added."""
        data = self._file.read()
        # A part of an entry is read again when the rest is there.
        self._file.seek(-(len(data) % _ENTRY.size), 1)
        whole = data[: len(data) // _ENTRY.size * _ENTRY.size]
        added = [entry for entry in _ENTRY.iter_unpack(whole) if 0 <= entry[1] <= _MAX_TIME]
        if added:
            self._entries += added
            self._entries.sort(key=lambda entry: entry[0])

    def at(self, place: int) -> float | None:
        """Return when the byte at a place was read; None if that is unknown."""
        number = bisect.bisect_right(self._entries, place, key=lambda entry: entry[0])
        return self._entries[number - 1][1] if number else None

    def first_since(self, moment: float) -> int | None:
        """Return the first place that was read at this time or later; None if there is none yet."""
        return next((place for place, at in self._entries if at >= moment), None)
