"""Evicts pods that hold a card and do not start there, while others wait: a wrong image, a missing Secret.

It is off by default. The kubelet tries such a pod for as long as it exists. Nothing of it has run, so only
its place is lost: a pod of a controller is made again and queues behind those that wait. A pod without a
controller is gone.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice

from fenka.cluster.mappings import RecentDict
from fenka.cluster.objects import Pod, seconds
from fenka.cluster.state import ClusterState
from fenka.cluster.unstarted_pods import runs_nothing, waiting_reasons
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.eviction import evict
from fenka.scheduler.event_reporter import Recorder

_LOG = logging.getLogger(__name__)

UNSTARTED = "FenkaNeverStarted"
INTERVAL_S, RETRY_AFTER_S = 5.0, 60.0
"""Between two looks, and between two looks at the same pod."""
MAX_PODS = 20
"""Pods of a look. Each takes one or two requests."""


class UnstartedEvictions:
    """Evicts such pods, while this replica leads and any request waits. `run` is its task.

    The scheduler keeps no states of containers. So a pod that may be one is read before it is evicted.
    """

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        cluster: ClusterState,
        pods: Callable[[], Mapping[str, Pod]],
        after_s: float,
        recorder: Recorder,
        is_due: Callable[[], bool],
        *,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        api: the API server.
        cluster: what pods hold.
        pods: returns all pods, by UID.
        after_s: seconds from when the kubelet accepted the pod.
        recorder: posts the events.
        is_due: whether this replica leads and a request waits.
        now: seconds since 1970.
        sleep: waits for a number of seconds.
        """
        self._api, self._cluster, self._pods, self._after_s = api, cluster, pods, after_s
        self._recorder, self._is_due, self._now, self._sleep = recorder, is_due, now, sleep
        self._looked_at: RecentDict[str, float] = RecentDict()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            if self._is_due():
                await self.evict_due()

    async def evict_due(self) -> None:
        """Evict the pods that are due now. An eviction that fails is repeated later."""
        now = self._now()
        due = (pod for pod in self._pods().values() if self._may_be_due(pod, now))
        for pod in list(islice(due, MAX_PODS)):
            self._looked_at[pod.metadata.uid] = now
            try:
                await self._evict(pod)
            except (ApiError, ApiUnreachable) as why:
                _LOG.warning("cannot evict %s, which has not started: %s", pod.full_name, why)

    def _may_be_due(self, pod: Pod, now: float) -> bool:
        meta, status = pod.metadata, pod.status
        if (
            status.phase != "Pending"
            or not pod.spec.node_name
            or meta.deletion_timestamp is not None
        ):
            return False
        started_at = seconds(status.start_time)
        if started_at is None or now - started_at < self._after_s:
            return False
        if now - self._looked_at.get(meta.uid, -RETRY_AFTER_S) < RETRY_AFTER_S:
            return False
        # The pods of a Node are files of its kubelet, which an eviction does not end.
        of_node = any(owner.controller and owner.kind == "Node" for owner in meta.owner_references)
        return not of_node and self._cluster.allocation(meta.uid) is not None

    async def _evict(self, known: Pod) -> None:
        """Evict the pod if it still runs nothing. Raises ApiError, ApiUnreachable."""
        pod = await self._api.get(known.path, Pod)
        meta = pod.metadata
        if meta.uid != known.metadata.uid or not runs_nothing(pod):
            return
        reasons = waiting_reasons(pod)
        why = f" ({', '.join(reasons)})" if reasons else ""
        made_again = any(owner.controller for owner in meta.owner_references)
        after = "its controller makes another" if made_again else "no controller makes another"
        note = (
            f"fenka: it has held cards since {pod.status.start_time} without starting{why}, and others wait; "
            f"it is evicted, and {after}"
        )
        self._recorder.record_on_pod(pod, UNSTARTED, note)
        _LOG.warning("evicting %s: %s", pod.full_name, note)
        await evict(self._api, meta.namespace, meta.name, meta.uid)
