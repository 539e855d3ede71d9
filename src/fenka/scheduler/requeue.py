"""Has kube-scheduler try pods again that it would let rest: those for which there is room now.

kube-scheduler tries a pod that an extender refused again when a pod ends or a node changes, else after five
minutes. That somebody who waited is deleted, or that nothing is kept for it any more, is neither; a pod whose
label changes is tried again.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from fenka.cluster.objects import Pod
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable

log = logging.getLogger(__name__)

LABEL = "fenka.io/requeued-at"
"""On a pod: when there was room for it and kube-scheduler had not come back to it, in seconds since 1970."""

LOOK_S = 0.25
MOST = 20
"""Pods at a time: what is one write each."""

FORBIDDEN = 403


class Requeuer:
    """`run` is its task. due: the pods, at most so many; each is named once for as long as it fits."""

    def __init__(
        self,
        api: Api,
        due: Callable[[int], Sequence[Pod]],
        leading: Callable[[], bool],
        sleep: Callable[[float], Awaitable[None]],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._api, self._due, self._leading = api, due, leading
        self._sleep, self._now = sleep, now
        self._allowed = True

    async def run(self) -> None:
        """Until cancelled, or until it is told that it may not."""
        while self._allowed:
            await self._sleep(LOOK_S)
            if self._leading():
                for pod in self._due(MOST):
                    await self._nudge(pod)

    async def _nudge(self, pod: Pod) -> None:
        try:
            await requeue(self._api, pod, self._now())
        except ApiError as why:
            # Anything else is about this one pod: it is gone, or another by now.
            if why.status == FORBIDDEN:
                self._allowed = False
                log.warning("pods may rest for minutes although there is room for them: %s", why)
        except ApiUnreachable:
            pass


async def requeue(api: Api, pod: Pod, now: float) -> None:
    """Have kube-scheduler try this pod. now: seconds since 1970. Raises ApiError, ApiUnreachable."""
    labels = {LABEL: str(int(now))}
    await api.patch(pod.path, Pod, {"metadata": {"uid": pod.metadata.uid, "labels": labels}})
