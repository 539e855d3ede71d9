"""Samples what leases use, publishes it as metrics, and acts on violations of limits."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from fenka.kubernetes.client import ApiError, ApiUnreachable
from fenka.node.lease import pod_processes
from fenka.node.lease.store import Lease, LeaseStore, Token
from fenka.node.monitor.card_monitor import CardMonitor
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.usage import MIB, SliceUsage, UnmanagedProcess, Usage
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

SAMPLE_S = 4.0
"""Between samples. A violation is reported after three, within 15 s."""


@dataclass(frozen=True, slots=True)
class ViolationPolicy:
    """Whether pods that exceed their limits are evicted, and processes without the shim killed."""

    evict: bool = False
    kill: bool = False


class Monitor:
    """Takes samples."""

    def __init__(
        self,
        api: NodeApi,
        store: LeaseStore,
        cards: CardMonitor,
        usage: Usage,
        exporter: Exporter,
        policy: ViolationPolicy,
    ) -> None:
        self._api, self._store, self._cards = api, store, cards
        self._usage, self._exporter, self._policy = usage, exporter, policy

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
            list(self._store.tokens.values()),
            self._api.container_names(),
            cards,
            readings,
        )
        self._exporter.sample = sample
        for usage in sample.over_memory:
            if lease := self._lease(usage.token):
                await self._report_memory(lease, usage)
        for usage in sample.over_compute:
            if lease := self._lease(usage.token):
                await self._report_compute(lease, usage)
        for process in sample.unmanaged:
            if lease := self._lease(process.token):
                self._report_unmanaged(lease, process)

    def _lease(self, token: Token) -> Lease | None:
        """Return the lease of a token that still exists."""
        stored = self._store.tokens.get(token.name)
        return stored.lease if stored is not None else None

    async def _report_memory(self, lease: Lease, usage: SliceUsage) -> None:
        _LOG.warning("%s holds %d MiB", lease.pod_name, usage.driver_reported_bytes // MIB)
        # Without the exact number, so that the same event is counted and not repeated.
        await self._report_violation(
            lease,
            "memory_limit",
            "FenkaMemoryLimitExceeded",
            f"holds more than its {usage.limit_bytes // MIB} MiB of {usage.uuid}, as the driver reports",
        )

    async def _report_compute(self, lease: Lease, usage: SliceUsage) -> None:
        _LOG.warning(
            "%s used %.0f %% of the time of %s as the driver reports; its own account says %.0f %%",
            lease.pod_name,
            (usage.compute or 0) * 100,
            usage.uuid,
            (usage.self_reported_compute or 0) * 100,
        )
        await self._report_violation(
            lease,
            "compute_limit",
            "FenkaComputeLimitExceeded",
            f"used much more than its {usage.limit_percent} % of the time of {usage.uuid}, as the driver "
            f"reports",
        )

    async def _report_violation(self, lease: Lease, kind: str, reason: str, note: str) -> None:
        self._exporter.violations[kind] += 1
        ends = "; the pod is evicted" if self._policy.evict else ""
        self._api.pod_event(lease.uid, reason, f"container {lease.container} {note}{ends}")
        if self._policy.evict:
            with contextlib.suppress(ApiError, ApiUnreachable):
                await self._api.evict(lease.namespace, lease.pod, lease.uid)

    def _report_unmanaged(self, lease: Lease, process: UnmanagedProcess) -> None:
        self._exporter.violations["unmanaged_process"] += 1
        killed = self._policy.kill and pod_processes.kill(process.pid, lease.uid)
        self._api.pod_event(
            lease.uid,
            "FenkaUnmanagedProcess",
            f"a program in container {lease.container} used the GPU without fenka's library, so without "
            f"its limit" + ("; it was killed" if killed else ""),
        )
