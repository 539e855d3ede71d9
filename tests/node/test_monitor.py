"""What follows from a look: events, an eviction, a card withdrawn; XIDs as the driver tells them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from fenka.dialects import base
from fenka.hardware.nvml import Driver, XidListener
from fenka.hardware.simulated import SimulatedNode, parse_spec
from fenka.node.lease.store import Token
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.monitor import Monitor
from fenka.node.monitor.usage import UnmanagedProcess, UsageSample, Use
from tests.node.harness import NodeHarness, card, node_harness, play, until


class FakeUsage:
    """Sees what it is told to see."""

    def __init__(self) -> None:
        self.over: Sequence[Token] = ()
        self.unmanaged: Sequence[Token] = ()
        self.over_time: Sequence[Token] = ()

    def sample(self, *_: Any) -> UsageSample:
        """As `Usage.sample`."""
        uuid = card(0).uuid
        return UsageSample(
            over=tuple(
                Use(it, uuid, 100 << 20, 100 << 20, 0, 300 << 20, 1, None) for it in self.over
            ),
            unmanaged=tuple(UnmanagedProcess(it, 1) for it in self.unmanaged),
            over_time=tuple(
                Use(it, uuid, 0, 0, 0, 0, 1, 0.9, 0.3, 30, 30) for it in self.over_time
            ),
        )


def watcher(node: NodeHarness, usage: FakeUsage, *, evict: bool = False) -> Monitor:
    """With a stand-in for looking."""
    return Monitor(node.agent, usage, Exporter("n1"), evict=evict, kill=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("evict", [False, True])
def test_over_the_limit_is_said_on_the_pod(library: Path, evict: bool) -> None:
    """Once, however often it is seen; evicted only where that was asked for."""

    async def story() -> None:
        async with node_harness(card(0), library=library) as node:
            await node.ready()
            pod = node.pod("a", 4)
            await node.run(pod)
            usage = FakeUsage()
            usage.over = list(node.agent.store.tokens.values())
            watching = watcher(node, usage, evict=evict)
            for _ in range(3):
                await watching.sample()
            await until(lambda: node.api.events)
            (event,) = node.api.events
            assert event["reason"] == "FenkaMemoryLimitExceeded"
            assert event["regarding"]["uid"] == pod["metadata"]["uid"]
            assert f"holds more than its 100 MiB of {card(0).uuid}" in event["note"]
            evicted = [it for it in node.api.patches if it[0].endswith("/pods/a/eviction")]
            assert bool(evicted) is evict

    play(story())


@pytest.mark.parametrize("evict", [False, True])
def test_over_time_is_said_on_the_pod(library: Path, evict: bool) -> None:
    """And counted; evicted where that was asked for."""

    async def story() -> None:
        async with node_harness(card(0), library=library) as node:
            await node.ready()
            await node.run(node.pod("a", 4))
            usage = FakeUsage()
            usage.over_time = list(node.agent.store.tokens.values())
            exporter = Exporter("n1")
            watching = Monitor(node.agent, usage, exporter, evict=evict, kill=False)  # type: ignore[arg-type]
            await watching.sample()
            await until(lambda: node.api.events)
            assert node.api.events[0]["reason"] == "FenkaComputeLimitExceeded"
            assert node.api.events[0]["note"].startswith(
                f"container main has had much more than its 30 % of the time of {card(0).uuid}"
            )
            assert exporter.violations == {
                "memory_limit": 0,
                "compute_limit": 1,
                "unmanaged_process": 0,
            }
            evicted = [it for it in node.api.patches if it[0].endswith("/pods/a/eviction")]
            assert bool(evicted) is evict

    play(story())


def test_without_the_library_is_said_on_the_pod(library: Path) -> None:
    """Whether or not it could be ended."""

    async def story() -> None:
        async with node_harness(card(0), library=library) as node:
            await node.ready()
            await node.run(node.pod("a", 4))
            usage = FakeUsage()
            usage.unmanaged = list(node.agent.store.tokens.values())
            await watcher(node, usage).sample()
            await until(lambda: node.api.events)
            assert "without fenka's library" in node.api.events[0]["note"]

    play(story())


class Said:
    """XidListener that come at once, and then none."""

    def __init__(self, *events: tuple[str, int]) -> None:
        self._events = list(events)

    def __enter__(self) -> "Said":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        why: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def wait(self, _: int) -> tuple[str, int] | None:
        """As `XidListener.wait`."""
        return self._events.pop(0) if self._events else None


def test_an_xid_withdraws_its_card(library: Path) -> None:
    """A program's own error does not."""

    async def story() -> None:
        async with node_harness(card(0), card(1), library=library) as node:
            await node.ready()
            said = Said((card(0).uuid, 31), (card(1).uuid, 48))
            listening = asyncio.create_task(
                watcher(node, FakeUsage()).listen(lambda: said)  # type: ignore[arg-type,return-value]
            )
            await until(lambda: len(node.kubelet.free()) == 14)
            await until(lambda: node.api.events)
            assert node.api.events[0]["note"].endswith("is not used: XID 48")
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            path = "/api/v1/nodes/n1"
            await until(
                lambda: (
                    '"healthy":false'
                    in node.api.objects[path]["metadata"]["annotations"][base.CARDS]
                )
            )

    play(story())


def test_xids_of_the_simulated_driver(tmp_path: Path) -> None:
    """By the driver's own event set."""
    simulated = SimulatedNode.create(tmp_path / "node", parse_spec("T4*2"))
    simulated.start()
    try:
        with Driver.open(simulated.library_dir) as driver, XidListener() as events:
            assert events.wait(0) is None
            simulated.raise_xid(1, 48)
            assert events.wait(5000) == (driver.cards()[1].uuid, 48)
            assert driver.minor(driver.cards()[1].uuid) == 1
            assert driver.busy_percent(0) == {}
    finally:
        simulated.stop()
