"""Evicts pods that their node refuses to start, and the members of gangs that are incomplete for too long.

The card that was chosen for a pod that is refused for a minute (dialects/leases.py) is used by something that
the scheduler did not know of. After the eviction the pod's controller makes another pod, which is placed by
what the node reports now. An incomplete gang restarts completely.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from fenka.cluster.gang_reservations import GangScheduler
from fenka.cluster.objects import Pod
from fenka.cluster.recent import RecentDict
from fenka.cluster.state import ClusterState
from fenka.dialects.leases import Refusal
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.eviction import evict
from fenka.scheduler.event_reporter import Recorder

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
EVICTED, LEASE_DENIED = "FenkaEvicted", "FenkaLeaseDenied"


class Descheduler:
    """Best effort: what fails is tried again. `run` is its task."""

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        cluster: ClusterState,
        pods: Callable[[], Mapping[str, Pod]],
        gangs: GangScheduler,
        recorder: Recorder,
        is_leading: Callable[[], bool],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        api: the API server.
        cluster: what nodes report.
        pods: returns all pods, by UID.
        gangs: the gangs that are starting.
        recorder: posts the events.
        is_leading: whether this replica leads.
        sleep: waits for a number of seconds.
        """
        self._api, self._cluster, self._pods, self._gangs = api, cluster, pods, gangs
        self._recorder, self._is_leading, self._sleep = recorder, is_leading, sleep
        self._posted: RecentDict[str, None] = RecentDict()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            self._gangs.expire()
            if self._is_leading():
                await self.evict_refused()
                for pod in self._gangs.incomplete_gangs():
                    await self._evict(pod, "its gang has been incomplete for too long")

    async def evict_refused(self) -> None:
        """Evict the pods that are refused now."""
        pods = self._pods()
        for node in self._cluster.nodes():
            name = node.metadata.name
            for uid, refusal in self._cluster.refusals(name).items():
                pod = pods.get(uid)
                if pod is not None and pod.spec.node_name == name and _runs_nothing(pod):
                    await self._evict_refused(pod, refusal)

    async def _evict_refused(self, pod: Pod, refusal: Refusal) -> None:
        meta = pod.metadata
        evictable = refusal.movable and _has_controller(pod)
        if meta.uid not in self._posted:
            self._posted[meta.uid] = None
            refused = f"fenka: its node has refused it for a minute: {refusal.sentence}"
            if evictable:
                note = f"{refused}; it is evicted, and its controller makes another"
                self._recorder.record_on_pod(pod, EVICTED, note)
            elif refusal.movable:
                note = f"{refused}; no controller would make another: delete it and create it again"
                self._recorder.record_on_pod(pod, LEASE_DENIED, note)
        if evictable:
            await self._evict(pod, refusal.sentence)

    async def _evict(self, pod: Pod, why: str) -> None:
        log.warning("evicting %s: %s", pod.full_name, why)
        with contextlib.suppress(ApiError, ApiUnreachable):
            await evict(self._api, pod.metadata.namespace, pod.metadata.name, pod.metadata.uid)


def _runs_nothing(pod: Pod) -> bool:
    """Return whether no container of the pod runs: nothing is lost with it."""
    return pod.status.phase == "Pending" and pod.metadata.deletion_timestamp is None


def _has_controller(pod: Pod) -> bool:
    return any(owner.controller and owner.kind != "Node" for owner in pod.metadata.owner_references)
