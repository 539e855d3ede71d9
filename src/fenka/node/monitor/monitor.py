"""Watches cards and programs, tells the agent, and does what was asked for about those who cheat."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from fenka.hardware.nvml import DriverLost, XidListener
from fenka.kubernetes.client import ApiError, ApiUnreachable
from fenka.node.agent import Agent
from fenka.node.lease import pod_processes
from fenka.node.lease.store import Lease
from fenka.node.monitor.health import APPLICATION_XIDS, INFO_XIDS, LOST_XID
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.usage import MIB, Usage, Use

_LOG = logging.getLogger(__name__)

LOOK_S = 4.0
"""Three looks are within the 15 s in which a cheat is reported."""
_LISTEN_MS = 1000


class Monitor:
    """evict, kill: what happens to a pod over its limit, and to a process without the shim."""

    def __init__(
        self, agent: Agent, usage: Usage, exporter: Exporter, *, evict: bool, kill: bool
    ) -> None:
        self._agent, self._usage, self._exporter = agent, usage, exporter
        self._evict, self._kill = evict, kill

    async def run(self) -> None:
        """UsageSample every few seconds until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(LOOK_S)

    async def sample(self) -> None:
        """Once."""
        agent = self._agent
        before = agent.now()
        await asyncio.to_thread(agent.cards.refresh)
        if agent.now() != before:
            self._tell_health()
        look = await asyncio.to_thread(
            self._usage.sample,
            list(agent.store.tokens.values()),
            agent.containers(),
            agent.now(),
            agent.cards.readings,
        )
        self._exporter.sample = look
        for use in look.over:
            await self._over(use.token.name, use.uuid, use.driver_reported_bytes, use.limit_bytes)
        for use in look.over_time:
            await self._over_time(use)
        for found in look.unmanaged:
            self._unmanaged(found.token.name, found.pid)

    def _tell_health(self) -> None:
        for card in self._agent.now():
            why = self._agent.cards.why(card.uuid)
            if why is not None:
                note = f"card {card.index} ({card.model}, {card.uuid}) is not used: {why}"
                self._agent.cluster.node_event("FenkaCardUnhealthy", note)
        self._agent.trigger()

    def _lease(self, name: str) -> Lease | None:
        token = self._agent.store.tokens.get(name)
        return token.lease if token is not None else None

    async def _over(self, name: str, uuid: str, used: int, limit: int) -> None:
        lease = self._lease(name)
        if lease is None:
            return
        _LOG.warning("%s/%s holds %d MiB", lease.namespace, lease.pod, used // MIB)
        # Without the exact number, so that the same event is counted and not repeated.
        note = f"holds more than its {limit // MIB} MiB of {uuid}, by the driver's account"
        await self._report_violation(lease, "memory_limit", "FenkaMemoryLimitExceeded", note)

    async def _over_time(self, use: Use) -> None:
        lease = self._lease(use.token.name)
        if lease is None:
            return
        _LOG.warning(
            "%s/%s has had %.0f %% of the time of %s by the driver's account, by its own %.0f %%",
            lease.namespace,
            lease.pod,
            (use.compute or 0) * 100,
            use.uuid,
            (use.charged or 0) * 100,
        )
        note = (
            f"has had much more than its {use.limit_percent} % of the time of {use.uuid}, by the "
        )
        await self._report_violation(
            lease, "compute_limit", "FenkaComputeLimitExceeded", note + "driver's account"
        )

    async def _report_violation(self, lease: Lease, kind: str, reason: str, note: str) -> None:
        self._exporter.violations[kind] += 1
        ends = "; the pod is evicted" if self._evict else ""
        self._agent.cluster.pod_event(
            lease.uid, reason, f"container {lease.container} {note}{ends}"
        )
        if self._evict:
            with contextlib.suppress(ApiError, ApiUnreachable):
                await self._agent.cluster.evict(lease)

    def _unmanaged(self, name: str, pid: int) -> None:
        lease = self._lease(name)
        if lease is None:
            return
        self._exporter.violations["unmanaged_process"] += 1
        ended = self._kill and pod_processes.kill(pid, lease.uid)
        self._agent.cluster.pod_event(
            lease.uid,
            "FenkaUnmanagedProcess",
            f"a program in container {lease.container} used the GPU without fenka's library, so without "
            f"its limit" + ("; it was ended" if ended else ""),
        )

    async def listen(self, events: Callable[[], XidListener]) -> None:
        """Hear of XIDs until cancelled; a driver that was lost is listened to again."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                with await asyncio.to_thread(events) as heard:
                    while True:
                        event = await loop.run_in_executor(None, heard.wait, _LISTEN_MS)
                        if event is not None:
                            await self._xid(*event)
            except DriverLost as why:
                _LOG.info("XIDs are not heard now: %s", why)
            await asyncio.sleep(LOOK_S)

    async def _xid(self, uuid: str, xid: int) -> None:
        harmless = APPLICATION_XIDS.get(xid) or INFO_XIDS.get(xid)
        _LOG.warning("XID %d of %s%s", xid, uuid, f": {harmless}" if harmless else "")
        await asyncio.to_thread(self._agent.cards.report, uuid, xid)
        if xid == LOST_XID:
            await asyncio.to_thread(self._agent.cards.refresh)
        if harmless is None:
            self._tell_health()
