"""Which running pods get their first size back, so that the first request that waits fits. Pure.

A pod that was resized may hold more of a card than it was placed with (dialects/resize.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fenka.cluster.node_admission import admits, exclusion, ineligibility_reasons
from fenka.cluster.objects import Pod
from fenka.cluster.queue_state import QueueState
from fenka.cluster.state import ClusterState, PodAllocation, read_allocation
from fenka.core.evaluate import Policy
from fenka.core.inventory import DeviceId
from fenka.core.preemption import Preemptor, VictimCandidate, cheapest_victims
from fenka.core.request import Placement
from fenka.core.usage import UsageOverlay, UsageView
from fenka.dialects.resize_records import REFUSED, REQUEST, STATUS, encode_request


@dataclass(frozen=True, slots=True)
class GrownPod:
    """A running pod that holds more than it was placed with.

    Attributes:
        excess: by how much.
        request: the annotation REQUEST that takes the excess back, and nothing else.
    """

    pod: Pod
    excess: Placement
    request: str

    @property
    def is_refused(self) -> bool:
        """Return whether its node has refused to take the excess back: its programs use it."""
        annotations = self.pod.metadata.annotations
        return annotations.get(REQUEST) == self.request and REFUSED in annotations


def grown_pod(cluster: ClusterState, pod: Pod) -> GrownPod | None:
    """Return by how much a pod has grown; None if it has not, or if its first size is not known.

    That is so for pods with several containers that have slices, whole cards or MIG instances, and for
    those whose record cannot be read.
    """
    annotations, held = pod.metadata.annotations, cluster.allocation(pod.metadata.uid)
    if (STATUS not in annotations and REQUEST not in annotations) or held is None:
        # Nearly all pods of a cluster.
        return None
    if pod.status.phase != "Running" or pod.metadata.deletion_timestamp is not None:
        return None
    now, first = _size(held), _first_size(cluster, pod)
    if now is None or first is None or now.devices != first.devices:
        return None
    mib, compute = max(0, now.memory_mib - first.memory_mib), max(0, now.compute - first.compute)
    if not mib and not compute:
        return None
    excess = (replace(piece, memory_mib=mib, compute=compute) for piece in held.slices)
    request = encode_request(
        "", f"{first.memory_mib}MiB" if mib else "", first.compute if compute else None
    )
    return GrownPod(pod, Placement(held.node, tuple(excess)), request)


class _Size(NamedTuple):
    """Slices of equal size on some cards."""

    devices: frozenset[DeviceId]
    memory_mib: int
    compute: int


def _size(held: PodAllocation) -> _Size | None:
    """Return the size of what a pod holds; None if its slices differ, or are whole cards."""
    sizes = {(piece.memory_mib, piece.compute) for piece in held.slices}
    if len(sizes) != 1 or any(placement.whole for placement in held.placements):
        return None
    return _Size(frozenset(piece.uuid for piece in held.slices), *sizes.pop())


def _first_size(cluster: ClusterState, pod: Pod) -> _Size | None:
    """Return the size with which the pod was placed, at most what it requests; None if it is not known."""
    name = pod.spec.node_name
    demand, shared = cluster.demand_on(name, pod), cluster.shared_node(name)
    if shared is None or demand.invalid is not None or demand.in_instances:
        return None
    if sum(len(part.containers) for part in demand.parts) != 1:
        return None
    first = read_allocation(shared, pod, cluster.dialects)
    return _size(first) if first is not None and first.error is None else None


class GrowthReclaim:
    """Chooses the pods that get their first size back."""

    def __init__(
        self, cluster: ClusterState, policy: Policy, usage: UsageView, queue: QueueState
    ) -> None:
        """usage: what is used of the cards, with what is reserved for gangs that are starting."""
        self._cluster, self._policy, self._usage, self._queue = cluster, policy, usage, queue

    def due(self, pods: Mapping[str, Pod], now: float) -> tuple[Pod | None, list[GrownPod]]:
        """Return the first pod that waits for a card, and the grown pods without whose excess it would fit.

        They are on one node, have no higher priority than it, and each of them is needed. There are none if
        it fits already, or if all excess is not enough.

        Args:
            pods: all pods, by UID.
            now: seconds since 1970.
        """
        waiting = self._first_waiting()
        if waiting is None:
            return None, []
        by_node: dict[str, dict[str, GrownPod]] = {}
        for uid, pod in pods.items():
            grown = grown_pod(self._cluster, pod)
            if grown and not grown.is_refused and _priority(pod) <= _priority(waiting):
                by_node.setdefault(grown.excess.node, {})[uid] = grown
        for name in sorted(by_node):
            uids = self._needed(waiting, name, by_node[name], now)
            if uids is not None:
                return waiting, [by_node[name][uid] for uid in uids]
        return waiting, []

    def _first_waiting(self) -> Pod | None:
        """Return the pod for which cards are reserved first; None if that is a gang, or there is none."""
        waiting = (
            entry.pending for entry in self._queue.entries() if entry.reservation is not None
        )
        entry = next(waiting, None)
        return entry.pods[0] if entry is not None and len(entry.pods) == 1 else None

    def _needed(
        self, waiting: Pod, name: str, grown: Mapping[str, GrownPod], now: float
    ) -> tuple[str, ...] | None:
        """Return which excess is needed on a node, by UID; None if all of it is not enough."""
        cluster = self._cluster
        demand = cluster.demand_on(name, waiting)
        if not self._could_serve(name, waiting) or demand.in_instances:
            return None
        constraints = self._queue.constraints(waiting, now)
        usage = UsageOverlay(self._usage)
        for held in constraints.held.get(name, ()):
            usage.add(held.placement)
        for growth in grown.values():
            # The pod keeps its place on its cards when its excess is taken away.
            kept = (replace(piece, memory_mib=0, compute=0) for piece in growth.excess.slices)
            usage.add(Placement(name, tuple(kept)))
        candidates = [
            VictimCandidate(uid, growth.excess, _priority(growth.pod))
            for uid, growth in grown.items()
        ]
        preemptor = Preemptor(tuple(part.request for part in demand.parts), _priority(waiting) + 1)
        nodes = (cluster.card_node(name),)
        needed = cheapest_victims(
            usage, candidates, preemptor, nodes, self._policy, constraints.reserved
        )
        return needed.ids if needed else None

    def _could_serve(self, name: str, waiting: Pod) -> bool:
        """Return whether the node admits the pod, and only lacks room for it."""
        cluster, node = self._cluster, self._cluster.node(name)
        demand = cluster.demand_on(name, waiting)
        return (
            node is not None
            and cluster.node_error(name) is None
            and demand.invalid is None
            and cluster.shares_with(name, demand)
            and admits(cluster, name, demand.parts)
            and exclusion(cluster, name, waiting) is None
            and not ineligibility_reasons(waiting, node)
        )


def _priority(pod: Pod) -> int:
    return pod.spec.priority or 0
