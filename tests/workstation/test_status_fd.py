"""`fenka run --status-fd` tells another program how far a start is."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.workstation.conftest import HOLD, Workstation, refused

Start = Callable[[Sequence[str]], tuple[subprocess.Popen[str], int]]


@pytest.fixture
def start(t4: Workstation) -> Start:
    """Starts `fenka run`; returns the process, and the reading end of its pipe."""

    def begin(words: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
        receive, send = os.pipe()
        program = t4.run("--status-fd", str(send), *words, pass_fds=(send,))
        os.close(send)
        return program.process, receive

    return begin


def lines(receive: int) -> list[str]:
    """Return the lines of a pipe until its end."""
    with os.fdopen(receive) as pipe:
        return pipe.read().splitlines()


def test_pipe_ends_when_the_program_starts(start: Start) -> None:
    """Its last line says so. The program has not inherited the pipe."""
    process, receive = start(["--gpu-mem", "4", "--", *HOLD, "1"])
    assert lines(receive) == ["started"]
    assert process.poll() is None


def test_place_in_the_queue_is_reported(t4: Workstation, start: Start) -> None:
    """And the program starts as soon as there is room."""
    other = t4.run("--gpu-mem", "12", "--", *HOLD, "1")
    other.report()
    _, receive = start(["--gpu-mem", "4", "--", *HOLD, "1"])
    with os.fdopen(receive) as pipe:
        reason = "no GPU fits: 1 of 1 has too little memory"
        assert pipe.readline() == f"waiting, position 1 of 1: {reason}\n"
        assert other.end() == 0
        assert pipe.read().splitlines()[-1] == "started"


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (
            ["--gpu-mem", "15", "--", "true"],
            2,
            "no GPU fits: 1 of 1 has too little memory; the largest card has 14 units",
        ),
        (["--gpu-mem", "x", "--", "true"], 2, "'x' is no size"),
        (["--", "true"], 2, "no amount given"),
        (["--gpu-mem", "1", "--", "/nonexistent"], 127, "there is no program called /nonexistent"),
    ],
)
def test_reason_of_a_failed_start_is_the_last_line(
    start: Start, words: list[str], code: int, reason: str
) -> None:
    """It is the sentence that the command prints, too."""
    process, receive = start(words)
    last = lines(receive)[-1]
    assert last.startswith(f"failed: {reason}")
    _, printed = process.communicate()
    assert (process.returncode, printed) == (code, f"fenka: {last.removeprefix('failed: ')}\n")


def test_failed_exec_is_reported_after_the_grant(start: Start, tmp_path: Path) -> None:
    """Only the kernel knows that a file is no program."""
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF no more")
    program.chmod(0o755)
    process, receive = start(["--gpu-mem", "1", "--", str(program)])
    assert lines(receive) == [
        "started",
        f"failed: {program} cannot be started: Exec format error",
    ]
    process.communicate()
    assert process.returncode == 126


def test_script_without_an_interpreter_is_the_shell_s(t4: Workstation, tmp_path: Path) -> None:
    """execvp(3) and shells run such a file; it keeps its arguments and its exit code."""
    script = tmp_path / "train"
    script.write_text('echo "$0 $1 $2"; exit 3')
    script.chmod(0o755)
    ran = t4.fenka("run", "--gpu-mem", "1", "--", str(script), "a b", "c")
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, f"{script} a b c\n", "")


def test_program_starts_when_nobody_reads(t4: Workstation) -> None:
    """Whoever started it may be gone."""
    receive, send = os.pipe()
    os.close(receive)
    program = t4.run("--status-fd", str(send), "--gpu-mem", "1", "--", *HOLD, "1", pass_fds=(send,))
    os.close(send)
    assert program.report()["cards"][0]["result"] == 0


def test_unusable_descriptor_is_refused(t4: Workstation) -> None:
    """Also one of the program's own, which would be closed, and a start that leaves."""
    for number in ("99", "1", "-1", "9" * 30):
        result = t4.fenka("run", f"--status-fd={number}", "--gpu-mem", "1", "--", "true")
        refused(result, 2, f"--status-fd {number} is no open descriptor from 3 on: open one, .*")
    result = t4.fenka("run", "--status-fd=3", "-d", "--gpu-mem", "1", "--", sys.executable)
    refused(result, 2, "--status-fd: leave out --detach and --gang")
