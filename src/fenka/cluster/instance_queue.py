"""Serves pending pods that request instances of divided cards, in the order of the queue. Pure.

Instances are created where pods need them, so there are no cards to reserve. What fits is held for a pod. An
entry that starves keeps the place free of which the least is taken.
"""

from collections.abc import Sequence

from fenka.cluster.instance_placement import reserve_instances
from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Pod
from fenka.cluster.pod_placement import Feasible, PodEvaluator, Verdict
from fenka.cluster.queue_constraints import HeldPlacement, QueueConstraints
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Policy
from fenka.core.inventory import DeviceId
from fenka.core.mig.instances import RESERVING, NoInstance
from fenka.core.queue import QueueStatus, Reservation
from fenka.core.request import Placement
from fenka.dialects.base import SharedNode


class InstanceQueue:
    """One pass over the queue. Each pod is placed on what those before it leave.

    Attributes:
        reserved: the node of each instance whose place is kept free.
    """

    def __init__(self, cluster: ClusterState, policy: Policy) -> None:
        self._cluster = cluster
        self._evaluator = PodEvaluator(cluster, policy)
        self.reserved: dict[DeviceId, str] = {}
        self._reservations = 0
        self._held: dict[str, tuple[HeldPlacement, ...]] = {}
        self._verdicts: dict[object, dict[str, Verdict | None]] = {}
        """By what decides them, then by node, of which only a placement or reservation changes them."""
        self._positions = 0

    def serve(
        self, pod: Pod, entry: str, nodes: frozenset[str], *, starves: bool
    ) -> tuple[Placement, ...] | QueueStatus:
        """Return where the pod fits now; else why it waits, and what is reserved for it.

        Args:
            pod: the only one of its entry.
            entry: its ID.
            nodes: the eligible ones, on which the pod requests instances or slices inside them.
            starves: whether places are reserved for a pod that does not fit.
        """
        names, namespace = sorted(nodes), pod.metadata.namespace
        parts = pod.demand(self._cluster.dialects).parts
        key = tuple(part.request for part in parts), nodes, namespace
        verdicts = self._verdicts.setdefault(key, {})
        unknown = [name for name in names if name not in verdicts]
        verdicts.update(self._evaluator.evaluate(pod, unknown, self._constraints()))
        fits = [
            (verdict.score, name, verdict.placements)
            for name, verdict in verdicts.items()
            if isinstance(verdict, Feasible)
        ]
        if fits:
            _, name, placements = min(fits, key=lambda fit: fit[:2])
            held = (HeldPlacement(entry, it, namespace) for it in placements)
            self._held[name] = (*self._held.get(name, ()), *held)
            self._changed(name)
            return placements
        rejected = _reason([it for it in verdicts.values() if isinstance(it, Infeasible)])
        self._positions += 1
        kept = self._reserve(pod, names) if starves else frozenset()
        reservation = Reservation(kept, None) if kept else None
        return QueueStatus(entry, self._positions, rejected, reservation)

    def _reserve(self, pod: Pod, names: Sequence[str]) -> frozenset[DeviceId]:
        if self._reservations >= RESERVING:
            return frozenset()
        options = [
            (*option, name)
            for name in names
            if (shared := self._cluster.shared_node(name)) is not None
            and (option := self._option(shared, pod)) is not None
        ]
        if not options:
            return frozenset()
        _, kept, name = min(options, key=lambda option: (option[0], option[2]))
        self._reservations += 1
        self.reserved |= dict.fromkeys(kept, name)
        self._changed(name)
        return kept

    def _option(
        self, shared: SharedNode, pod: Pod
    ) -> tuple[tuple[int, ...], frozenset[DeviceId]] | None:
        demand = self._cluster.demand_on(shared.node.name, pod)
        requests = [part.request for part in demand.parts]
        return reserve_instances(shared, self._cluster, requests, self.reserved)

    def _changed(self, name: str) -> None:
        for verdicts in self._verdicts.values():
            verdicts.pop(name, None)

    def _constraints(self) -> QueueConstraints:
        nodes = frozenset(self._held).union(self.reserved.values())
        return QueueConstraints(frozenset(self.reserved), self._held, nodes)


def _reason(verdicts: Sequence[Infeasible]) -> NoInstance:
    """Return one that the pod waits for, rather than one that will not change."""
    first = min(verdicts, key=lambda it: it.unresolvable, default=None)
    return NoInstance((), first.sentence if first else "no node has such an instance")
