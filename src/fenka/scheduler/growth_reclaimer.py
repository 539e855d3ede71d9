"""Requests that running pods which have grown shrink to their first size, for a pod that waits.

It writes the annotation by which users resize a pod (dialects/resize.py). The node program shrinks the pod
once its programs hold no more than that.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from fenka.cluster.growth import GrownPod, GrowthReclaim
from fenka.cluster.objects import Pod
from fenka.dialects.resize import REQUEST
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.scheduler.event_reporter import Recorder

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
TAKEN_BACK = "FenkaGrowthTakenBack"


class GrowthReclaimer:
    """Best effort: what fails is tried again. `run` is its task."""

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        reclaim: GrowthReclaim,
        pods: Callable[[], Mapping[str, Pod]],
        recorder: Recorder,
        is_leading: Callable[[], bool],
        *,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        api: the API server.
        reclaim: chooses the pods.
        pods: returns all pods, by UID.
        recorder: posts the events.
        is_leading: whether this replica leads.
        now: seconds since 1970.
        sleep: waits for a number of seconds.
        """
        self._api, self._reclaim, self._pods, self._recorder = api, reclaim, pods, recorder
        self._is_leading, self._now, self._sleep = is_leading, now, sleep

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            if self._is_leading():
                await self.reclaim()

    async def reclaim(self) -> None:
        """Request what is due now, and was not requested before."""
        waiting, grown = self._reclaim.due(self._pods(), self._now())
        for it in grown:
            if waiting is not None and it.pod.metadata.annotations.get(REQUEST) != it.request:
                await self._request(it, waiting)

    async def _request(self, grown: GrownPod, waiting: Pod) -> None:
        pod = grown.pod
        metadata = {"uid": pod.metadata.uid, "annotations": {REQUEST: grown.request}}
        try:
            await self._api.patch(pod.path, Pod, {"metadata": metadata})
        except (ApiError, ApiUnreachable) as why:
            log.warning("the growth of %s is taken back later: %s", pod.full_name, why)
            return
        note = (
            f"fenka: what it has grown by is taken back ({REQUEST}: {grown.request}), because pod "
            f"{waiting.full_name} waits and would fit then; memory that its programs use is not taken"
        )
        self._recorder.record_on_pod(pod, TAKEN_BACK, note)
