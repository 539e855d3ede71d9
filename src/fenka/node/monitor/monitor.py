"""Samples cards and what leases use of them, reports it, and acts on violations of limits."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fenka.core.inventory import Card, DeviceId
from fenka.core.units import MIB
from fenka.dialects.mig_records import DividedCard
from fenka.hardware import xids
from fenka.hardware.nvml import NoDriver, Reading, Xid, XidListener
from fenka.hardware.xids import APPLICATION_XIDS, INFO_XIDS, LOST_XID, xid_kind
from fenka.isolation import pid_namespaces
from fenka.isolation.compute_feedback import PERIOD_S, ComputeFeedback, Samples, requested_compute
from fenka.isolation.driver_usage import ActivityTracker, UnleasedMemory
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.node.inventory import CardHealth, NodeInventory
from fenka.node.lease import pod_processes
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.pod_processes import ProcessOwners
from fenka.node.lease.store import Lease, LeaseStore
from fenka.node.mig_instances import NodeInstances, ObservedInstance, error_key
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.usage import SliceUsage, UnmanagedProcess, Usage
from fenka.node.node_api import NodeApi


@dataclass(eq=False)
class HealthMonitor:
    """Keeps the cards' health current. trigger: requests a pass of the agent."""

    _api: NodeApi
    _health: CardHealth
    _inventory: NodeInventory
    _instances: NodeInstances
    _trigger: Callable[[], None]
    xids: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of XIDs so far, by the card's UUID and their kind."""

    async def refresh(self) -> tuple[tuple[Card, ...], Mapping[str, Reading]]:
        """Read the cards, and report what has changed. Return the cards, and readings by UUID."""
        before = self._inventory.cards()
        await asyncio.to_thread(self._health.refresh)
        cards = self._inventory.cards()
        if cards != before:
            self._report()
        return cards, self._health.readings

    def update_unleased(self, measured: Mapping[str, UnleasedMemory]) -> None:
        """Take what no lease uses of cards, and have it published if it has changed. measured: by UUID."""
        before = self._inventory.cards()
        for card in before:
            if card.uuid in measured:
                now = time.monotonic()
                self._inventory.unleased.update(
                    card.uuid, card.memory_mib, measured[card.uuid], now
                )
        if self._inventory.cards() != before:
            self._trigger()

    def divided(self) -> tuple[Sequence[DividedCard], Sequence[ObservedInstance]]:
        """Return the cards in MIG mode, and their instances."""
        return self._instances.divided(), self._instances.listed()

    async def listen(self, listener: Callable[[], XidListener]) -> None:
        """Record XIDs until cancelled. A driver that was lost is listened to again."""
        await xids.listen(listener, self._record)

    async def _record(self, event: Xid) -> None:
        uuid, xid, gpu = event.uuid, event.number, event.gpu_instance
        self.xids[uuid, xid_kind(xid)] += 1
        harmless = APPLICATION_XIDS.get(xid) or INFO_XIDS.get(xid)
        part = "" if gpu is None else f", GPU instance {gpu}"
        _LOG.warning("XID %d of %s%s%s", xid, uuid, part, f": {harmless}" if harmless else "")
        record = None if gpu is None else self._instances.record_of(uuid, gpu)
        if gpu is not None and record is None:  # An administrator's instance.
            return
        key = error_key(record) if record is not None else ""
        await asyncio.to_thread(self._health.report_xid, uuid, xid, key)
        if xid == LOST_XID:
            await asyncio.to_thread(self._health.refresh)
        if harmless is None:
            self._report()

    def _report(self) -> None:
        for record, reason in self._instances.unhealthy():
            index = self._inventory.by_uuid[DeviceId(record.card)].index
            note = f"instance {index}/{record.start} {record.profile} is not used: {reason}"
            self._api.node_event("FenkaInstanceUnhealthy", note)
        for card in self._inventory.cards():
            error = self._health.error(card.uuid)
            if error is not None:
                note = f"card {card.index} ({card.model}, {card.uuid}) is not used: {error}"
                self._api.node_event("FenkaCardUnhealthy", note)
        self._trigger()


_LOG = logging.getLogger(__name__)

SAMPLE_S = 4.0
"""Between samples. A violation is reported after three, within 15 s."""


@dataclass(frozen=True, slots=True)
class ViolationPolicy:
    """Whether pods that exceed their limits are evicted, and processes without the shim killed."""

    evict: bool = False
    kill: bool = False


@dataclass(eq=False)
class Monitor:
    """Takes samples."""

    _api: NodeApi
    _store: LeaseStore
    _cards: HealthMonitor
    _usage: Usage
    _exporter: Exporter
    _policy: ViolationPolicy
    _activity: ActivityTracker

    async def run(self) -> None:
        """Sample every few seconds until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_S)

    async def sample(self) -> None:
        """Take one sample."""
        cards, readings = await self._cards.refresh()
        sample = await asyncio.to_thread(
            self._usage.sample,
            self._store.leases,
            self._api.container_names(),
            cards,
            readings,
        )
        self._cards.update_unleased(sample.unleased)
        tokens = self._store.tokens
        self._exporter.sample = sample
        self._exporter.divided, self._exporter.instances = self._cards.divided()
        self._exporter.xids = self._cards.xids
        self._exporter.activity = self._activity.observe(
            {
                (usage.token, usage.device): tokens[usage.token].made_at
                for usage in sample.usages
                if usage.token in tokens
            }
        )
        for usage in sample.over_memory:
            if usage.token in tokens:
                await self._report_memory(usage)
        for usage in sample.over_compute:
            if usage.token in tokens:
                await self._report_compute(usage)
        for process in sample.unmanaged:
            if process.token in tokens:
                self._report_unmanaged(process)

    async def _report_memory(self, usage: SliceUsage) -> None:
        _LOG.warning("%s holds %d MiB", usage.lease.pod_name, usage.driver_reported_bytes // MIB)
        # Without the exact number, so that the same event is counted and not repeated.
        await self._report_violation(
            usage.lease,
            "memory_limit",
            "FenkaMemoryLimitExceeded",
            f"holds more than its {usage.limit_bytes // MIB} MiB of {usage.piece.uuid}, as the driver "
            f"reports",
        )

    async def _report_compute(self, usage: SliceUsage) -> None:
        _LOG.warning(
            "%s used %.0f %% of the time of %s as the driver reports; its own account says %.0f %%",
            usage.lease.pod_name,
            (usage.compute or 0) * 100,
            usage.piece.uuid,
            (usage.self_reported_compute or 0) * 100,
        )
        await self._report_violation(
            usage.lease,
            "compute_limit",
            "FenkaComputeLimitExceeded",
            f"used much more than its {usage.limit_percent} % of the time of {usage.piece.uuid}, as the "
            f"driver reports",
        )

    async def _report_violation(self, lease: Lease, kind: str, reason: str, note: str) -> None:
        self._exporter.violations[kind] += 1
        ends = "; the pod is evicted" if self._policy.evict else ""
        self._api.pod_event(lease.uid, reason, f"container {lease.container} {note}{ends}")
        if self._policy.evict:
            with contextlib.suppress(ApiError, ApiUnreachable):
                await self._api.evict(lease.namespace, lease.pod, lease.uid)

    def _report_unmanaged(self, process: UnmanagedProcess) -> None:
        lease = process.lease
        self._exporter.violations["unmanaged_process"] += 1
        killed = self._policy.kill and pod_processes.kill(process.pid, lease.uid)
        self._api.pod_event(
            lease.uid,
            "FenkaUnmanagedProcess",
            f"a program in container {lease.container} used the GPU without fenka's library, so without "
            f"its limit" + ("; it was killed" if killed else ""),
        )


class FeedbackLoop:
    """Writes feedback round by round.

    Each round reads the store, so that leases need not be registered or removed here. A round runs in a
    thread of its own, so that a slow driver delays nothing else.
    """

    def __init__(
        self,
        samples: Samples,
        files: LeaseFiles,
        proc: Path = Path("/proc"),
        make: Callable[[Samples, Callable[[int], str | None]], ComputeFeedback] = ComputeFeedback,
    ) -> None:
        self._files, self._proc = files, proc
        self._feedback = make(samples, self._lease_of)
        self._owners = ProcessOwners({}, {}, proc)
        self._watched: dict[str, int] = {}
        """Inode of each token's control page."""
        self._reaper = pid_namespaces.NamespaceReaper()
        self._silent = False

    def busy_s(self, token: str, device: str) -> float | None:
        """Return how long a lease has used a device; None if the driver does not measure it."""
        return self._feedback.busy_s(token, device)

    async def run(self, store: LeaseStore, api: NodeApi) -> None:
        """Run ten rounds a second until cancelled."""
        while True:
            await asyncio.to_thread(self.round, store.leases, api.container_names())
            await asyncio.sleep(PERIOD_S)

    def round(self, leases: Mapping[str, Lease], names: Mapping[str, str]) -> None:
        """Run one round. Takes as long as the driver takes. leases: by token."""
        self._owners = ProcessOwners(leases, names, self._proc)
        for token in self._watched.keys() - leases.keys():
            self._forget(token)
        for token, lease in leases.items():
            self._watch(token, lease)
        self._reaper.run_once(self._files.slots(token) for token in leases)
        try:
            self._feedback.update()
            self._silent = False
        except NoDriver as error:
            if not self._silent:
                _LOG.warning("programs get no compute feedback: %s", error)
            self._silent = True

    def _watch(self, token: str, lease: Lease) -> None:
        page = self._files.control(token)
        # The page is not made yet, or already removed.
        with contextlib.suppress(OSError, ValueError):
            inode = page.stat().st_ino
            if self._watched.get(token, inode) != inode:
                self._forget(token)
            requested = None if lease.limits_mib else requested_compute(lease.slices)
            self._feedback.add_lease(token, page, lease.burst_percent or 100, requested)
            self._watched[token] = inode

    def _forget(self, token: str) -> None:
        self._watched.pop(token, None)
        self._feedback.remove_lease(token)

    def _lease_of(self, pid: int) -> str | None:
        tokens = self._owners.tokens_of(pid)
        return tokens[0] if len(tokens) == 1 else None
