"""Caps and bookings of two users in root's daemon, on a machine of their own."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.workstation.conftest import eventually, refused
from tests.workstation.shared_machine import ALICE, BOB, SharedMachine, shared_machine

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ROOT = 0
DAEMON = ("daemon", "--background", "--simulate", "T4*2")
USERS = "/etc/fenka/users.toml"
CAPS = """version = 1
user."*" = {memory = "10000MiB", time_limit = {default = "8h", at_most = "24h"}}
group.staff-of-fenka = {memory = "20000MiB", card_hours_per_day = 24}
book.may = ["group:staff-of-fenka"]
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[SharedMachine]:
    """Two T4s, caps for all, and more for bob's group, which may book."""
    with shared_machine() as machine:
        machine.write(USERS, CAPS)
        machine.ok(ROOT, *DAEMON)
        yield machine


def started(machine: SharedMachine, uid: int, *options: str) -> None:
    """Start a program that gets its slice at once."""
    program = machine.hold(uid, *options)
    assert program.stdout
    assert json.loads(program.stdout.readline())["cards"][0]["result"] == 0


def told(machine: SharedMachine, uid: int, *options: str) -> str:
    """Start a program that waits, and return what it says."""
    program = machine.hold(uid, *options)
    assert program.stderr
    return program.stderr.readline().strip()


def stop_all(machine: SharedMachine) -> None:
    """End all programs."""
    if names := [job["id"] for job in machine.jobs().values()]:
        machine.ok(ROOT, "stop", "--grace", "1", *names)
    eventually(lambda: not machine.jobs())


def test_capped_user_waits_while_another_starts(machine: SharedMachine) -> None:
    """8 units are 8616 MiB: alice may not have them twice, bob may. A reload lets her."""
    started(machine, ALICE, "--gpu-mem", "8", "--name", "a1")
    reason = "alice holds 8616 of at most 10000 MiB"
    assert told(machine, ALICE, "--gpu-mem", "8", "--name", "a2") == (
        f"fenka: waiting, position 1 of 1: {reason}"
    )
    started(machine, BOB, "--gpu-mem", "8", "--name", "b1")
    assert reason in machine.ok(ALICE, "queue")
    assert reason in machine.ok(ALICE, "why", "a2")
    assert reason in machine.ok(BOB, "ps")
    refused(
        machine.fenka(ALICE, "run", "--gpu-mem", "12", "--", "true"),
        2,
        "alice may hold at most 10000 MiB, and this request needs 12924 MiB: ask for less",
    )
    refused(
        machine.fenka(ALICE, "run", "--gpu-mem", "1", "--time-limit", "25h", "--", "true"),
        2,
        "alice may run programs for at most 24h: give --time-limit 24h or less",
    )
    refused(
        machine.fenka(ALICE, "resize", "a1", "--gpu-mem", "10"),
        1,
        f"a1 cannot grow: {reason}",
    )
    jobs = machine.jobs()
    assert 8 * 3600 - 60 < jobs["a1"]["deadline"] - jobs["a1"]["started_at"] <= 8 * 3600
    quota = json.loads(machine.ok(ALICE, "quota", "-o", "json"))
    assert [(row["user"], row["memory_mib"], row["memory_at_most_mib"]) for row in quota] == [
        ("alice", 8616, 10000)
    ]
    lines = machine.ok(ROOT, "quota").splitlines()
    # Others are there, too, if they have used cards today.
    for pattern in (
        r"alice +8616 of 10000 MiB +0\.571 +\S+ +8h, at most 24h",
        r"bob +8616 of 20000 MiB +0\.571 +\S+ of 24 +8h, at most 24h",
    ):
        assert [line for line in lines if re.match(pattern, line)], lines
    # A file with a mistake changes nothing; the corrected one lets a2 start.
    machine.write(USERS, CAPS + "user.alice = {memry = '40GiB'}\n")
    machine.signal_daemon("HUP")
    mistake = f"{USERS}, line 5: user.alice.memry is not known: did you mean memory?"
    eventually(lambda: mistake in machine.read("/run/fenka/daemon.log"))
    assert machine.jobs()["a2"]["reason"] == reason
    # A FIFO would make a careless daemon wait for ever.
    machine.run("rm /etc/fenka/users.toml && mkfifo /etc/fenka/users.toml")
    machine.signal_daemon("HUP")
    no_file = f"{USERS} is not a regular file: replace it by one"
    eventually(lambda: no_file in machine.read("/run/fenka/daemon.log"))
    assert machine.jobs()["a2"]["reason"] == reason
    machine.run("rm /etc/fenka/users.toml")
    machine.write(USERS, CAPS + "user.alice = {memory = '40GiB'}\n")
    machine.signal_daemon("HUP")
    # Card 0 has 6 units left, and so has card 1.
    eventually(lambda: "too little memory" in machine.jobs()["a2"]["reason"])
    machine.ok(BOB, "stop", "b1")
    eventually(lambda: machine.jobs()["a2"]["state"] == "running")
    stop_all(machine)
    machine.write(USERS, CAPS)
    machine.signal_daemon("HUP")


def test_priority_is_the_user_s_own_matter_up_to_0(machine: SharedMachine) -> None:
    """As at the submission: only root gives a priority above 0, and only root changes others' jobs."""
    started(machine, ROOT, "--gpus", "2", "--name", "all")
    for uid, name in ((ALICE, "a1"), (BOB, "b1")):
        assert "waiting" in told(machine, uid, "--gpu-mem", "4", "--name", name)
    for uid, name, priority, sentence in (
        (ALICE, "b1", "-1", "b1 belongs to bob: only they may prioritize it"),
        (
            ALICE,
            "a1",
            "1",
            r"only root, who runs this daemon, may give a priority above 0: .* not 1",
        ),
        (BOB, "all", "-1", "all belongs to root: only they may prioritize it"),
    ):
        refused(machine.fenka(uid, "prioritize", name, "--priority", priority), 1, sentence)
    assert {job["priority"] for job in machine.jobs().values()} == {0}
    assert machine.ok(ALICE, "prioritize", "a1", "--priority", "-1") == "a1: priority -1\n"
    assert machine.ok(ROOT, "prioritize", "b1", "--priority", "1") == "b1: priority 1\n"
    rows = json.loads(machine.ok(BOB, "queue", "-o", "json"))
    assert [(row["name"], row["priority"]) for row in rows] == [("b1", 1), ("a1", -1)]
    # What root has given, its user may give up, and have no more.
    refused(machine.fenka(BOB, "prioritize", "b1", "--priority", "1"), 1, "only root, .* not 1")
    machine.ok(BOB, "prioritize", "b1", "--priority", "-2")
    assert machine.jobs()["b1"]["priority"] == -2
    stop_all(machine)


def test_booked_cards_are_the_team_s_alone(machine: SharedMachine) -> None:
    """bob books both cards from now on for his group; root may cancel that, and alice may not."""
    refused(
        machine.fenka(ALICE, "book", "--cards", "1", "--from", "now", "--to", "23:59"),
        1,
        "alice may not book cards: ask root, who names those who may in /etc/fenka/users.toml .*",
    )
    started(machine, ALICE, "--gpu-mem", "1", "--name", "a1")
    words = ("book", "--cards", "2", "--from", "now", "--to", "tomorrow 23:59")
    refused(
        machine.fenka(BOB, *words),
        1,
        "only 1 of 2 cards are certain to be free on .*: a1 of alice may run longer; .*",
    )
    refused(
        machine.fenka(BOB, *words, "--end-others", "10m"),
        1,
        "only root may end others' jobs: book without --end-others",
    )
    booked = machine.ok(
        *(ROOT, *words, "--for", "group:staff-of-fenka", "--end-others", "0s", "-o", "json")
    )
    id_ = json.loads(booked)["id"]
    eventually(lambda: "a1" not in machine.jobs())
    said = told(machine, ALICE, "--gpu-mem", "1", "--name", "a2")
    booked_by = "cards 0, 1 are booked by root for group:staff-of-fenka"
    assert re.search(rf"no GPU fits: 2 of 2 are reserved .*; {booked_by}, .* \({id_}\)$", said), (
        said
    )
    started(machine, BOB, "--gpu-mem", "1", "--name", "b1")
    # So it is in the next daemon, too.
    machine.signal_daemon("KILL")
    machine.ok(ROOT, *DAEMON)
    eventually(lambda: "a2" in machine.jobs())
    assert id_ in machine.ok(ALICE, "why", "a2")
    assert id_ in machine.ok(ALICE, "book", "list")
    refused(machine.fenka(ALICE, "book", "cancel", id_), 1, f"{id_} belongs to root: only they .*")
    machine.ok(ROOT, "book", "cancel", id_)
    eventually(lambda: machine.jobs()["a2"]["state"] == "running")
    assert machine.ok(ALICE, "book", "list") == "no cards are booked\n"
    stop_all(machine)


def test_user_cannot_replace_root_s_daemon(machine: SharedMachine) -> None:
    """A daemon of the user's own would find no card; the sentence is about the one that runs."""
    refused(machine.fenka(ALICE, "daemon", "--restart"), 1, "root's daemon serves this machine, .*")
