"""What the daemon does when its disk is full."""

import asyncio
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.mig.geometry import TABLES
from fenka.core.mig.instances import Division
from fenka.core.request import Memory, Request
from fenka.hardware.nvml_mig import MigError, MigNotPermitted
from fenka.isolation.driver_usage import NOTHING_UNLEASED
from fenka.mig.manager import Instances
from fenka.procfs import start_ticks
from fenka.workstation import files
from fenka.workstation.broker import Broker
from fenka.workstation.controller import ConnectedClients, Controller
from fenka.workstation.files import History, load_jobs
from fenka.workstation.job import Job
from fenka.workstation.paths import Runtime
from fenka.workstation.protocol import JobQueued
from tests.builders import job

T4 = Card(0, DeviceId("GPU-0"), "Tesla T4", 15079)


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    """A controller whose leases have no files and whose card reports nothing."""
    runtime = Runtime(tmp_path)
    cards = SimpleNamespace(
        waiting=(),
        problems={},
        observe=lambda node: (node, {}),
        unleased=lambda _: NOTHING_UNLEASED,
    )
    leases = SimpleNamespace(create=lambda _: None, grant=lambda _: None, remove=lambda _: None)
    processes = SimpleNamespace(scan=None, forget=lambda _: None)
    instances = SimpleNamespace(
        divided=lambda node: node,
        view=lambda *_: Instances(),
        keeper=SimpleNamespace(unused=lambda _: []),
        hardware=SimpleNamespace(in_use=nullcontext),
    )
    history = History(tmp_path / "ended")
    others: list[Any] = [leases, cards, processes, None, instances, history]
    broker = Broker(Node("here", (T4,)), "binpack")
    return Controller(runtime, broker, ConnectedClients(), *others)


def full_disk(controller: Controller) -> Path:
    """Make it impossible to record jobs, until the result is removed."""
    obstacle = controller.runtime.root / ".state.json.new"
    obstacle.mkdir()
    return obstacle


async def test_slices_are_released_when_several_jobs_end_while_the_disk_is_full(
    controller: Controller,
) -> None:
    """The second end comes while the first is not recorded yet."""
    ticks = start_ticks(os.getpid())
    for name in ("a", "b"):
        controller.submit([job(name, pid=os.getpid(), start_ticks=ticks)], wait=True)
        controller.broker.confirm(name, 0.0)
    full_disk(controller)
    for name in ("a", "b"):
        controller.on_exit(name)
    assert controller.broker.jobs == {}


async def test_ends_that_come_together_are_recorded_together(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All programs of a user may end at once, and each record holds all jobs. Others would wait."""
    ticks, names = start_ticks(os.getpid()), [f"j{number}" for number in range(40)]
    for name in names:
        controller.submit([job(name, pid=os.getpid(), start_ticks=ticks)], wait=True)
    placed = [job.id for job in controller.broker.placed()]
    for name in placed:
        controller.broker.confirm(name, 0.0)
    waiting = [name for name in names if name not in placed]
    recorded = list[int]()
    monkeypatch.setattr(files, "save_jobs", lambda _, jobs: recorded.append(len(jobs)))
    for name in placed:
        controller._watches.on_status(name, 0)
        controller._watches.on_exit(name)
    for name in waiting:
        controller._watches.on_gang_end(name)
    while controller.broker.jobs:
        await asyncio.sleep(0)
    assert placed
    assert waiting
    assert len(recorded) <= 2  # the second observes what the programs have left on the cards
    assert {ended.status for ended in controller.history.jobs() if ended.id in placed} == {0}


async def test_ends_are_recorded_when_the_daemon_ends_before_their_turn(
    controller: Controller,
) -> None:
    """The next daemon would not know how the program has ended."""
    controller.submit([own_job("a", 0)], wait=True)
    controller.broker.confirm("a", 0.0)
    controller._watches.on_status("a", 3 << 8)
    controller._watches.on_exit("a")
    controller.close()
    assert [ended.exit_code for ended in controller.history.jobs()] == [3]


class Reader:
    """A client that reads the daemon's records whenever it is sent something."""

    def __init__(self, controller: Controller) -> None:
        self.job: str | None = None
        self.seen: list[dict[str, int]] = []
        self._controller = controller

    def send(self, message: object) -> None:
        """Remember the recorded priorities."""
        if isinstance(message, JobQueued):
            jobs = load_jobs(self._controller.runtime)
            self.seen.append({job.name: job.spec.priority for job in jobs})


def own_job(name: str, at: float) -> Job:
    """A job of this process that wants the whole card."""
    whole = Request(memory=Memory(14, 1024))
    pid = os.getpid()
    return job(name, request=whole, requested_at=at, pid=pid, start_ticks=start_ticks(pid))


async def test_priority_is_recorded_before_anybody_is_told(controller: Controller) -> None:
    """A daemon that is killed before it answers has changed it, and its successor goes on from that."""
    for at, name in enumerate(("holder", "a", "b")):
        controller.submit([own_job(name, at)], wait=True)
    reader = Reader(controller)
    controller.clients.add("b", reader)
    controller.prioritize("b", 3)
    assert reader.seen == [{"holder": 0, "a": 0, "b": 3}]


async def test_priority_is_recorded_later_when_the_disk_is_full(controller: Controller) -> None:
    """Its user is told of the disk. The order of the queue is what will be recorded."""
    for at, name in enumerate(("holder", "a", "b")):
        controller.submit([own_job(name, at)], wait=True)
    reader = Reader(controller)
    controller.clients.add("b", reader)
    obstacle = full_disk(controller)
    with pytest.raises(OSError, match=r"state\.json"):
        controller.prioritize("b", 3)
    assert reader.seen == []
    obstacle.rmdir()
    controller.reschedule()
    assert reader.seen == [{"holder": 0, "a": 0, "b": 3}]
    assert [status.id for status in controller.broker.pending] == ["b", "a"]


def divide(controller: Controller) -> None:
    """Add a divided card to the controller's node."""
    card = Card(1, DeviceId("GPU-1"), "A100", 40448, divided=True)
    division = Division({card.uuid: TABLES["A100-40G"]})
    controller.broker.update_node(Node("here", (T4, card)), 0.0)
    controller.broker.update_instances(division, (), 0.0)
    controller.instances.view = lambda *_: Instances(division=division)  # type: ignore[method-assign]


async def test_job_is_rejected_when_the_driver_permits_no_instances(controller: Controller) -> None:
    """An ordinary user's daemon cannot create them later either; others wait, unless they must not."""
    divide(controller)
    sent: list[str] = []
    controller.clients.send = lambda _, message: sent.append(type(message).__name__)  # type: ignore[method-assign,assignment]
    for failure, wait, remaining in (
        (MigError("busy"), True, ["a"]),
        (MigError("busy"), False, []),
        (MigNotPermitted("only root"), True, []),
    ):

        def create(*_: object, failure: MigError = failure) -> None:
            raise failure

        controller.instances.create = create  # type: ignore[method-assign,assignment]
        asked = Request(whole=True, instance="1g.5gb")
        controller.submit([job("a", pid=os.getpid(), request=asked)], wait=wait)
        await controller.changes.driver.finish()
        assert list(controller.broker.jobs) == remaining
        controller.cancel("a")
        assert controller.broker.placed() == []
        assert [each.uuid for each in controller.broker.node.cards] == ["GPU-0", "GPU-1"]
    assert sent == ["JobQueued", "JobRejected", "JobRejected"]
    controller.close()


@pytest.mark.parametrize("ends", [False, True], ids=["stays", "ends meanwhile"])
async def test_others_are_granted_when_the_driver_is_still_creating_an_instance(
    controller: Controller, ends: bool
) -> None:
    """The job of the instance is granted afterwards, unless it has ended; then the instance is destroyed."""
    divide(controller)
    proceed = threading.Event()
    granted: list[str] = []
    controller.leases.create = lambda job: granted.append(job.name)  # type: ignore[method-assign]

    def create(_: Node, planned: list[Card]) -> dict[DeviceId, DeviceId]:
        assert proceed.wait(60)
        return {card.uuid: DeviceId("MIG-1") for card in planned}

    controller.instances.create = create  # type: ignore[method-assign,assignment]
    asked = Request(whole=True, instance="1g.5gb")
    controller.submit([job("a", pid=os.getpid(), request=asked)], wait=True)
    await asyncio.sleep(0)  # its creation begins
    controller.submit([job("b", pid=os.getpid())], wait=True)
    assert granted == ["b"]
    if ends:
        controller.cancel("a")
    controller.broker.expire(1e12)
    proceed.set()
    await controller.changes.driver.finish()
    assert granted == (["b"] if ends else ["b", "a"])
    controller.close()


async def test_readings_are_shown_when_the_disk_is_full(controller: Controller) -> None:
    """Commands that only show something need no room on it."""
    full_disk(controller)
    with pytest.raises(IsADirectoryError):
        controller.submit([job("a", pid=os.getpid())], wait=True)
    assert controller.observe_cards() == {}
    controller.close()
