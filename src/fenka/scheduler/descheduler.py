"""Moves pods that their node has refused to start for a minute: dialects/leases.py.

The card that was chosen for such a pod is taken by somebody of whom the scheduler did not know. It is
evicted, so that its controller makes another, which is placed by what the node reports now.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping

from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterState
from fenka.dialects.leases import Refusal
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.eviction import evict
from fenka.scheduler.event_reporter import Recorder

log = logging.getLogger(__name__)

LOOK_S = 5.0
EVICTED, LEASE_DENIED = "FenkaEvicted", "FenkaLeaseDenied"
_REMEMBERED = 10_000


class Descheduler:
    """Best effort: what fails is tried again. pods: those that the watch knows, by UID."""

    def __init__(
        self,
        api: Api,
        world: ClusterState,
        pods: Callable[[], Mapping[str, Pod]],
        recorder: Recorder,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._world, self._pods, self._recorder = api, world, pods, recorder
        self._sleep = sleep
        self._told: OrderedDict[str, None] = OrderedDict()

    async def run(self, leading: Callable[[], bool]) -> None:
        """Look every few seconds until cancelled."""
        while True:
            await self._sleep(LOOK_S)
            if leading():
                await self.look()

    async def look(self) -> None:
        """Move those that are refused now."""
        pods = self._pods()
        for node in self._world.nodes():
            name = node.metadata.name
            for uid, refusal in self._world.refusals(name).items():
                pod = pods.get(uid)
                if pod is not None and pod.spec.node_name == name and _waits(pod):
                    await self._move(pod, refusal)

    async def _move(self, pod: Pod, refusal: Refusal) -> None:
        meta = pod.metadata
        movable = refusal.movable and _is_made_again(pod)
        if meta.uid not in self._told:
            self._told[meta.uid] = None
            if len(self._told) > _REMEMBERED:
                self._told.popitem(last=False)
            said = f"fenka: its node has refused it for a minute: {refusal.sentence}"
            if movable:
                note = f"{said}; it is evicted, and its controller makes another"
                self._recorder.on_pod(pod, EVICTED, note)
            elif refusal.movable:
                note = f"{said}; no controller would make another: delete it and create it again"
                self._recorder.on_pod(pod, LEASE_DENIED, note)
        if movable:
            log.warning("%s is evicted: %s", pod.full_name, refusal.sentence)
            with contextlib.suppress(ApiError, ApiUnreachable):
                await evict(self._api, meta.namespace, meta.name, meta.uid)


def _waits(pod: Pod) -> bool:
    """Whether none of its containers runs: nothing is lost when it goes."""
    return pod.status.phase == "Pending" and pod.metadata.deletion_timestamp is None


def _is_made_again(pod: Pod) -> bool:
    return any(it.controller and it.kind != "Node" for it in pod.metadata.owner_references)
