"""Removes fenka's scheduling gate from pods that kube-scheduler is to try now.

When a card becomes free, kube-scheduler tries all pending pods one after another, and each rejected pod
backs off. With hundreds of pending pods the first in line waits for seconds. Therefore the chart's admission
policy adds a scheduling gate to pods that ask for cards. kube-scheduler does not try gated pods. The leader
removes the gate when the pod's turn comes. Pods without the gate are served in the same order.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from fenka.cluster.objects import Pod
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable

log = logging.getLogger(__name__)

LOOK_S = 0.1
MOST = 20
"""Pods at a time. Each is one request; they are sent together."""

RETRY_AFTER_S = 5.0
"""Pause before a failed or unanswered request for the same pod is repeated."""


class GateController:
    """`run` is its task. due: at most N pods whose gate is to be removed, in order."""

    def __init__(
        self,
        api: Api,
        due: Callable[[int], Sequence[Pod]],
        leading: Callable[[], bool],
        sleep: Callable[[float], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._due, self._leading = api, due, leading
        self._sleep, self._clock = sleep, clock
        self._tried: dict[str, float] = {}
        self._trouble = ""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(LOOK_S)
            if self._leading():
                now = self._clock()
                self._tried = {
                    uid: at for uid, at in self._tried.items() if now < at + RETRY_AFTER_S
                }
                pods = self._due(MOST + len(self._tried))
                await asyncio.gather(
                    *(self._open(it) for it in pods if it.metadata.uid not in self._tried)
                )

    async def _open(self, pod: Pod) -> None:
        self._tried[pod.metadata.uid] = self._clock()
        # Nobody can add a gate to an existing pod, and fenka's is the last one on it: removing all is exact.
        body = {"metadata": {"uid": pod.metadata.uid}, "spec": {"schedulingGates": None}}
        try:
            await self._api.patch(pod.path, Pod, body)
        except (ApiError, ApiUnreachable) as why:
            if str(why) != self._trouble:
                self._trouble = str(why)
                log.warning("cannot remove the scheduling gate of %s: %s", pod.full_name, why)
