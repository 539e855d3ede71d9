"""Patches pods so that kube-scheduler tries them: removes fenka's scheduling gate, or changes a label.

When a card becomes free, kube-scheduler tries all pending pods one after another, and each rejected pod
backs off. With hundreds of pending pods the first one waits for seconds. Therefore the chart's admission
policy adds a scheduling gate to pods that request cards. kube-scheduler does not try gated pods. The leader
removes the gate when the pod is to be scheduled. Pods without the gate are served in the same order.

kube-scheduler retries a rejected pod when a pod ends or a node changes, or after five minutes. The end of a
reservation is neither; a pod whose label changes is retried.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fenka.cluster.objects import Pod
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable

log = logging.getLogger(__name__)

REQUEUED_LABEL = "fenka.io/requeued-at"
"""On a pod: when fenka last had kube-scheduler retry it, in seconds since 1970."""

UNGATE_INTERVAL_S = 0.1
REQUEUE_INTERVAL_S = 0.25

MAX_PODS = 20
"""Pods at a time. Each is one request; they are sent together."""

RETRY_AFTER_S = 5.0
"""Pause before a failed or unanswered request to remove the same gate is repeated."""

Body = Mapping[str, Any]


def ungate_body(_: Pod) -> Body:
    """Return the patch that removes the scheduling gates.

    Nobody can add a gate to an existing pod, and fenka's is the last one on it. So removing all is exact.
    """
    return {"spec": {"schedulingGates": None}}


def requeue_body(_: Pod) -> Body:
    """Return the patch that has kube-scheduler retry a pod."""
    return {"metadata": {"labels": {REQUEUED_LABEL: str(int(time.time()))}}}


class PodPatcher:
    """Patches pods as they become due, while this replica leads. `run` is its task."""

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        body: Callable[[Pod], Body],
        due: Callable[[int], Sequence[Pod]],
        is_leading: Callable[[], bool],
        interval_s: float,
        *,
        retry_after_s: float = RETRY_AFTER_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        api: the API server.
        body: returns the patch for a pod.
        due: returns about this number of pods that are to be patched now, in order.
        is_leading: whether this replica may write.
        interval_s: pause between two looks.
        retry_after_s: pause between two patches of the same pod.
        sleep: waits for a number of seconds.
        clock: seconds, monotonic.
        """
        self._api, self._body, self._due, self._is_leading = api, body, due, is_leading
        self._interval_s, self._retry_after_s = interval_s, retry_after_s
        self._sleep, self._clock = sleep, clock
        self._patched_at: dict[str, float] = {}
        self._last_error = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(self._interval_s)
            if self._is_leading():
                oldest = self._clock() - self._retry_after_s
                self._patched_at = {uid: at for uid, at in self._patched_at.items() if at > oldest}
                pods = self._due(MAX_PODS + len(self._patched_at))
                due = [it for it in pods if it.metadata.uid not in self._patched_at]
                await asyncio.gather(*map(self.patch, due))

    def patch_soon(self, pods: Sequence[Pod]) -> None:
        """Patch these pods in the background, whether or not they are due."""
        for pod in pods:
            task = asyncio.create_task(self.patch(pod))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def patch(self, pod: Pod) -> None:
        """Patch one pod. An error is logged, once while it stays the same."""
        self._patched_at[pod.metadata.uid] = self._clock()
        body = self._body(pod)
        metadata = {**body.get("metadata", {}), "uid": pod.metadata.uid}
        try:
            await self._api.patch(pod.path, Pod, {**body, "metadata": metadata})
        except (ApiError, ApiUnreachable) as why:
            if str(why) != self._last_error:
                self._last_error = str(why)
                log.warning(
                    "cannot patch %s, so kube-scheduler may not try it: %s", pod.full_name, why
                )
