"""Gangs that use what others leave idle make room for requests of higher priority, and go on afterwards."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fenka.core.inventory import Card, DeviceId, Node
from fenka.workstation.broker import GRACE_S, Broker
from fenka.workstation.protocol import JobQueued
from tests.workstation.conftest import HOLD, Workstation, eventually
from tests.workstation.test_broker import T4, gang, kinds, request


def backfill(name: str, size: int, units: int, **fields: Any) -> list[Any]:
    """The members of a training that is evicted with a minute's notice."""
    common = {"priority": -9, "eviction_grace_s": 60.0} | fields
    return gang(name, size, request(name, units, **common))


@pytest.fixture
def broker() -> Broker:
    """A broker with one T4, whose 14 units a gang of two has."""
    broker = Broker(Node("here", (T4,)), "binpack")
    broker.submit(backfill("g", 2, 7), 0)
    return broker


def test_gang_is_evicted_whole_when_a_request_needs_one_slice(broker: Broker) -> None:
    """The request is served when enough of the gang has ended; the gang is evicted once."""
    assert kinds(broker.submit([request("r", 4, at=1)], 1)) == [
        ("JobQueued", "r"),
        ("EvictGang", "g/0"),
        ("EvictGang", "g/1"),
    ]
    # A second one fits beside the first, where the gang was.
    assert kinds(broker.submit([request("s", 4, at=2)], 2)) == [
        ("JobQueued", "r"),
        ("JobQueued", "s"),
    ]
    ended = kinds(broker.on_exit("g/0", 3))
    assert ended == [("RemoveLease", "g/0"), ("GrantLease", "r"), ("JobQueued", "s")]
    assert kinds(broker.on_exit("g/1", 4)) == [("RemoveLease", "g/1"), ("GrantLease", "s")]


def test_container_is_evicted_alone(broker: Broker) -> None:
    """It is one job. The other one does not say that it makes room."""
    broker = Broker(broker.node, "binpack")
    low: dict[str, Any] = {"priority": -1, "kind": "container"}
    broker.submit([request("a", 7, **low)], 0)
    broker.submit([request("b", 7, at=1, eviction_grace_s=0.0, **low)], 1)
    effects = kinds(broker.submit([request("r", 4, at=2)], 2))
    assert effects == [("JobQueued", "r"), ("EvictGang", "b")]
    assert kinds(broker.on_exit("b", 3)) == [("RemoveLease", "b"), ("GrantLease", "r")]


def test_no_gang_is_evicted_when_priorities_are_equal(broker: Broker) -> None:
    """Another training that uses what is idle waits."""
    assert kinds(broker.submit(backfill("h", 1, 2, at=1), 1)) == [("JobQueued", "h")]


def test_no_gang_is_evicted_when_that_makes_no_room(broker: Broker) -> None:
    """Two whole cards are requested, and one of them is held by a program that is never evicted."""
    cards = (T4, Card(1, DeviceId("GPU-1"), "Tesla T4", 15079))
    broker = Broker(Node("here", cards), "binpack")
    broker.submit([request("r", 14, priority=-10)], 0)
    broker.submit(backfill("g", 2, 7, at=1), 1)
    assert kinds(broker.submit([request("s", 14, at=2, cards=2)], 2)) == [("JobQueued", "s")]


def test_no_gang_is_evicted_when_the_request_does_not_wait(broker: Broker) -> None:
    """`--no-wait` takes what is free, or fails."""
    assert kinds(broker.submit([request("r", 4, at=1)], 1, wait=False)) == [("RejectJob", "r")]


def test_newcomer_does_not_use_the_cards_of_an_evicted_gang(broker: Broker) -> None:
    """They are reserved until the gang has certainly ended."""
    broker.on_exit("g/0", 1)
    broker.submit([request("r", 14, at=2)], 2)
    *_, small = broker.submit([request("small", 2, at=3)], 3)
    assert isinstance(small, JobQueued)
    status = broker.queue_status(broker.jobs["r"])
    assert status
    assert status.reservation
    assert status.reservation.starts_by == 2 + 60 + GRACE_S


def test_gang_is_evicted_again_when_the_daemon_was_restarted(broker: Broker) -> None:
    """The signal may have been lost with the first daemon."""
    broker.submit([request("r", 4, at=1)], 1)
    successor = Broker(broker.node, "binpack")
    successor.restore(list(broker.jobs.values()), 2)
    effects = successor.reschedule(2)
    assert [pair for pair in kinds(effects) if pair[0] == "EvictGang"] == [
        ("EvictGang", "g/0"),
        ("EvictGang", "g/1"),
    ]


def test_gang_is_evicted_when_its_priority_falls_below_that_of_a_request(broker: Broker) -> None:
    """h waits with the gang's priority, -9. At -10 the gang makes room for it."""
    broker.submit(backfill("h", 1, 2, at=1), 1)
    assert kinds(broker.prioritize("g", -10, 2)) == [("EvictGang", "g/0"), ("EvictGang", "g/1")]


def test_gang_is_not_evicted_when_its_priority_was_raised(broker: Broker) -> None:
    """At 0 it is above no usual request any more, until one has a higher priority."""
    broker.prioritize("g", 0, 1)
    assert kinds(broker.submit([request("r", 4, at=2)], 2)) == [("JobQueued", "r")]
    assert kinds(broker.prioritize("r", 1, 3)) == [("EvictGang", "g/0"), ("EvictGang", "g/1")]


# --- with a daemon --------------------------------------------------------------------------------------

TRAIN = """
import os, pathlib, signal, sys, time
state = pathlib.Path(os.environ["STATE"] + os.environ["RANK"])
step = int(state.read_text()) if state.exists() else 0
def checkpoint(*_):
    state.write_text(str(step))
    sys.exit(0)
signal.signal(signal.SIGTERM, checkpoint)
print("from", step, "restarts", os.environ["FENKA_RESTARTS"], flush=True)
step += 100
time.sleep(1000)
"""


@pytest.fixture
def training(t4: Workstation, tmp_path: Path) -> Iterator[Workstation]:
    """A workstation whose card is full of a training that uses what others leave idle."""
    words = ["--workers", "2", "--gpu-mem", "7", "--backfill", "--env", f"STATE={tmp_path}/state"]
    t4.ok("submit", "pytorch", "--local", "--name", "pt", *words, "--", sys.executable, "-c", TRAIN)
    eventually(lambda: lines(t4) == ["from 0 restarts 0"] * 2)
    yield t4
    t4.fenka("delete", "--local", "pt")


def lines(station: Workstation) -> list[str]:
    """Return what both members have printed."""
    logs = sorted((station.root / "jobs" / "pt" / ".fenka").glob("pt-*/log"))
    return [line for log in logs for line in log.read_text().splitlines()]


def test_training_resumes_from_its_step_when_it_was_evicted(training: Workstation) -> None:
    """It writes a checkpoint and ends with 0, which is no success: it was evicted."""
    program = training.run("--gpu-mem", "4", "--name", "r", "--", *HOLD, "100")
    program.report()
    shown = json.loads(training.ok("get", "--local", "pt", "-o", "json"))
    assert shown["status"] == "PENDING"
    assert [job["state"] for job in training.jobs().values() if job["name"] != "r"] == ["waiting"]
    program.end()
    # A line that is being written is seen in parts.
    eventually(lambda: lines(training) == ["from 0 restarts 0", "from 100 restarts 1"] * 2)
    assert "evicted 1 times" in training.ok("get", "--local", "pt", "-e")


def test_training_goes_on_when_its_priority_was_raised(training: Workstation) -> None:
    """As that of a usual training: nothing is evicted for the request, which waits."""
    assert json.loads(training.ok("get", "--local", "pt", "-o", "json"))["priority"] == "-1000000"
    assert training.ok("prioritize", "pt", "--priority", "0") == "pt: priority 0\n"
    program = training.run("--gpu-mem", "4", "--name", "r", "--", *HOLD, "100")
    assert program.says() == (
        "fenka: waiting, position 1 of 1: no GPU fits: 1 of 1 has too little memory"
    )
    training.ok("prioritize", "r", "--priority", "1")
    program.report()
    assert training.jobs()["r"]["state"] == "running"


def test_request_is_served_when_the_training_ignores_its_eviction(
    t4: Workstation, tmp_path: Path
) -> None:
    """Its members are killed after the grace period."""
    ready = tmp_path / "ready"
    stubborn = f"trap '' TERM; echo > {ready}; while :; do sleep 1; done"
    words = ["--gpu-mem", "14", "--backfill", "--grace", "1s", "--", "sh", "-c", stubborn]
    t4.ok("submit", "pytorch", "--local", "--name", "pt", *words)
    eventually(ready.exists)
    program = t4.run("--gpu-mem", "4", "--", *HOLD, "100")
    program.report()
    program.end()
    t4.fenka("delete", "--local", "pt")
