"""Everything that one pass of the autoscaler knows, with the shapes that nodes of each type will have.

Each decider is a pure function of a snapshot. It refers to live collections: deciders do not await.

Clouds round memory up: 16384 MiB for a T4 whose driver reports 15079. By the cloud's number a pod of 15 units
would make the planner buy nodes that never fit it. A shape comes from the first source that exists. They are
a node of this type that was seen, the configuration, the drivers' own numbers, and the cloud's numbers less 8
%.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fenka.autoscaler.watch import DaemonSet, ElasticCluster, ElasticPod
from fenka.cloud.config import AutoscalerConfig, GroupConfig
from fenka.cloud.port import Instance, Offer, OfferKey, ReclaimNotice
from fenka.cluster import autoscaling
from fenka.cluster.objects import Node
from fenka.cluster.pod_groups import PodGroup
from fenka.cluster.pod_preemption import PodDisruptionBudget
from fenka.cluster.state import ClusterState
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Taint
from fenka.core.nodes.case import CaseRequest, NewCard, NodeGroup
from fenka.core.nodes.problem import ineligible
from fenka.hardware.card_spec import MODELS

CLOUD_MARGIN = 0.08
"""The part of a cloud's number that firmware, the driver and the kubelet keep."""

SAME_CARD = 0.1
"""A driver's number is of the same card as a cloud's if it is lower by this part at most."""


class UnknownShape(FenkaError):
    """Nothing says what a node of the type will be; the message says where to."""

    exit_code = INVALID_INPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A node's allocatable amounts, with the names of `fenka.plan/1`."""

    cpu_milli: int
    memory_mib: int
    pods: int = 110
    resources: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    cards: tuple[NewCard, ...] = ()


def shape_of(
    name: str,
    *,
    seen: Shape | None = None,
    configured: Shape | None = None,
    cloud: autoscaling.CloudType | None = None,
) -> Shape:
    """Return the shape of an instance type.

    Args:
        name: of the type, for the error.
        seen: what a node of this type was.
        configured: what the configuration says.
        cloud: what the cloud says.

    Raises:
        UnknownShape: if nobody says anything.
    """
    known = seen or configured
    if known is not None:
        return known
    if cloud is None:
        raise UnknownShape(f"the shape of {name} is not known: say shape: for it")
    return Shape(
        cpu_milli=_lowered(cloud.cpu_milli),
        memory_mib=_lowered(cloud.memory_mib),
        cards=(_card(cloud),) * cloud.cards,
    )


def common(one: Shape, other: Shape) -> Shape:
    """Return what nodes of both shapes have: machines of one type differ by a few MiB."""
    smaller = min(one, other, key=lambda shape: [card.memory_mib for card in shape.cards])
    return Shape(
        cpu_milli=min(one.cpu_milli, other.cpu_milli),
        memory_mib=min(one.memory_mib, other.memory_mib),
        pods=min(one.pods, other.pods),
        resources=_common_resources(one.resources, other.resources),
        labels=dict(one.labels.items() & other.labels.items()),
        taints=tuple(dict.fromkeys((*one.taints, *other.taints))),
        cards=smaller.cards,
    )


def _common_resources(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: min(one[name], other[name]) for name in sorted(one.keys() & other.keys())}


def without_daemons(group: NodeGroup, daemons: Iterable[CaseRequest]) -> NodeGroup:
    """Return the group less the DaemonSets that run on its nodes.

    Args:
        group: with the whole allocatable amounts.
        daemons: a request without cards for each DaemonSet.
    """
    for daemon in daemons:
        # They run on spot nodes as on all others.
        if ineligible(replace(daemon, interruptible=True), group) or not _has_room(group, daemon):
            continue
        resources = {
            name: max(amount - daemon.resources.get(name, 0), 0)
            for name, amount in group.resources.items()
        }
        group = replace(
            group,
            cpu_milli=max(group.cpu_milli - daemon.cpu_milli, 0),
            memory_mib=max(group.memory_mib - daemon.memory_mib, 0),
            pods=max(group.pods - 1, 0),
            resources=resources,
        )
    return group


def _has_room(group: NodeGroup, daemon: CaseRequest) -> bool:
    """Return whether the DaemonSet's pod can start there. One that cannot takes nothing from others."""
    return (
        daemon.cpu_milli <= group.cpu_milli
        and daemon.memory_mib <= group.memory_mib
        and group.pods > 0
        and all(amount <= group.resources.get(name, 0) for name, amount in daemon.resources.items())
    )


def _card(cloud: autoscaling.CloudType) -> NewCard:
    """Return the card as its driver reports it, where that is known."""
    words = set(re.findall(r"[a-z0-9]+", cloud.model.lower()))
    for model in MODELS.values():
        same_name = model.key.lower().split("-")[0] in words or model.name == cloud.model
        if same_name and (1 - SAME_CARD) * cloud.card_mib <= model.memory_mib <= cloud.card_mib:
            return NewCard(model=model.name, memory_mib=model.usable_mib)
    return NewCard(model=cloud.model, memory_mib=_lowered(cloud.card_mib))


def _lowered(amount: int) -> int:
    return int(amount * (1 - CLOUD_MARGIN))


COMING: frozenset[autoscaling.OrderState] = frozenset({"written", "asked", "known", "joined"})
"""States of slots whose nodes do not offer their cards yet."""

LIVE = COMING | {"offering"}
"""States of slots that have a node, or will."""

Slots = Iterator[tuple[str, int, autoscaling.OrderRecord, autoscaling.Slot]]
"""Slots with their order's name, their number in it, and the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster, the cloud, and what the autoscaler remembers.

    Times are Unix times. A list that could not be read is as it was read last; `instances_at` says its age.

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
        unhelpful: offers that do not help classes of pods, as `plan_case.class_key` names them.
        status: what was published last, so that times survive a change of the leader.
        evicted: UIDs of pods that leave nodes which are taken back, and whose successors do not exist yet.
        schedulers: the schedulerNames that are served, empty for all.
        cloud_problem: why the cloud could not be read the last time, empty if it could.
    """

    now: float
    config: AutoscalerConfig
    state: ClusterState
    nodes: Mapping[str, Node] = field(default_factory=dict)
    pods: Mapping[str, ElasticPod] = field(default_factory=dict)
    pods_on: Mapping[str, Sequence[ElasticPod]] = field(default_factory=dict)
    groups: Mapping[str, PodGroup] = field(default_factory=dict)
    budgets: Sequence[PodDisruptionBudget] = ()
    daemons: Sequence[DaemonSet] = ()
    orders: Mapping[str, autoscaling.OrderRecord] = field(default_factory=dict)
    instances: Mapping[str, Instance] = field(default_factory=dict)
    instances_at: float | None = None
    missing: Mapping[str, float] = field(default_factory=dict)
    offers: Mapping[OfferKey, Offer] = field(default_factory=dict)
    notices: Sequence[ReclaimNotice] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    unhelpful: Mapping[OfferKey, frozenset[str]] = field(default_factory=dict)
    status: autoscaling.AutoscalerStatus = field(default_factory=autoscaling.AutoscalerStatus)
    evicted: frozenset[str] = frozenset()
    schedulers: frozenset[str] = frozenset()
    cloud_problem: str = ""

    @classmethod
    def of_cluster(
        cls, cluster: ElasticCluster, now: float, config: AutoscalerConfig
    ) -> "Snapshot":
        """Return what the cluster shows, without the cloud and what is remembered."""
        return cls(
            now=now,
            config=config,
            state=cluster.state,
            nodes=cluster.nodes.by_name,
            pods=cluster.pods.by_uid,
            pods_on=cluster.pods.by_node,
            groups=cluster.groups,
            budgets=cluster.budgets,
            daemons=cluster.daemons,
        )

    def group(self, name: str) -> GroupConfig | None:
        """Return the configuration of a group, None if it has been removed."""
        return self.config.group(name)

    def price_of(self, offer: OfferKey) -> float:
        """Return what a node of an offer costs an hour now; 0 if the provider does not have the offer."""
        return self.offers[offer].price if offer in self.offers else 0.0

    def slots(self, states: Collection[str] = ()) -> Slots:
        """Yield the slots of all orders that are in one of these states; without states all slots."""
        return slots(self.orders, states)

    def coming(self) -> Slots:
        """Yield the slots whose nodes are on their way."""
        return slots(self.orders, COMING)

    def instances_by_provider_id(self) -> dict[str, Instance]:
        """Return all instances by their provider ids, for those who look up many."""
        return {
            instance.provider_id: instance
            for instance in self.instances.values()
            if instance.provider_id
        }

    def node_of(self, instance: Instance) -> Node | None:
        """Return the node of a machine, None if it has not joined or is gone."""
        wanted = instance.provider_id
        if not wanted:
            # Not known yet. Nodes of other origin may have none either.
            return None
        return next((node for node in self.nodes.values() if node.spec.provider_id == wanted), None)

    def own_nodes(self) -> list[Node]:
        """Return the nodes that were bought, by name. A node is this autoscaler's by its label."""
        own = (node for node in self.nodes.values() if autoscaling.ORDER in node.metadata.labels)
        return sorted(own, key=lambda node: node.metadata.name)

    def planned_pods(self, node: str) -> list[ElasticPod]:
        """Return the pending pods that are planned for a node."""
        return [pod for *_, slot in self.slots() if slot.node == node for pod in self.waiting(slot)]

    def waiting(self, slot: autoscaling.Slot) -> list[ElasticPod]:
        """Return the pods planned for a slot that exist and have no node yet."""
        return [
            pod for uid in slot.pods if (pod := self.pods.get(uid)) is not None and pod.is_pending
        ]


def offer_of(record: autoscaling.OrderRecord) -> OfferKey:
    """Return the offer of an order."""
    return OfferKey(record.group, record.type, record.zone, record.capacity)


def planned_cards(slot: autoscaling.Slot) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the UIDs of a slot's pods with the indices of their cards; none where they are not known."""
    missing = len(slot.pods) - len(slot.cards)
    return zip(slot.pods, (*slot.cards, *((),) * missing), strict=False)


def slots(
    orders: Mapping[str, autoscaling.OrderRecord],
    states: Collection[str] = (),
) -> Slots:
    """Yield the slots that are in one of these states; without states all slots."""
    for name, record in orders.items():
        for number, slot in enumerate(record.slots):
            if not states or slot.state in states:
                yield name, number, record, slot
