"""A workstation goes from the last release to this one and back, under ten programs."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.skew.last_release import last_release_tree
from tests.workstation.conftest import HOLD, Program, Workstation, workstation_at

MIB = 200
"""Of each program."""


@pytest.fixture(scope="module")
def old() -> Path:
    """Return the interpreter of the last release, which has all of it installed."""
    try:
        return last_release_tree() / ".venv" / "bin" / "python"
    except LookupError as why:
        pytest.skip(str(why))


@pytest.fixture
def station(old: Path) -> Iterator[Workstation]:
    """A workstation with three T4s and the last release's daemon."""
    with workstation_at([]) as station:
        station.interpreter = str(old)
        station.start("--simulate", "T4*3")
        yield station


def start(station: Workstation, name: str, *options: str, units: int = 2) -> Program:
    """Start a program that allocates memory."""
    words = ["--gpu-mem", str(units), "--name", name, *options]
    program = station.run(*words, "--", *HOLD, str(MIB))
    assert [card["result"] for card in program.report()["cards"]] == [0]
    return program


def replace_daemon(station: Workstation, interpreter: str) -> None:
    """Go over to another release."""
    station.interpreter = interpreter
    before = station.daemon_pid()
    station.ok("daemon", "--restart")
    assert station.daemon_pid() != before


@pytest.mark.timeout(1800)  # The last release is built first.
def test_programs_go_on_when_a_workstation_is_upgraded_and_rolled_back(
    station: Workstation, old: Path
) -> None:
    """Commands of one release reach the other's daemon, too."""
    new = sys.executable
    # The first card is full then, and no other has 14 units left, but those that are not reserved have 2.
    programs = {f"p{number}": start(station, f"p{number}") for number in range(7)}
    programs["hard"] = start(station, "hard", "--gpu-core", "30")
    programs["soft"] = start(station, "soft", "--gpu-core", "40", "--gpu-core-mode", "soft")
    programs["large"] = start(station, "large", units=11)
    waiting = station.run("--gpu-mem", "14", "--name", "waits", "--", *HOLD, str(MIB))
    assert "position 1" in waiting.says()

    station.interpreter = new
    running = {name: job for name, job in station.jobs().items() if name != "waits"}
    assert set(running) == set(programs)
    late = start(station, "late")
    assert late.end() == 0

    for release in (new, str(old), new):
        replace_daemon(station, release)
        jobs = station.jobs()
        jobs.pop("waits")
        assert set(jobs) == set(programs)
        assert all(jobs[name]["pids"] == [program.pid] for name, program in programs.items())
        late = start(station, "late")
        assert late.end() == 0
        station.ok("resize", "p0", "--gpu-mem", "1")
        station.ok("resize", "p0", "--gpu-mem", "2")

    for program in programs.values():
        assert program.end() == 0
    waiting.report()
    assert waiting.end() == 0
    ended = json.loads(station.ok("ps", "-a", "-o", "json"))["ended"]
    assert {row["name"] for row in ended} >= {*programs, "waits", "late"}
    assert {row["status"] for row in ended} == {0}
