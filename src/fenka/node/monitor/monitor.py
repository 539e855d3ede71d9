"""Samples what leases use, publishes it as metrics, and acts on violations of limits."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from fenka.isolation.files import MIB
from fenka.kubernetes.client import ApiError, ApiUnreachable
from fenka.node.lease import pod_processes
from fenka.node.lease.store import Lease, LeaseStore
from fenka.node.monitor.card_monitor import CardMonitor
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.usage import SliceUsage, UnmanagedProcess, Usage
from fenka.node.node_api import NodeApi

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
    _cards: CardMonitor
    _usage: Usage
    _exporter: Exporter
    _policy: ViolationPolicy

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
        self._exporter.sample = sample
        self._exporter.divided, self._exporter.instances = self._cards.divided()
        tokens = self._store.tokens
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
