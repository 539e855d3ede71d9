"""`fenka prioritize`: another place in the queue for what waits, with a daemon."""

import json

import pytest

from fenka.cli.error_report import UserError
from fenka.cli.quota import ask_daemon
from fenka.workstation import protocol
from fenka.workstation.client import DaemonConnection, RequestFailed
from fenka.workstation.paths import Runtime
from tests.workstation.conftest import HOLD, Program, Workstation, eventually, refused

WHOLE = ("--gpu-mem", "14")


def waiting(station: Workstation) -> list[tuple[str, int]]:
    """Return name and priority of pending requests in the order of `fenka queue`."""
    rows = json.loads(station.ok("queue", "-o", "json"))
    return [(row["name"], row["priority"]) for row in rows]


def queued(station: Workstation, name: str, *options: str) -> Program:
    """Start a program that waits for the whole card."""
    program = station.run(*WHOLE, *options, "--name", name, "--", *HOLD, "1")
    assert program.says().startswith("fenka: waiting, position ")
    return program


@pytest.fixture
def full(t4: Workstation) -> Workstation:
    """A workstation whose card `holder` has, and for which a and b wait."""
    t4.run(*WHOLE, "--name", "holder", "--", *HOLD, "1").report()
    for name in ("a", "b"):
        queued(t4, name)
    return t4


def test_pending_job_is_served_first_when_its_priority_is_raised(full: Workstation) -> None:
    """Those who wait are told of their new positions, and the next daemon keeps the order."""
    b = full.programs[2]
    assert full.ok("prioritize", "b", "--priority", "2") == "b: priority 2\n"
    assert b.says().startswith("fenka: waiting, position 1 of 2: ")
    assert waiting(full) == [("b", 2), ("a", 0)]
    full.kill_daemon()
    # A client that waits may be first.
    full.fenka("daemon", "--background", "--simulate", "T4")
    eventually(lambda: waiting(full) == [("b", 2), ("a", 0)])
    full.ok("prioritize", "b", "--priority", "-1")
    assert waiting(full) == [("a", 0), ("b", -1)]
    full.programs[0].end()
    full.programs[1].report()
    assert full.jobs()["a"]["state"] == "running"


def test_running_job_has_another_priority_when_it_changes(full: Workstation) -> None:
    """Screens show it; the program goes on."""
    full.ok("prioritize", "holder", "--priority", "-3")
    assert full.jobs()["holder"]["priority"] == -3
    full.kill_daemon()
    # A client that waits may be first.
    full.fenka("daemon", "--background", "--simulate", "T4")
    holder = full.jobs()["holder"]
    assert (holder["state"], holder["priority"]) == ("running", -3)


def test_gang_has_another_priority_when_a_member_is_named(t4: Workstation) -> None:
    """All members of it, whether it waits or runs."""
    t4.run(*WHOLE, "--name", "holder", "--", *HOLD, "1").report()
    gang = t4.run("--gang", "2", "--gpu-mem", "7", "--name", "g", "--", "sleep", "1000")
    assert "waiting" in gang.says()
    queued(t4, "a")
    assert t4.ok("prioritize", "g", "--priority", "-1") == "g: priority -1\n"
    assert waiting(t4) == [("a", 0), ("g", -1)]
    for program in t4.programs[::2]:
        program.process.kill()
    eventually(lambda: {"g/0", "g/1"} <= t4.jobs().keys())
    assert t4.ok("prioritize", "g/1", "--priority", "-2") == "g: priority -2\n"
    assert [t4.jobs()[name]["priority"] for name in ("g/0", "g/1")] == [-2, -2]


def test_priority_is_refused_in_a_sentence(full: Workstation) -> None:
    """Nothing is changed then. 0 is what others may have at most, so a user of root's daemon gets no more."""
    for words, code, sentence in (
        (("ghost", "--priority", "1"), 1, "no job is called ghost: `fenka ps` lists them"),
        (
            ("a", "--priority", "1000001"),
            1,
            "--priority must be from -1000000 to 1000000, not 1000001",
        ),
        (("a", "--priority", "-1000001"), 1, "--priority must be from .* not -1000001"),
        (("a", "--priority", "9" * 4000), 1, "--priority must be from .* not 9+"),
    ):
        refused(full.fenka("prioritize", *words), code, sentence)
    for usage in (("a",), ("a", "--priority", "high"), ("a", "--priority", "9" * 5000)):
        result = full.fenka("prioritize", *usage)
        assert (result.returncode, "--priority" in result.stderr) == (2, True)
    full.programs[2].process.kill()
    eventually(lambda: "b" not in full.jobs())
    ended = "b has ended: never started; the command that requested it ended"
    refused(full.fenka("prioritize", "b", "--priority", "1"), 1, ended)
    refused(full.fenka("resize", "b", "--gpu-mem", "2"), 1, ended)
    assert waiting(full) == [("a", 0)]


@pytest.mark.parametrize("number", ["1e999", "9" * 4000, "1.5", '"1"', "null", "true"])
def test_daemon_goes_on_when_a_message_has_no_priority(full: Workstation, number: str) -> None:
    """Whatever a client of somebody's own making sends."""
    with DaemonConnection(Runtime(full.root)) as daemon:
        line = f'{{"type":"prioritize-job","name":"a","priority":{number}}}\n'
        daemon._socket.sendall(line.encode())
        answer = daemon.receive(60)
    assert isinstance(answer, protocol.Failure)
    assert answer.reason
    assert waiting(full) == [("a", 0), ("b", 0)]


def test_priority_changes_or_the_job_has_ended_when_both_happen_at_once(full: Workstation) -> None:
    """Whichever the daemon hears of first, it answers with one sentence and goes on."""
    with DaemonConnection(Runtime(full.root)) as daemon:
        full.programs[2].process.kill()
        for priority in range(-50, 0):
            try:
                daemon.request(protocol.PrioritizeJob("b", priority), protocol.Done)
            except RequestFailed as why:
                assert str(why).startswith(("b has ended: ", "b is being ended: "))  # noqa: PT017
    eventually(lambda: waiting(full) == [("a", 0)])


class OfALaterVersion(protocol.Message, tag="of-a-later-version"):
    """A request that this daemon does not know."""


def test_user_is_told_when_the_daemon_does_not_know_the_request(
    t4: Workstation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade leaves the daemon as it was until it is restarted."""
    monkeypatch.setenv("FENKA_RUNTIME", str(t4.root))
    sentence = "the daemon is of an older version that cannot change priorities: `fenka daemon --restart` .*"
    with pytest.raises(UserError, match=sentence):
        ask_daemon(OfALaterVersion(), protocol.Done, "cannot change priorities")
