"""Ends programs that outlive their pods.

Who deletes a pod chooses how long the kubelet waits for its programs. A pod that is deleted with a long grace
period is not ended at its deadline any more, and after a forced deletion its programs run on without a pod.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from fenka.cluster.objects import Pod, seconds
from fenka.cluster.queue_snapshot import time_limit_s
from fenka.node.kubelet.client import Claim
from fenka.node.lease.store import LeaseStore
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

GONE_S = 30.0
"""Programs may run this long after their pod has left the API server: the kubelet ends them meanwhile."""
LATE_S = 5.0
"""The kubelet may be this late with the end of a pod whose deadline and grace period are over."""


@dataclass(eq=False)
class OverduePods:
    """Kills the processes of leases whose pods should have ended.

    kill: kills the processes of pods, given their UIDs, and returns how many. clock: seconds since the epoch.
    """

    _api: NodeApi
    _store: LeaseStore
    _kill: Callable[[Collection[str]], int]
    _clock: Callable[[], float]
    _gone_since: dict[str, float] = field(default_factory=dict)

    async def end(self, _: Sequence[Claim]) -> None:
        """Kill what is overdue now."""
        now, leases = self._clock(), list(self._store.leases.values())
        uids = {lease.uid for lease in leases}
        gone = {uid for uid in uids if uid not in self._api.pods}
        self._gone_since = {uid: self._gone_since.get(uid, now) for uid in gone}
        overdue = {uid for uid, since in self._gone_since.items() if now - since >= GONE_S}
        overdue |= {
            uid
            for uid in uids - gone
            if (end := ended_at(self._api.pods[uid])) is not None and now >= end + LATE_S
        }
        killed = await asyncio.to_thread(self._kill, overdue) if overdue else 0
        if killed:
            for name in sorted({lease.pod_name for lease in leases if lease.uid in overdue}):
                _LOG.warning("the programs of %s were killed, since they outlived the pod", name)
            for uid in overdue - gone:
                self._api.pod_event(
                    uid,
                    "FenkaDeadline",
                    "the deadline and the grace period of the pod are over, so its programs were killed",
                )


def ended_at(pod: Pod) -> float | None:
    """Return when the kubelet has ended the pod, in seconds since 1970; None if it has no deadline."""
    limit, start = time_limit_s(pod), seconds(pod.status.start_time)
    return None if limit is None or start is None or pod.finished else start + limit
