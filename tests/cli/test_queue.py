"""`fenka queue`: the rows, and what is printed of them."""

import os
from pathlib import Path

import pytest

from fenka.cli import tables
from fenka.cli.queue_command import table
from fenka.local.views import queue_rows
from fenka.views.workloads import QueueRow
from fenka.workstation.protocol import CardView, JobView, MachineSnapshot
from tests.workstation.conftest import HOLD, Workstation, refused, workstation_at

NOW = 1000.0

ROWS = [
    QueueRow(
        1, "night", "ann", 5, "gang of 4: 8", NOW - 300, ["0", "1"], NOW + 90, "too full", 600.0
    ),
    QueueRow(2, "try", "bob", -1, "2 x 3, 30% hard", NOW - 7, ["2"], None, "too full as well"),
    QueueRow(3, "last", "bob", -1, "whole", NOW, why="kept for others"),
]


def test_queue_table_shows_reservations_and_ages() -> None:
    """Cards, and when they will do where that is known; the sentence last."""
    assert tables.align(table(ROWS, NOW)) == [
        "POSITION  NAME   NAMESPACE  PRIORITY  ASKS             SINCE  USED  RESERVED   WHY",
        "1         night  ann        5         gang of 4: 8     5m     10m   0,1 in 1m  too full",
        "2         try    bob        -1        2 x 3, 30% hard  7s     0s    2          too full as well",
        "3         last   bob        -1        whole            0s     0s    -          kept for others",
    ]


def job(name: str, position: int | None, **more: object) -> JobView:
    """One of ann's."""
    fields = {
        "user": "ann",
        "uid": 7,
        "pid": 1,
        "kind": "run",
        "state": "waiting" if position else "running",
        "command": ["x"],
        "directory": "/",
        "requested_at": 3.0,
        "started_at": None,
        "isolation": "namespace",
        "summary": "4",
        "whole": False,
        "position": position,
    }
    return JobView(id=name, name=name, **{**fields, **more})  # type: ignore[arg-type]


def snapshot_of(jobs: list[JobView]) -> MachineSnapshot:
    """Return what a daemon without cards answers."""
    return MachineSnapshot(
        version="1",
        pid=1,
        node="here",
        address="127.0.0.1",
        driver="1",
        cuda="12",
        simulated=True,
        library_dir="",
        policy="binpack",
        unit_mib=1024,
        cards=list[CardView](),
        jobs=jobs,
    )


def test_queue_rows_are_those_of_the_daemon() -> None:
    """Only those that wait, in the daemon's order; the namespace is the user."""
    world = snapshot_of(
        [
            job("runs", None),
            job("first", 1, priority=2, reserved=[0, 3], starts_by=9.0, reason="full"),
            job("second", 2),
        ]
    )
    assert queue_rows(world) == [
        QueueRow(1, "first", "ann", 2, "4", 3.0, ["0", "3"], 9.0, "full"),
        QueueRow(2, "second", "ann", 0, "4", 3.0),
    ]


def test_reason_has_a_line_of_its_own_when_the_terminal_is_narrow() -> None:
    """The command itself: in order, no line longer than the terminal; nobody: one sentence."""
    with workstation_at([]) as station:
        station.start("--simulate", "T4")
        assert station.ok("queue") == "no request is pending: a new one starts at once if it fits\n"
        assert station.ok("queue", "-o", "json") == "[]\n"
        assert station.ok("queue", "--local", "-o", "yaml") == "[]\n"
        station.run("--gpu-mem", "14", "--time-limit", "1000", "--", *HOLD, "1").report()
        for name, priority in (("a", "0"), ("b", "-3"), ("c", "4")):
            words = ("--priority", priority, "--gpu-mem", "8", "--name", name, "--detach", "--")
            assert station.ok("run", *words, "true").startswith(f"{name}: waiting, ")
        lines = station.ok("queue").splitlines()
        assert [line.split()[:2] for line in lines[1:]] == [["1", "c"], ["2", "a"], ["3", "b"]]
        # 1000 s and the grace of 10: at most 16 minutes from the start, and no less than 15 now
        assert "0 in 16m" in lines[1]
        shown = on_terminal(station, 60)
        assert len(shown) == 7
        assert all(len(line) <= 60 for line in shown)
        assert shown[2::2] == ["    no GPU fits: 1 of 1 has too little memory"] * 3
        assert [it["name"] for it in station.jobs().values() if it["position"]] == ["c", "a", "b"]


def on_terminal(station: Workstation, columns: int) -> list[str]:
    """`fenka queue` on a terminal of that width."""
    main, theirs = os.openpty()
    wide = {**station.environment, "COLUMNS": str(columns)}
    station.environment, former = wide, station.environment
    try:
        station.fenka("queue", stdout=theirs, capture_output=False)
    finally:
        station.environment = former
        os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:
            break
        if not piece:
            break
        text += piece
    os.close(main)
    return text.decode().splitlines()


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--local"], 1, r"no fenka daemon answers at .*"),
        (
            ["--local", "--cluster"],
            2,
            r"--local selects this machine, but another option selects a cluster: .*",
        ),
    ],
)
def test_queue_fails_when_there_is_no_daemon_and_no_cluster(
    tmp_path: Path, words: list[str], code: int, sentence: str
) -> None:
    """One sentence."""
    with workstation_at([]) as station:
        refused(station.fenka("queue", *words), code, sentence)
