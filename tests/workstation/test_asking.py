"""What a client asks for, as jobs."""

import os

import msgspec
import pytest

from fenka.core.requests import BadRequest
from fenka.workstation.asking import Who, jobs
from fenka.workstation.protocol import Ask

OTHER = os.geteuid() + 4321
ASK = Ask(command=["/usr/bin/python3", "x.py"], gpu_mem="4")


def asked(uid: int = OTHER, **fields: object) -> list[str]:
    """The names of the jobs."""
    ask = msgspec.structs.replace(ASK, **fields)
    return [it.name for it in jobs(ask, Who(os.getpid(), uid), 1024, [], 0)]


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
    with pytest.raises(BadRequest, match=r"a priority above 0 is for \S+ to give, .* not 1"):
        asked(uid, priority=priority)


def test_members_of_a_gang() -> None:
    """Jobs of their own, with one entry; their names tell the rank."""
    made = jobs(
        msgspec.structs.replace(ASK, name="g", gang=2), Who(os.getpid(), 7), 1024, [], now=5.0
    )
    assert [(it.name, it.rank, it.title) for it in made] == [("g/0", 0, "g"), ("g/1", 1, "g")]
    assert len({it.id for it in made}) == 2
    assert len({it.entry for it in made}) == 1
    assert {it.wanted for it in made} == {"gang of 2: 4"}
    for name in ("g", "g/1", made[0].id):
        with pytest.raises(BadRequest, match=f"a job called {name} is already here"):
            jobs(msgspec.structs.replace(ASK, name=name), Who(os.getpid(), 7), 1024, made, 6.0)
    (later,) = jobs(ASK, Who(os.getpid(), 7), 1024, made, now=1.0)
    assert later.requested_at > 5.0, "although the clock was set back"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gang": 0}, "a gang has 1 to 256 members, not 0"),
        ({"limit_s": -1.0}, "--for takes seconds, more than none, not -1"),
        ({"priority": -2_000_000}, "a priority is a number from -1000000 to 1000000"),
        ({"cards": 17}, "one lease has at most 16 cards, not 17"),
    ],
)
def test_values_are_checked_here_too(fields: dict[str, object], sentence: str) -> None:
    """A client that does not check them gets nothing by that."""
    with pytest.raises(BadRequest, match=sentence):
        asked(**fields)  # type: ignore[arg-type]
