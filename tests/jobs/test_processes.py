"""Processes of jobs: what children and their parents see of failures."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fenka.cli.error_report import UserError, report_errors
from fenka.jobs.processes import JobNotStarted, run_attached, start_in_background

pytestmark = pytest.mark.process  # forks

Notify = Callable[[str], None]


@pytest.fixture(autouse=True)
def _restored_signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def wait(pid: int) -> int:
    """Return the wait status of a child."""
    return os.waitpid(pid, 0)[1]


def test_status_lines_end_when_the_program_is_started(tmp_path: Path) -> None:
    """The pipe closes by exec; the program's output goes to the log."""

    def body(notify: Notify, _started: Callable[[], None]) -> None:
        notify("waiting, position 1 of 1: no room")
        os.execvp("echo", ["echo", "hello"])

    with start_in_background(body, tmp_path / "log", report_errors) as process:
        assert list(process.status_lines()) == ["waiting, position 1 of 1: no room"]
    assert wait(process.pid) == 0
    assert (tmp_path / "log").read_text() == "hello\n"


def test_background_failure_reaches_the_parent_when_nothing_was_started(tmp_path: Path) -> None:
    """With its sentence and its exit code."""

    def body(_notify: Notify, _started: Callable[[], None]) -> None:
        raise UserError("no room", 75)

    with (
        start_in_background(body, tmp_path / "log", report_errors) as process,
        pytest.raises(JobNotStarted, match="no room") as failure,
    ):
        list(process.status_lines())
    assert failure.value.exit_code == 75


def test_background_process_ends_when_the_parent_is_interrupted(tmp_path: Path) -> None:
    """A job whose state was not reported yet must leave nothing behind."""

    def body(_notify: Notify, _started: Callable[[], None]) -> None:
        os.execvp("sleep", ["sleep", "1000"])

    with (
        contextlib.suppress(KeyboardInterrupt),
        start_in_background(body, tmp_path / "log", report_errors) as process,
    ):
        list(process.status_lines())
        raise KeyboardInterrupt
    with pytest.raises(ChildProcessError):
        wait(process.pid)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (lambda: os._exit(7), 7),
        (lambda: os.kill(os.getpid(), 9), 137),
    ],
)
def test_attached_exit_code_is_the_childs(body: Callable[[], object], code: int) -> None:
    """As in shells: 128 and the signal's number if a signal ended it."""
    assert run_attached(body, wait, report_errors) == code
