"""Counts what pods hold for their namespaces, by the kubelet's times, which tenants cannot write.

Pods are reported by the watch, after the world. After a start these are all pods that the API server still
shows, running and finished. The use of pods that are deleted by then is lost.
"""

from collections.abc import Iterable

from fenka.cluster.allocation import read_allocation
from fenka.cluster.objects import Pod, seconds
from fenka.cluster.state import ClusterState
from fenka.core.fairness import Fairness, UsageHistory, cards_of
from fenka.core.request import Placement


class UsageAccounting:
    """Keeps `uses` up to date. now: seconds since 1970."""

    def __init__(self, world: ClusterState, fairness: Fairness) -> None:
        self.uses = UsageHistory(fairness)
        self._world = world
        self._unknown: dict[str, Pod] = {}
        """Pods on nodes whose cards the watch has not reported yet."""
        self._nodes_version = -1
        self._ended: set[str] = set()

    def set(self, pod: Pod, now: float) -> None:
        """Count the pod from its start to its end."""
        uid, node = pod.metadata.uid, pod.spec.node_name
        self._unknown.pop(uid, None)
        if not node or uid in self._ended or not pod.demand().requests_gpu:
            return
        share, ended = self._world.shared_node(node), now
        if share is None:
            self._unknown[uid] = pod
            return
        created = seconds(pod.metadata.creation_timestamp) or now
        started = max(created, seconds(pod.status.start_time) or now)
        if not pod.finished:
            holding = self._world.allocation(uid)
        elif self.uses.holds(uid):
            holding = None
        else:
            # It ended before it was reported for the first time.
            holding = read_allocation(share, pod, self._world.dialects)
            ended = seconds(pod.ended_at) or started
        if holding is not None:
            cards = cards_of(holding.placements, {it.uuid: it for it in share.node.cards})
            self.uses.start(uid, pod.metadata.namespace, cards, created, started, now)
        if pod.finished or holding is None:
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
        """Count cards that were kept for a pod since then, and for nobody else, as used by its namespace."""
        cards = 0.0
        for it in placements:
            share = self._world.shared_node(it.node)
            if share is not None:
                cards += cards_of((it,), {card.uuid: card for card in share.node.cards})
        self.uses.charge(namespace, cards * (now - since), requested_at, now)

    def forget(self, uid: str, now: float) -> None:
        """The pod is gone."""
        self._unknown.pop(uid, None)
        self._ended.discard(uid)
        self.uses.stop(uid, now, now)

    def resync(self, uids: Iterable[str], now: float) -> None:
        """Forget all pods but these."""
        for uid in (self.uses.holders | self._ended | self._unknown.keys()) - set(uids):
            self.forget(uid, now)

    def renew(self, now: float) -> None:
        """Count pods whose node has been reported since."""
        if self._nodes_version != self._world.nodes_version:
            self._nodes_version = self._world.nodes_version
            for pod in list(self._unknown.values()):
                self.set(pod, now)
