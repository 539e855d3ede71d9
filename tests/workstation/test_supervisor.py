"""Members start together or not at all, end together, and their output is prefixed with their rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
from fenka.local import gang

def run(size, member, required=None, **options):
    def body(rank, ready):
        try:
            member(rank, ready)
        finally:
            os._exit(0)
    members = [
        gang.Member(str(rank), partial(body, rank), required is None or rank in required)
        for rank in range(size)
    ]
    ended = gang.run(members, started=lambda _: os.write(1, b"started\\n"), **options)
    print(ended.status, ended.never_started, *[ended.cause] * bool(ended.cause), flush=True)

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


def test_others_end_when_the_required_members_have_succeeded() -> None:
    """The gang succeeds, whatever the others return when they are ended."""
    code = """
def member(rank, ready):
    signal.signal(signal.SIGTERM, lambda *_: (say(f"ended {rank}\\n"), os._exit(3)))
    ready()
    if rank in (1, 2):
        return
    signal.pause()

run(4, member, required={1, 2}, ended=lambda rank, code, ending: say(f"{rank} {code} {ending:d}\\n"))
"""
    first, *lines, last = python(code)
    assert (first, last) == ("started", "0 None")
    assert sorted(lines[:2]) == ["1 0 0", "2 0 0"]
    assert sorted(lines[2:]) == ["0 3 1", "3 3 1", "[0] ended 0", "[3] ended 3"]


def test_member_is_killed_when_its_grace_is_over() -> None:
    """A member that ignores SIGTERM gets SIGKILL."""
    code = """
def member(rank, ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    while rank:
        signal.pause()

ended = lambda rank, code, ending: say(f"{rank} {code} {ending:d}\\n")
run(2, member, required={0}, ended=ended, limits=gang.GangLimits(grace_s=0.1))
"""
    assert python(code) == ["started", "0 0 0", "1 -9 1", "0 None"]


def test_members_end_when_their_time_is_over() -> None:
    """The result names the cause, and so it does after a signal."""
    code = """
def member(rank, ready):
    ready()
    signal.pause()

run(2, member, limits=gang.GangLimits(timeout_s=0.05))
"""
    assert python(code) == ["started", "143 None timeout"]
    code = code.replace("0.05", "None").replace(
        "    signal.pause()", "    os.kill(os.getppid(), 15); signal.pause()"
    )
    assert python(code) == ["started", "143 None signal"]
