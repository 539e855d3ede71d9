"""Records what namespaces use, by the pods' allocations and the kubelet's times, which tenants cannot write.

Pods are recorded after the cluster's state knows them. After a restart these are all pods that the API server
still shows, running and finished; the use of pods that were deleted before is lost. Times are seconds since
1970.
"""

from collections.abc import Iterable

from fenka.cluster.allocation import read_allocation
from fenka.cluster.objects import Pod, seconds
from fenka.cluster.state import ClusterState
from fenka.core.fairness import Fairness, UsageHistory, cards_of
from fenka.core.request import Placement
from fenka.dialects.base import SharedNode
from fenka.dialects.mig_records import with_instances


class UsageAccounting:
    """Keeps the history `uses` up to date."""

    def __init__(self, cluster: ClusterState, fairness: Fairness) -> None:
        self.uses = UsageHistory(fairness)
        self._cluster = cluster
        self._nodeless: dict[str, Pod] = {}
        """Pods on nodes whose cards are not known yet."""
        self._nodes_version = -1
        self._ended: set[str] = set()

    def set(self, pod: Pod, now: float) -> None:
        """Record the pod's use from its start to its end."""
        uid, node = pod.metadata.uid, pod.spec.node_name
        self._nodeless.pop(uid, None)
        if not node or uid in self._ended:
            return
        allocation = self._cluster.allocation(uid)
        if allocation is None and not pod.demand(self._cluster.dialects).requests_gpu:
            return
        shared, ended = self._cluster.shared_node(node), now
        if shared is None:
            self._nodeless[uid] = pod
            return
        created = seconds(pod.metadata.creation_timestamp) or now
        started = max(created, seconds(pod.status.start_time) or now)
        if pod.finished and not self.uses.holds(uid):
            # It ended before it was recorded for the first time.
            allocation = read_allocation(shared, pod, self._cluster.dialects)
            ended = seconds(pod.ended_at) or started
        if allocation is not None:
            cards = _cards(shared, allocation.placements)
            self.uses.start(uid, pod.metadata.namespace, cards, created, started, now)
        if pod.finished or allocation is None:
            self.uses.stop(uid, max(started, ended), now)
            self._ended.add(uid)

    def charge(
        self,
        namespace: str,
        placements: Iterable[Placement],
        since: float,
        requested_at: float,
        now: float,
    ) -> None:
        """Count cards that were held for a pod since then as used by its namespace."""
        cards = sum(
            _cards(shared, (placement,))
            for placement in placements
            if (shared := self._cluster.shared_node(placement.node)) is not None
        )
        self.uses.charge(namespace, cards * (now - since), requested_at, now)

    def forget(self, uid: str, now: float) -> None:
        """Record that the pod was deleted."""
        self._nodeless.pop(uid, None)
        self._ended.discard(uid)
        self.uses.stop(uid, now, now)

    def retain(self, uids: Iterable[str], now: float) -> None:
        """Forget all pods but these."""
        for uid in (self.uses.holders | self._ended | self._nodeless.keys()) - set(uids):
            self.forget(uid, now)

    def refresh(self, now: float) -> None:
        """Record pods whose nodes have become known."""
        if self._nodes_version != self._cluster.nodes_version:
            self._nodes_version = self._cluster.nodes_version
            for pod in list(self._nodeless.values()):
                self.set(pod, now)


def _cards(shared: SharedNode, placements: Iterable[Placement]) -> float:
    """Return the placements' share of cards."""
    placements = tuple(placements)
    devices = (piece.uuid for placement in placements for piece in placement.slices)
    return cards_of(placements, with_instances(shared, devices).node.cards)
