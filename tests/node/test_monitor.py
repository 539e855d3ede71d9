"""What follows from a sample: events, an eviction, an unhealthy card; and XIDs as the driver reports them."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import pytest

from fenka.core.request import Slice
from fenka.dialects import base
from fenka.hardware.card_spec import parse_spec
from fenka.hardware.nvml import Driver, DriverLost, Hardware, Xid, XidListener
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation.driver_usage import ActivityTracker, UnleasedMemory
from fenka.node import driver as node_driver
from fenka.node.driver import NodeDriver
from fenka.node.inventory import CardHealth
from fenka.node.lease.store import LeaseStore
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.monitor import HealthMonitor, Monitor, ViolationPolicy
from fenka.node.monitor.usage import NodeUsage, SliceUsage, UnmanagedProcess, Usage
from tests.node.harness import NodeHarness, card, node_harness
from tests.waiting import until, wait_until


class FakeUsage:
    """Returns violations of the given kinds by all leases of a store, which exceed 100 MiB and 30 %."""

    def __init__(self, store: LeaseStore, *kinds: str) -> None:
        self._store, self._kinds = store, kinds

    def sample(self, *_: Any) -> NodeUsage:
        """Stand in for `Usage.sample`."""
        piece = Slice(0, card(0).uuid, 100, 30)
        usages = tuple(
            SliceUsage(token, lease, piece, 0, 300 << 20, 1, 0.9, 0.3)
            for token, lease in self._store.leases.items()
        )
        return NodeUsage(
            over_memory=usages if "memory" in self._kinds else (),
            unmanaged=tuple(
                UnmanagedProcess(usage.token, usage.lease, 1)
                for usage in usages
                if "unmanaged" in self._kinds
            ),
            over_compute=usages if "compute" in self._kinds else (),
        )


def card_monitor(node: NodeHarness) -> HealthMonitor:
    """Return the card monitor of a node."""
    return HealthMonitor(
        node.node_api,
        node.health,
        node.program.inventory,
        node.program.instances,
        node.program.trigger,
    )


def monitor(
    node: NodeHarness, usage: FakeUsage, exporter: Exporter, *, evict: bool = False
) -> Monitor:
    """Return a monitor with these violations."""
    policy = ViolationPolicy(evict=evict)
    activity = ActivityTracker(lambda *_: None)
    reader = cast("Usage", usage)
    return Monitor(
        node.node_api, node.store, card_monitor(node), reader, exporter, policy, activity
    )


def evictions(node: NodeHarness) -> list[Any]:
    """Return the evictions of pod a."""
    return [path for path, _ in node.api.patches if path.endswith("/pods/a/eviction")]


@pytest.mark.parametrize("evict", [False, True])
async def test_memory_violation_is_reported_once_when_it_lasts(library: Path, evict: bool) -> None:
    """The pod gets one event. It is evicted only if the policy says so."""

    async with node_harness(card(0), library=library) as node:
        await node.ready()
        pod = node.pod("a", 4)
        await node.run(pod)
        usage = FakeUsage(node.store, "memory")
        sampled = monitor(node, usage, Exporter("n1"), evict=evict)
        for _ in range(3):
            await sampled.sample()
        await until(lambda: node.api.events)
        (event,) = node.api.events
        assert event["reason"] == "FenkaMemoryLimitExceeded"
        assert event["regarding"]["uid"] == pod["metadata"]["uid"]
        assert f"holds more than its 100 MiB of {card(0).uuid}" in event["note"]
        assert bool(evictions(node)) is evict


@pytest.mark.parametrize("evict", [False, True])
async def test_compute_violation_is_reported_and_counted(library: Path, evict: bool) -> None:
    """The pod is evicted only if the policy says so."""

    async with node_harness(card(0), library=library) as node:
        await node.ready()
        await node.run(node.pod("a", 4))
        usage, exporter = FakeUsage(node.store, "compute"), Exporter("n1")
        await monitor(node, usage, exporter, evict=evict).sample()
        await until(lambda: node.api.events)
        assert node.api.events[0]["reason"] == "FenkaComputeLimitExceeded"
        assert node.api.events[0]["note"].startswith(
            f"container main used much more than its 30 % of the time of {card(0).uuid}"
        )
        assert exporter.violations == {
            "memory_limit": 0,
            "compute_limit": 1,
            "unmanaged_process": 0,
        }
        assert bool(evictions(node)) is evict


async def test_unmanaged_process_is_reported_when_it_is_not_killed(library: Path) -> None:
    """The event says that the program ran without its limit."""

    async with node_harness(card(0), library=library) as node:
        await node.ready()
        await node.run(node.pod("a", 4))
        usage = FakeUsage(node.store, "unmanaged")
        await monitor(node, usage, Exporter("n1")).sample()
        await until(lambda: node.api.events)
        assert node.api.events[0]["reason"] == "FenkaUnmanagedProcess"
        assert "without fenka's library" in node.api.events[0]["note"]


class FakeXids:
    """Returns XIDs at once, and then none."""

    def __init__(self, *xids: Xid) -> None:
        self._xids = list(xids)

    def __enter__(self) -> "FakeXids":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def wait(self, _: int) -> Xid | None:
        """Stand in for `XidListener.wait`."""
        return self._xids.pop(0) if self._xids else None


async def test_card_becomes_unhealthy_when_it_reports_a_fatal_xid(library: Path) -> None:
    """An XID of a program does not."""

    async with node_harness(card(0), card(1), library=library) as node:
        await node.ready()
        xids = FakeXids(Xid(card(0).uuid, 31), Xid(card(1).uuid, 48))
        listening = asyncio.create_task(card_monitor(node).listen(lambda: xids))  # type: ignore[arg-type,return-value]
        await until(lambda: len(node.kubelet.free()) == 14)
        await until(lambda: node.api.events)
        assert node.api.events[0]["note"].endswith("is not used: XID 48")
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        path = "/api/v1/nodes/n1"
        await until(
            lambda: (
                '"healthy":false' in node.api.objects[path]["metadata"]["annotations"][base.CARDS]
            )
        )


def test_xid_listener_returns_what_the_simulated_driver_reports(tmp_path: Path) -> None:
    """It uses the driver's own event set."""
    simulated = SimulatedNode.create(tmp_path / "node", parse_spec("T4*2"))
    simulated.start()
    try:
        hardware = Hardware(lambda: Driver.open(simulated.library_dir))
        with hardware.driver as driver, XidListener(hardware) as xids:
            assert xids.wait(0) is None
            simulated.raise_xid(1, 48)
            assert xids.wait(5000) == Xid(driver.cards()[1].uuid, 48)
            assert driver.minor(driver.cards()[1].uuid) == 1
    finally:
        simulated.stop()


def test_xid_listener_ends_when_the_driver_was_opened_again(tmp_path: Path) -> None:
    """Its event set was the closed driver's; the next listener receives."""
    simulated = SimulatedNode.create(tmp_path / "node", parse_spec("T4"))
    simulated.start()
    try:
        hardware = Hardware(lambda: Driver.open(simulated.library_dir))
        first = hardware.driver
        with contextlib.closing(hardware):
            with XidListener(hardware) as former:
                simulated.stop()
                simulated.start()
                # The driver asks for its server every 10 ms, and this one may have been gone for less.
                wait_until(lambda: hardware.readings() and hardware.driver is not first)
                with pytest.raises(DriverLost, match="opened again"):
                    former.wait(0)
            with XidListener(hardware) as xids:
                simulated.raise_xid(0, 31)
                (uuid,) = hardware.readings()
                assert xids.wait(5000) == Xid(uuid, 31)
    finally:
        simulated.stop()


def test_percentages_of_real_cards_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that reports nothing, or is lost, does not hide the others."""
    clock = iter((0, 1_000_000_000, 3_000_000_000))
    monkeypatch.setattr(node_driver, "time", SimpleNamespace(time_ns=lambda: next(clock)))
    samples = {card(0).uuid: None, card(1).uuid: (0, {7: 50})}
    hardware = SimpleNamespace(busy_samples=lambda uuid, _: samples[uuid])
    health = SimpleNamespace(known=(card(0), card(1)))
    real = NodeDriver(Path("/lib"), Path("/"), None)
    busy_ns = real.busy_ns(cast("Hardware", hardware), cast("CardHealth", health))
    assert busy_ns() == {(card(1).uuid, 7): 500_000_000}
    assert busy_ns() == {(card(1).uuid, 7): 1_500_000_000}


async def test_memory_in_no_lease_is_published_when_it_changes(library: Path) -> None:
    """The scheduler takes it from the node's cards."""

    async with node_harness(card(0), library=library) as node:
        await node.ready()
        cards = card_monitor(node)

        def published() -> str:
            annotations = node.api.objects["/api/v1/nodes/n1"]["metadata"]["annotations"]
            return str(annotations.get(base.CARDS, ""))

        await until(published)
        used = UnleasedMemory(computing_mib=12288, programs=("python",))
        cards.update_unleased({card(0).uuid: used})
        await until(lambda: '"unleased":"12.0 GiB used by python, no lease"' in published())
        (shown,) = node.program.inventory.cards()
        assert shown.unleased_mib >= 12288
        cards.update_unleased({card(0).uuid: UnleasedMemory()})
        await until(lambda: "unleased" not in published())
