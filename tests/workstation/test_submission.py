"""What a client asks for, as jobs."""

import os
from typing import Any

import msgspec
import pytest

from fenka.core.request import InvalidRequest
from fenka.workstation.protocol import SubmitJob
from fenka.workstation.submission import NAME, Peer, create_jobs, truncate

OTHER = os.geteuid() + 4321
ASK = SubmitJob(command=["/usr/bin/python3", "x.py"], gpu_mem="4")


def asked(uid: int = OTHER, **fields: object) -> list[str]:
    """The names of the jobs."""
    ask = msgspec.structs.replace(ASK, **fields)
    return [it.name for it in create_jobs(ask, Peer(os.getpid(), uid, 1), 1024, [], 0)]


@pytest.mark.parametrize(
    ("uid", "priority", "refused"),
    [
        (OTHER, 0, False),
        (OTHER, -5, False),
        (OTHER, 1, True),
        (os.geteuid(), 1, False),  # their own daemon
        (0, 1, False),
    ],
)
def test_who_may_give_which_priority(uid: int, priority: int, refused: bool) -> None:
    """Nobody goes before others on somebody else's daemon, and everybody may go behind."""
    if not refused:
        assert asked(uid, name="x", priority=priority) == ["x"]
        return
    with pytest.raises(
        InvalidRequest,
        match=r"only \S+, who runs this daemon, may give a priority above 0: .* not 1",
    ):
        asked(uid, priority=priority)


def test_members_of_a_gang() -> None:
    """Jobs of their own, with one entry; their names tell the rank."""
    made = create_jobs(
        msgspec.structs.replace(ASK, name="g", gang=2), Peer(os.getpid(), 7, 1), 1024, [], now=5.0
    )
    assert [(it.name, it.rank, it.display_name) for it in made] == [
        ("g/0", 0, "g"),
        ("g/1", 1, "g"),
    ]
    assert len({it.id for it in made}) == 2
    assert len({it.queue_id for it in made}) == 1
    assert {it.summary for it in made} == {"gang of 2: 4"}
    for name in ("g", "g/1", made[0].id):
        with pytest.raises(
            InvalidRequest, match=f"a job called {name} is already here|'g/1' is no name"
        ):
            create_jobs(
                msgspec.structs.replace(ASK, name=name), Peer(os.getpid(), 7, 1), 1024, made, 6.0
            )
    (later,) = create_jobs(ASK, Peer(os.getpid(), 7, 1), 1024, made, now=1.0)
    assert later.requested_at > 5.0, "although the clock was set back"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gang": 0}, "a gang has 1 to 256 members, not 0"),
        ({"time_limit_s": -1.0}, "--time-limit must be a positive number of seconds, got -1"),
        ({"priority": -2_000_000}, "a priority is a number from -1000000 to 1000000"),
        ({"cards": 17}, "one lease has at most 16 cards, not 17"),
    ],
)
def test_values_are_checked_here_too(fields: dict[str, object], sentence: str) -> None:
    """A client that does not check them gets nothing by that."""
    with pytest.raises(InvalidRequest, match=sentence):
        asked(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["\x1b]0;x\x07", "../x", "-x", "x" * 64, "a b", "a/0", "é", "x\n"])
def test_names_that_are_none_are_refused_by_the_daemon(name: str) -> None:
    """A client of somebody's own need not check them."""
    with pytest.raises(InvalidRequest, match="is no name"):
        asked(name=name)


def test_job_without_a_name_gets_one_that_is() -> None:
    """Whatever its program is called."""
    for command in (["/x/my prog\x1b[2J"], ["../.."], ["é"], ["-"], ["x" * 300], []):
        (name,) = asked(command=command)
        assert NAME.fullmatch(name)


def test_much_of_a_long_command_is_not_kept() -> None:
    """It is there for people to recognise it; what is no text is replaced."""
    ask = msgspec.structs.replace(ASK, command=["python", "-c", "x" * 9000, "y"])
    short = truncate(ask)
    assert short.command[:2] == ["python", "-c"]
    assert len(short.command) == 3
    assert len("".join(short.command)) < 2100
    assert truncate(ASK) == ASK
    odd = msgspec.structs.replace(ASK, command=["caf\udce9"], directory="/\udce9")
    assert (truncate(odd).command, truncate(odd).directory) == (["caf?"], "/?")


@pytest.mark.parametrize(
    "fields", [{"models": ["x"] * 65}, {"models": ["x" * 129]}, {"gpu_mem": "0" * 129}]
)
def test_long_requests_are_refused(fields: dict[str, Any]) -> None:
    """What waits is kept in memory and on the disk."""
    with pytest.raises(InvalidRequest, match="at most 64 models"):
        asked(**fields)
