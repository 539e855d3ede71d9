"""Members start together or not at all, end together, and their output is prefixed with their rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import os, sys, time
from pathlib import Path
from fenka.workstation import supervisor

def run(size, member, **options):
    def body(rank, ready):
        try:
            member(rank, ready)
        finally:
            os._exit(0)
    ended = supervisor.run(size, body, started=lambda: os.write(1, b"started\\n"), **options)
    print(ended.status, ended.never_started)

def say(text):
    os.write(1, text.encode())
"""


def python(code: str) -> list[str]:
    """Run the code, and return its output's lines."""
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


def test_lines_stay_whole_when_members_write_in_pieces() -> None:
    """Two members write pieces of lines concurrently; the last line has no newline."""
    code = """
def member(rank, ready):
    ready()
    for piece in ("a", "b\\nc", "d\\n", "\\n", "e"):
        say(piece)
        os.sched_yield()

run(2, member)
"""
    first, *lines, last = python(code)
    assert first == "started"
    for rank in range(2):
        printed = [line for line in lines if line.startswith(f"[{rank}]")]
        assert printed == [f"[{rank}] ab", f"[{rank}] cd", f"[{rank}] ", f"[{rank}] e"]
    assert last == "0 None"


@pytest.mark.parametrize(
    ("end", "status"), [("os._exit(4)", 4), ("os._exit(0)", 1), ("os.kill(os.getpid(), 9)", 137)]
)
def test_no_member_starts_when_one_ends_before(end: str, status: int) -> None:
    """One member ends before it is ready: no other starts, and the result names it."""
    code = f"""
def member(rank, ready):
    if rank == 1:
        {end}
    ready()
    say("never")

run(3, member)
"""
    assert python(code) == [f"{status} 1"]


def test_no_member_starts_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """The supervisor is killed when all members but one are ready: they end by themselves."""
    code = f"""
def member(rank, ready):
    if rank == 1:
        os.close(os.open({str(tmp_path / "pipe")!r}, os.O_RDONLY))  # waits for the other end
        os.kill(os.getppid(), 9)
    else:
        os.close(os.open({str(tmp_path / "pipe")!r}, os.O_WRONLY))
    ready()
    say("never")

run(2, member)
"""
    os.mkfifo(tmp_path / "pipe")
    # Its output ends when the last member has ended.
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (-9, "")


def test_output_is_logged_by_rank(tmp_path: Path) -> None:
    """The log has both streams without prefixes."""
    code = f"""
def member(rank, ready):
    ready()
    say(f"out {{rank}}\\n")
    os.write(2, b"err")

run(2, member, logs=Path({str(tmp_path)!r}))
"""
    python(code)
    for rank in range(2):
        assert sorted((tmp_path / str(rank) / "log").read_text()) == sorted(f"out {rank}\nerr")


def test_gang_ends_when_its_output_is_closed() -> None:
    """The reader closes the output, as `| head` does."""
    code = """
def member(rank, ready):
    ready()
    while True:
        say("y\\n")

run(2, member)
"""
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout
        supervisor.stdout.readline()
        supervisor.stdout.close()
        assert supervisor.wait() != 0
