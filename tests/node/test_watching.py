"""What follows from a look: events, an eviction, a card withdrawn; XIDs as the driver tells them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from fenka.dialects import gpushare
from fenka.hardware.nvml import Driver, Events
from fenka.hardware.simulated import SimulatedNode, parse_spec
from fenka.node.metrics import Exporter
from fenka.node.store import Token
from fenka.node.usage import Look, Unshimmed, Use
from fenka.node.watching import Watcher
from tests.node.node_kit import Rig, card, play, rig, until


class StandInUsage:
    """Sees what it is told to see."""

    def __init__(self) -> None:
        self.over: Sequence[Token] = ()
        self.unshimmed: Sequence[Token] = ()
        self.over_time: Sequence[Token] = ()

    def look(self, *_: Any) -> Look:
        """As `Usage.look`."""
        uuid = card(0).uuid
        return Look(
            over=tuple(
                Use(it, uuid, 100 << 20, 100 << 20, 0, 300 << 20, 1, None) for it in self.over
            ),
            unshimmed=tuple(Unshimmed(it, 1) for it in self.unshimmed),
            over_time=tuple(
                Use(it, uuid, 0, 0, 0, 0, 1, 0.9, 0.3, 30, 30) for it in self.over_time
            ),
        )


def watcher(node: Rig, usage: StandInUsage, *, evict: bool = False) -> Watcher:
    """With a stand-in for looking."""
    return Watcher(node.agent, usage, Exporter("n1"), evict=evict, kill=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("evict", [False, True])
def test_over_the_limit_is_said_on_the_pod(library: Path, evict: bool) -> None:
    """Once, however often it is seen; evicted only where that was asked for."""

    async def story() -> None:
        async with rig(card(0), library=library) as node:
            await node.ready()
            pod = node.pod("a", 4)
            await node.run(pod)
            usage = StandInUsage()
            usage.over = list(node.agent.store.tokens.values())
            watching = watcher(node, usage, evict=evict)
            for _ in range(3):
                await watching.look()
            await until(lambda: node.api.events)
            (event,) = node.api.events
            assert event["reason"] == "FenkaOverLimit"
            assert event["regarding"]["uid"] == pod["metadata"]["uid"]
            assert f"holds more than its 100 MiB of {card(0).uuid}" in event["note"]
            evicted = [it for it in node.api.patches if it[0].endswith("/pods/a/eviction")]
            assert bool(evicted) is evict

    play(story())


@pytest.mark.parametrize("evict", [False, True])
def test_over_time_is_said_on_the_pod(library: Path, evict: bool) -> None:
    """And counted; evicted where that was asked for."""

    async def story() -> None:
        async with rig(card(0), library=library) as node:
            await node.ready()
            await node.run(node.pod("a", 4))
            usage = StandInUsage()
            usage.over_time = list(node.agent.store.tokens.values())
            exporter = Exporter("n1")
            watching = Watcher(node.agent, usage, exporter, evict=evict, kill=False)  # type: ignore[arg-type]
            await watching.look()
            await until(lambda: node.api.events)
            assert node.api.events[0]["reason"] == "FenkaOverTime"
            assert node.api.events[0]["note"].startswith(
                f"container main has had much more than its 30 % of the time of {card(0).uuid}"
            )
            assert exporter.offences == {"over_limit": 0, "over_time": 1, "unshimmed": 0}
            evicted = [it for it in node.api.patches if it[0].endswith("/pods/a/eviction")]
            assert bool(evicted) is evict

    play(story())


def test_without_the_library_is_said_on_the_pod(library: Path) -> None:
    """Whether or not it could be ended."""

    async def story() -> None:
        async with rig(card(0), library=library) as node:
            await node.ready()
            await node.run(node.pod("a", 4))
            usage = StandInUsage()
            usage.unshimmed = list(node.agent.store.tokens.values())
            await watcher(node, usage).look()
            await until(lambda: node.api.events)
            assert "without fenka's library" in node.api.events[0]["note"]

    play(story())


class Said:
    """Events that come at once, and then none."""

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
        """As `Events.wait`."""
        return self._events.pop(0) if self._events else None


def test_an_xid_withdraws_its_card(library: Path) -> None:
    """A program's own error does not."""

    async def story() -> None:
        async with rig(card(0), card(1), library=library) as node:
            await node.ready()
            said = Said((card(0).uuid, 31), (card(1).uuid, 48))
            listening = asyncio.create_task(
                watcher(node, StandInUsage()).listen(lambda: said)  # type: ignore[arg-type,return-value]
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
                    in node.api.objects[path]["metadata"]["annotations"][gpushare.CARDS]
                )
            )

    play(story())


def test_xids_of_the_simulated_driver(tmp_path: Path) -> None:
    """By the driver's own event set."""
    simulated = SimulatedNode.create(tmp_path / "node", parse_spec("T4*2"))
    simulated.start()
    try:
        with Driver.open(simulated.library_dir) as driver, Events() as events:
            assert events.wait(0) is None
            simulated.raise_xid(1, 48)
            assert events.wait(5000) == (driver.cards()[1].uuid, 48)
            assert driver.minor(driver.cards()[1].uuid) == 1
            assert driver.busy_percent(0) == {}
    finally:
        simulated.stop()
