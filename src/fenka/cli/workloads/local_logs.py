"""Prints logs that are files of this machine."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from fenka.cli import tables
from fenka.cli.error_report import UserError, print_error
from fenka.cli.workloads.arguments import LogRequest
from fenka.core.errors import INVALID_INPUT
from fenka.jobs.disk_room import lack_of_room
from fenka.local.gang import LogTimes
from fenka.local.log_files import BLOCK_BYTES, last_lines

FOLLOW_INTERVAL_S = 0.1

UNKNOWN = "N/A"

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


def print_log(log: Path, part: LogRequest, ended: Callable[[], bool]) -> None:
    """Print a log until nothing is added to it. Raises UserError for times where the log has none."""
    since = None if part.since_s is None else time.time() - part.since_s
    if sentence := lack_of_room(log.parent):
        print_error(sentence)
    while True:
        # A program that has ended prints no more.
        last = ended()
        if log.exists():
            break
        if last:
            return
        time.sleep(FOLLOW_INTERVAL_S)
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(log.open("rb"))
        times = None
        if since is not None or part.timestamps:
            times = _times(log)
            opened.callback(times.close)
            times.refresh()
        file.seek(max(last_lines(file, part.tail), _since(file, times, since)))
        stamped = _Stamped(times if part.timestamps else None)
        while True:
            for place, block in _blocks(file):
                tables.write_bytes(stamped.block(place, block))
            if last:
                return
            time.sleep(FOLLOW_INTERVAL_S)
            last = ended()


def _times(log: Path) -> LogTimes:
    try:
        return LogTimes(log)
    except FileNotFoundError:
        raise UserError(
            "this log has no times: leave out --since and --timestamps", INVALID_INPUT
        ) from None


def _blocks(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield what is there now, with its places."""
    place = file.tell()
    while block := file.read(BLOCK_BYTES):
        yield place, block
        place += len(block)


def _since(file: BinaryIO, times: LogTimes | None, since: float | None) -> int:
    """Return where the first line begins that was read at this time or later."""
    if times is None or since is None:
        return 0
    end = file.seek(0, 2)
    place = times.first_since(since)
    if place is None or place > end:
        place = end
    if not place:
        return 0
    file.seek(place - 1)
    return place - 1 + len(file.readline())


class _Stamped:
    """Puts times before lines. times: None for no times."""

    def __init__(self, times: LogTimes | None) -> None:
        self._times, self._at_line_start = times, True

    def block(self, place: int, block: bytes) -> bytes:
        """Return a block of the log at a place, each line that begins in it with its time."""
        if self._times is None:
            return block
        # An entry is written before the bytes that it is about.
        self._times.refresh()
        parts = []
        for line in _LINE.findall(block):
            if self._at_line_start:
                parts.append(f"{_moment(self._times.at(place))} ".encode())
            parts.append(line)
            place += len(line)
            self._at_line_start = line.endswith(b"\n")
        return b"".join(parts)


def _moment(at: float | None) -> str:
    """Return a time as Kubernetes writes it."""
    if at is None:
        return UNKNOWN
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
