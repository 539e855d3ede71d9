"""What is allocated on a cluster's nodes, and until when, as the queue counts it. Pure.

Between two passes over the queue only nodes whose allocations have changed are read again.
"""

from collections import Counter
from collections.abc import Mapping
from math import inf

from fenka.cluster.objects import Pod, seconds
from fenka.cluster.queue_snapshot import time_limit_s
from fenka.cluster.state import ClusterState
from fenka.core.inventory import Node
from fenka.core.queue import Allocation
from fenka.core.request import Placement

OVERDUE_TTL_S = 60.0
"""A pod that has not ended this long after it should have may end at any time, or never: its node is gone."""


class QueueAllocations:
    """The allocations of all nodes. They are the same lists as long as they are equal."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._changed: set[str] = set()
        """Nodes whose allocations have changed."""
        cluster.watch(self._changed)
        self._by_node: dict[str, list[Allocation]] = {}
        self._until: dict[str, float] = {}
        """Until when those of a node are valid, where they are not valid indefinitely."""
        self._valid_until = inf
        """Until when all of them are valid, at least."""
        self._of: Mapping[str, Node] = {}
        """The nodes of which the allocations were read."""
        self._held: Counter[str] = Counter()
        """The number of allocations of each namespace."""
        self._seen_at: dict[str, float] = {}
        """When pods were seen first whose node has not reported their start."""

    def forget(self, uid: str) -> None:
        """Record that the pod was deleted."""
        self._seen_at.pop(uid, None)

    def read(
        self,
        nodes: Mapping[str, Node],
        gangs: Mapping[str, tuple[Placement, ...]],
        now: float,
    ) -> tuple[Mapping[str, list[Allocation]], Counter[str]]:
        """Return all allocations on shared nodes, and how many each namespace has.

        They are by node, and valid until the next call.
        """
        stale = self._changed.copy()
        self._changed.clear()
        if self._of is not nodes:
            self._of = nodes
            stale |= self._by_node.keys() ^ nodes.keys()
        if now >= self._valid_until:
            stale |= {name for name, until in self._until.items() if now >= until}
        for name in stale:
            self._held.subtract(it.user for it in self._by_node.pop(name, []))
            self._until.pop(name, None)
            if name in nodes:
                self._read_node(name, now)
        if now >= self._valid_until:
            self._valid_until = min(self._until.values(), default=inf)
        if not gangs:
            return self._by_node, self._held
        allocations, held = self._by_node.copy(), self._held.copy()
        for gang, placements in gangs.items():
            user = gang.partition("/")[0]
            for it in placements:
                if it.node in allocations:
                    reserved = Allocation(it, None, user)
                    allocations[it.node] = [*allocations[it.node], reserved]
                    held[user] += 1
        return allocations, held

    def _read_node(self, name: str, now: float) -> None:
        allocations = list[Allocation]()
        for allocation in self._cluster.allocations(name):
            deadline = self._deadline(allocation.pod, now)
            if deadline is not None:
                until = min(deadline + OVERDUE_TTL_S, self._until.get(name, inf))
                self._until[name] = until
                self._valid_until = min(self._valid_until, until)
            user = allocation.pod.metadata.namespace
            for placement in allocation.placements:
                allocations.append(Allocation(placement, deadline, user))
        self._by_node[name] = allocations
        self._held.update(it.user for it in allocations)

    def _deadline(self, pod: Pod, now: float) -> float | None:
        """Return when the pod has ended whatever it does; None without a limit, or long after it."""
        uid, limit = pod.metadata.uid, time_limit_s(pod)
        if limit is None and pod.metadata.deletion_timestamp is None:
            return None
        deadlines = []
        if limit is not None:
            started = seconds(pod.status.start_time)
            if started is None:
                started = self._seen_at.setdefault(uid, now)
            else:
                self._seen_at.pop(uid, None)
            deadlines.append(started + limit)
        # The API server computes this one, with the pod's grace period.
        deleted = seconds(pod.metadata.deletion_timestamp or "")
        deadlines += [deleted] if deleted is not None else []
        deadline = min(deadlines, default=None)
        return deadline if deadline is not None and deadline + OVERDUE_TTL_S > now else None
