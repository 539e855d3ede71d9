"""What the leader does for gangs at the API server: it wakes members, and starts broken gangs anew."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from fenka.cluster.objects import Pod
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.eviction import evict
from fenka.scheduler.gang_scheduler import GangScheduler
from fenka.scheduler.requeue import requeue

log = logging.getLogger(__name__)

LOOK_S = 5.0


class GangController:
    """Best effort: what fails is tried again."""

    def __init__(
        self, api: Api, gangs: GangScheduler, now: Callable[[], float] = time.time
    ) -> None:
        self._api, self._gangs, self._now = api, gangs, now
        self._tasks: set[asyncio.Task[None]] = set()

    def wake(self, pods: Sequence[Pod]) -> None:
        """Have kube-scheduler ask for these."""
        for pod in pods:
            task = asyncio.create_task(self._wake(pod))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def run(self, leading: Callable[[], bool]) -> None:
        """Until cancelled: evict what is left of gangs that were broken for too long."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._gangs.expire()
            for pod in self._gangs.incomplete_gangs() if leading() else ():
                meta = pod.metadata
                log.warning("%s goes: its gang has been incomplete for too long", pod.full_name)
                with contextlib.suppress(ApiError, ApiUnreachable):
                    await evict(self._api, meta.namespace, meta.name, meta.uid)

    async def _wake(self, pod: Pod) -> None:
        with contextlib.suppress(ApiError, ApiUnreachable):
            await requeue(self._api, pod, self._now())
