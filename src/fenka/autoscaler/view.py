"""What one pass of the autoscaler knows. Each decider is a pure function of it.

The deciders are called in this order: reclaim, orders' lifecycle, planning, scale-in. Each gets a view that
is made just before, and valid until the decider returns: it refers to live collections, which do not change
meanwhile, because deciders do not await.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fenka.autoscaler.objects import DaemonSet, ElasticNode, ElasticPod
from fenka.autoscaler.shapes import Shape
from fenka.cloud.config import Config, GroupConfig
from fenka.cloud.port import Instance, Notice, Offer, OfferKey
from fenka.cluster.autoscaling import ORDER, OrderRecord, OrderState, Slot, Status
from fenka.cluster.disruption import PodDisruptionBudget
from fenka.cluster.pod_groups import PodGroup
from fenka.cluster.state import ClusterState

COMING: frozenset[OrderState] = frozenset({"written", "asked", "known", "joined"})
"""States of slots whose nodes do not offer their cards yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The cluster, the cloud, and what the autoscaler remembers.

    Times are Unix times. What could not be read is as it was read last; `instances_at` says how old it is.

    Attributes:
        state: sharing nodes, their cards, and what pods hold of them.
        nodes: by name.
        pods: by UID; finished and pending ones too.
        pods_on: pods that are bound and not finished, by node.
        orders: those of ConfigMap fenka-orders, by name.
        instances: all with this cluster's tag, by the cloud's id.
        instances_at: when they were read, None if that has not succeeded yet.
        missing: instances of orders or nodes that the cloud no longer lists, by when that was seen first.
        offers: with price and stock.
        notices: take-backs that the cloud has announced.
        shapes: what nodes of each instance type were, or what the cloud says of the type.
        misfits: offers that do not help classes of pods, as `plan_case.class_key` names them.
        status: what was published last, so that times survive a change of the leader.
        displaced: UIDs of pods that leave nodes which are taken back, and whose successors do not exist yet.
        schedulers: the schedulerNames that are served, empty for all.
        cloud_problem: why the cloud could not be read the last time, empty if it could.
    """

    now: float
    config: Config
    state: ClusterState
    nodes: Mapping[str, ElasticNode] = field(default_factory=dict)
    pods: Mapping[str, ElasticPod] = field(default_factory=dict)
    pods_on: Mapping[str, Sequence[ElasticPod]] = field(default_factory=dict)
    groups: Mapping[str, PodGroup] = field(default_factory=dict)
    budgets: Sequence[PodDisruptionBudget] = ()
    daemons: Sequence[DaemonSet] = ()
    orders: Mapping[str, OrderRecord] = field(default_factory=dict)
    instances: Mapping[str, Instance] = field(default_factory=dict)
    instances_at: float | None = None
    missing: Mapping[str, float] = field(default_factory=dict)
    offers: Mapping[OfferKey, Offer] = field(default_factory=dict)
    notices: Sequence[Notice] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    misfits: Mapping[OfferKey, frozenset[str]] = field(default_factory=dict)
    status: Status = field(default_factory=Status)
    displaced: frozenset[str] = frozenset()
    schedulers: frozenset[str] = frozenset()
    cloud_problem: str = ""

    def group(self, name: str) -> GroupConfig | None:
        """Return the configuration of a group, None if it has been removed."""
        return next((group for group in self.config.groups if group.name == name), None)

    def instance_of(self, node: ElasticNode) -> Instance | None:
        """Return the machine that a node is, None if it is none of this cluster's tag."""
        wanted = node.spec.provider_id
        if not wanted:
            return None
        return next((each for each in self.instances.values() if each.provider_id == wanted), None)

    def machines(self) -> dict[str, Instance]:
        """Return all instances by their provider ids, for those who look up many."""
        return {each.provider_id: each for each in self.instances.values() if each.provider_id}

    def node_of(self, instance: Instance) -> ElasticNode | None:
        """Return the node of a machine, None if it has not joined or is gone."""
        wanted = instance.provider_id
        if not wanted:
            # Not known yet. Nodes of other origin may have none either.
            return None
        return next((node for node in self.nodes.values() if node.spec.provider_id == wanted), None)

    def own_nodes(self) -> list[ElasticNode]:
        """Return the nodes that were bought, by name. A node is this autoscaler's by its label."""
        own = (node for node in self.nodes.values() if ORDER in node.metadata.labels)
        return sorted(own, key=lambda node: node.metadata.name)

    def planned_pods(self, node: str) -> list[ElasticPod]:
        """Return the pending pods that are planned for a node."""
        return [
            pod
            for record in self.orders.values()
            for slot in record.slots
            if slot.node == node
            for pod in self.waiting(slot)
        ]

    def waiting(self, slot: Slot) -> list[ElasticPod]:
        """Return the pods planned for a slot that exist and have no node yet."""
        return [
            pod
            for uid in slot.pods
            if (pod := self.pods.get(uid)) is not None
            and not pod.spec.node_name
            and not pod.finished
            and pod.metadata.deletion_timestamp is None
        ]


def offer_of(record: OrderRecord) -> OfferKey:
    """Return the offer of an order."""
    return OfferKey(record.group, record.type, record.zone, record.capacity)


def coming(orders: Mapping[str, OrderRecord]) -> Iterable[tuple[str, int, OrderRecord, Slot]]:
    """Yield the slots whose nodes are on their way, with their order's name and number."""
    for name, record in orders.items():
        for number, slot in enumerate(record.slots):
            if slot.state in COMING:
                yield name, number, record, slot


def pods_by_node(pods: Iterable[ElasticPod]) -> dict[str, list[ElasticPod]]:
    """Return the pods that are bound and not finished, by node."""
    bound: dict[str, list[ElasticPod]] = {}
    for pod in pods:
        if pod.spec.node_name and not pod.finished:
            bound.setdefault(pod.spec.node_name, []).append(pod)
    return bound
