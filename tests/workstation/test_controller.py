"""What the daemon does when its disk is full."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fenka.core.inventory import Card, DeviceId, Node
from fenka.procfs import start_ticks
from fenka.workstation.broker import Broker
from fenka.workstation.clients import ClientRegistry
from fenka.workstation.controller import Controller
from fenka.workstation.gpu_processes import GpuProcesses
from fenka.workstation.paths import Runtime
from tests.builders import job

T4 = Card(0, DeviceId("GPU-0"), "Tesla T4", 15079)


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    """A controller whose leases have no files and whose card reports nothing."""
    runtime = Runtime(tmp_path)
    cards = SimpleNamespace(
        observe=lambda node: (node, {}),
        gpu_processes=GpuProcesses,
        record_baseline=lambda _: None,
    )
    leases = SimpleNamespace(create=lambda _: None, grant=lambda _: None, remove=lambda _: None)
    processes = SimpleNamespace(scan=None, forget=lambda _: None)
    others: list[Any] = [leases, cards, processes, None]
    broker = Broker(Node("here", (T4,)), "binpack")
    return Controller(runtime, broker, ClientRegistry(), *others)


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


async def test_readings_are_shown_when_the_disk_is_full(controller: Controller) -> None:
    """Commands that only show something need no room on it."""
    full_disk(controller)
    with pytest.raises(IsADirectoryError):
        controller.submit([job("a", pid=os.getpid())], wait=True)
    assert controller.observe_cards() == {}
    controller.close()
