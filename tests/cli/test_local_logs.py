"""Logs that are files: their last lines, their latest ones, and their times."""

import re
import time
from pathlib import Path

import pytest

from fenka.cli.error_report import UserError
from fenka.cli.workloads import local_logs
from fenka.cli.workloads.arguments import LogRequest
from fenka.cli.workloads.local_logs import print_log
from fenka.local.gang import LogWriter


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return a log of which the last two lines are new, and the last one is not complete."""
    path, now = tmp_path / "log", time.time()
    moments = iter([now - 1000, now - 999, now - 2, now - 1])
    writer = LogWriter(path, lambda: next(moments))
    for part in (b"1\n2", b"\n3\r3\n", b"4\n", b"5"):
        writer.write(part)
    writer.close()
    return path


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (LogRequest(), "1\n2\n3\r3\n4\n5"),
        (LogRequest(tail=0), ""),
        (LogRequest(tail=1), "5"),
        (LogRequest(tail=3), "3\r3\n4\n5"),
        (LogRequest(tail=9), "1\n2\n3\r3\n4\n5"),
        (LogRequest(since="60s"), "4\n5"),
        (LogRequest(since="0s"), ""),
        (LogRequest(since="5000s"), "1\n2\n3\r3\n4\n5"),
        (LogRequest(tail=1, since="60s"), "5"),
        (LogRequest(tail=4, since="60s"), "4\n5"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 16])
def test_log_is_what_the_options_select(
    log: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
    part: LogRequest,
    expected: str,
) -> None:
    """However it is read."""
    monkeypatch.setattr(local_logs, "BLOCK_BYTES", block_bytes)
    print_log(log, part, lambda: True)
    assert capfdbinary.readouterr().out.decode() == expected


@pytest.mark.parametrize("block_bytes", [1, 1 << 16])
def test_each_line_has_its_time_when_that_is_wanted(
    log: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
) -> None:
    """That of its first byte, as Kubernetes writes it; a carriage return ends no line."""
    monkeypatch.setattr(local_logs, "BLOCK_BYTES", block_bytes)
    print_log(log, LogRequest(timestamps=True), lambda: True)
    lines = capfdbinary.readouterr().out.decode().split("\n")
    stamps, texts = zip(*(line.split(" ", 1) for line in lines), strict=True)
    assert texts == ("1", "2", "3\r3", "4", "5")
    assert stamps[0] == stamps[1] < stamps[2] < stamps[3] < stamps[4]
    assert all(re.fullmatch(r"[0-9-]{10}T[0-9:]{8}\.[0-9]{6}Z", stamp) for stamp in stamps)


def test_log_is_followed_to_its_end_when_it_is_not_there_yet(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The end is looked for before the last reading, so that nothing printed before it is missing."""
    path, steps = tmp_path / "log", iter([None, b"a\n", b"b\nc", b"\nd\n"])
    writer: list[LogWriter] = []

    def ended() -> bool:
        for data in steps:
            if data is not None:
                writer[:] = writer or [LogWriter(path)]
                writer[0].write(data)
            return False
        writer[0].close()
        return True

    print_log(path, LogRequest(tail=1), ended)
    assert capfdbinary.readouterr().out == b"a\nb\nc\nd\n"


def test_times_are_refused_when_the_log_has_none(tmp_path: Path) -> None:
    """That of a job of `fenka run`, and what git printed."""
    path = tmp_path / "log"
    path.write_text("a\n")
    with pytest.raises(
        UserError, match="this log has no times: leave out --since and --timestamps"
    ):
        print_log(path, LogRequest(timestamps=True), lambda: True)
