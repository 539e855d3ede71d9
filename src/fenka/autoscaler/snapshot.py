"""What one pass of the autoscaler knows. Each decider is a pure function of it.

The deciders are called in this order: reclaim, orders' lifecycle, planning, scale-in. Each gets a new one.
It refers to live collections, so it is valid until the decider returns: deciders do not await.

Kubernetes' objects with the fields that only the autoscaler reads.

Shapes: what a node of an instance type will be, before one exists.

Clouds round memory up: 16384 MiB for a T4 whose driver reports 15079. By the cloud's number a pod of 15 units
would make the planner buy nodes that never fit it. So a shape comes from the first source that is there: a
node of this type that was seen, the configuration, the drivers' own numbers, the cloud's numbers less 8 %.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec

from fenka.cloud.config import AutoscalerConfig, GroupConfig
from fenka.cloud.port import Instance, Offer, OfferKey, ReclaimNotice
from fenka.cluster import autoscaling, objects
from fenka.cluster.compact import MAX_RESOURCES, kept_annotations, kept_labels, limit_pod
from fenka.cluster.pod_groups import PodGroup
from fenka.cluster.pod_preemption import PodDisruptionBudget
from fenka.cluster.state import ClusterState
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Taint
from fenka.core.nodes.case import CaseRequest, Group, NewCard
from fenka.core.nodes.problem import ineligible
from fenka.core.request import MAX_HOST
from fenka.core.units import MIB
from fenka.dialects.base import InvalidRecord, parse_quantity
from fenka.hardware.card_spec import MODELS

DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
_READ_ANNOTATIONS = frozenset(
    (autoscaling.PLANNED, autoscaling.INTERRUPTIBLE, DO_NOT_DISRUPT, SAFE_TO_EVICT, objects.MIRROR)
)
DAEMON_SETS_PATH = "/apis/apps/v1/daemonsets"


class ElasticPort(objects.Object):
    """A port of a container."""

    host_port: int | None = None


class ElasticContainer(objects.Container):
    """A container with its ports."""

    ports: tuple[ElasticPort, ...] = ()


class Present(objects.Object):
    """Something of which only the presence matters."""


class PodTerms(objects.Object):
    """Affinity or anti-affinity to pods."""

    required_during_scheduling_ignored_during_execution: tuple[Present, ...] = ()


class ElasticAffinity(objects.Affinity):
    """All affinity of a pod."""

    pod_affinity: PodTerms | None = None
    pod_anti_affinity: PodTerms | None = None


class TopologySpread(objects.Object):
    """A rule that spreads pods over nodes or zones."""

    when_unsatisfiable: str = ""


class ElasticVolume(objects.Object):
    """A volume of a pod. host_path, empty_dir: None if it is of another kind."""

    name: str = ""
    host_path: dict[str, Any] | None = None
    empty_dir: dict[str, Any] | None = None


class ElasticPodSpec(objects.PodSpec):
    """A pod's spec with everything that restricts where it may run, or whether it may be moved."""

    affinity: ElasticAffinity | None = None
    containers: tuple[ElasticContainer, ...] = ()
    init_containers: tuple[ElasticContainer, ...] = ()
    overhead: Mapping[str, str | int] = {}
    topology_spread_constraints: tuple[TopologySpread, ...] = ()
    resource_claims: tuple[Present, ...] = ()
    volumes: tuple[ElasticVolume, ...] = ()


def _limit_elastic_spec(spec: ElasticPodSpec) -> None:
    """Keep of lists of any length only whether they have what is asked for."""
    for container in (*spec.containers, *spec.init_containers):
        container.image = ""
        container.ports = tuple(port for port in container.ports if port.host_port)[:1]
    if spec.affinity is not None:
        for terms in (spec.affinity.pod_affinity, spec.affinity.pod_anti_affinity):
            if terms is not None:
                required = terms.required_during_scheduling_ignored_during_execution[:1]
                terms.required_during_scheduling_ignored_during_execution = required
    spread = spec.topology_spread_constraints
    spec.topology_spread_constraints = tuple(
        rule for rule in spread if rule.when_unsatisfiable == "DoNotSchedule"
    )[:1]
    spec.resource_claims = spec.resource_claims[:1]
    local = any(
        volume.host_path is not None or volume.empty_dir is not None for volume in spec.volumes
    )
    spec.volumes = (ElasticVolume(empty_dir={}),) if local else ()
    if len(spec.overhead) > MAX_RESOURCES:
        spec.overhead = {}


class ElasticPodStatus(objects.PodStatus):
    """A pod's status. nominated_node_name: where preemption makes room for it."""

    nominated_node_name: str = ""


class ElasticPod(objects.Pod):
    """A pod as the autoscaler keeps it."""

    spec: ElasticPodSpec = msgspec.field(default_factory=ElasticPodSpec)
    status: ElasticPodStatus = msgspec.field(default_factory=ElasticPodStatus)

    def __post_init__(self) -> None:
        _limit_elastic_spec(self.spec)
        limit_pod(self, only_cards=False)
        meta = self.metadata
        meta.labels = kept_labels(meta.labels, for_budgets=True)
        meta.annotations = kept_annotations(meta.annotations, _READ_ANNOTATIONS)

    @property
    def of_daemon_set(self) -> bool:
        """Return whether a DaemonSet keeps it on its node."""
        return any(owner.kind == "DaemonSet" for owner in self.metadata.owner_references)

    @property
    def mirrors_file(self) -> bool:
        """Return whether the kubelet runs it from a file, so that nothing else can end it."""
        return objects.MIRROR in self.metadata.annotations

    def host_amounts(self) -> dict[str, int]:
        """Return what kube-scheduler counts of it: `cpu` in thousandths, `memory` in MiB, other names whole.

        Init containers run before the others, one after the other, except for sidecars.
        """
        return dict(_amounts(msgspec.json.encode(_host(self))))


class _Host(objects.Object):
    containers: tuple[ElasticContainer, ...]
    init_containers: tuple[ElasticContainer, ...]
    overhead: Mapping[str, str | int]


def _host(pod: ElasticPod) -> _Host:
    spec = pod.spec
    return _Host(
        containers=spec.containers, init_containers=spec.init_containers, overhead=spec.overhead
    )


@lru_cache(maxsize=4096)
def _amounts(encoded: bytes) -> tuple[tuple[str, int], ...]:
    """Return the amounts of equal pods, computed once."""
    host = msgspec.json.decode(encoded, type=_Host)
    running: dict[str, int] = {}
    for container in host.containers:
        _add(running, container)
    peak, sidecars = dict[str, int](), dict[str, int]()
    for container in host.init_containers:
        at_once = dict(sidecars)
        _add(at_once, container)
        if container.restart_policy == "Always":
            _add(running, container)
            sidecars = at_once
        for name, amount in at_once.items():
            peak[name] = max(peak.get(name, 0), amount)
    total = {name: max(running.get(name, 0), peak.get(name, 0)) for name in {*running, *peak}}
    for name, quantity in host.overhead.items():
        total[name] = total.get(name, 0) + host_amount(name, quantity)
    return tuple(sorted((name, amount) for name, amount in total.items() if amount))


def _add(sums: dict[str, int], container: ElasticContainer) -> None:
    # Without a request the limit is the request.
    resources = {**container.resources.limits, **container.resources.requests}
    for name, quantity in resources.items():
        sums[name] = sums.get(name, 0) + host_amount(name, quantity)


def host_amount(name: str, quantity: str | int) -> int:
    """Return an amount: CPU in thousandths of a core, memory in MiB, rounded up; 0 if it cannot be read."""
    try:
        if name == "cpu":
            return bounded(_milli(quantity))
        amount = parse_quantity(quantity)
    except InvalidRecord:
        return 0
    return bounded(-(-amount // MIB) if name in ("memory", "ephemeral-storage") else amount)


def bounded(amount: int) -> int:
    """Return the amount within what a case may have: one pod or node must not make a case invalid."""
    return min(max(amount, 0), MAX_HOST)


def _milli(quantity: str | int) -> int:
    text = str(quantity).strip()
    if text.endswith("m"):
        return parse_quantity(text[:-1])
    # A suffix or exponent is never used for CPU, but allowed; decimals are.
    whole, dot, decimals = text.partition(".")
    if dot and decimals.isdecimal() and (whole.isdecimal() or not whole):
        return int(f"{whole or 0}{decimals[:3]:0<3}") + bool(decimals[3:].strip("0"))
    return parse_quantity(text) * 1000


def allocatable(node: objects.Node) -> Iterator[tuple[str, int]]:
    """Yield what pods may request of a node: CPU in thousandths, memory in MiB rounded down, others whole."""
    for name, quantity in node.status.allocatable.items():
        if name == "memory":
            try:
                yield name, bounded(parse_quantity(quantity) // MIB)
            except InvalidRecord:
                yield name, 0
        else:
            yield name, host_amount(name, quantity)


class ElasticTemplate(objects.Object):
    """The pods of a DaemonSet."""

    metadata: objects.ObjectMeta = msgspec.field(default_factory=objects.ObjectMeta)
    spec: ElasticPodSpec = msgspec.field(default_factory=ElasticPodSpec)


class DaemonSetSpec(objects.Object):
    """The spec of a DaemonSet."""

    template: ElasticTemplate = msgspec.field(default_factory=ElasticTemplate)


class DaemonSet(objects.Object):
    """A DaemonSet, whose pods every new node receives."""

    metadata: objects.ObjectMeta = msgspec.field(default_factory=objects.ObjectMeta)
    spec: DaemonSetSpec = msgspec.field(default_factory=DaemonSetSpec)

    def __post_init__(self) -> None:
        objects.drop_notes(self.metadata)
        template = self.spec.template
        # Tenants may write DaemonSets, too. The limits are those of the pod that is made of it.
        objects.drop_notes(template.metadata)
        ElasticPod(spec=template.spec)


CLOUD_MARGIN = 0.08
"""What a cloud's number is lowered by: firmware, the driver and the kubelet keep a part."""

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
    smaller = min(one, other, key=lambda each: [card.memory_mib for card in each.cards])
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


def without_daemons(group: Group, daemons: Iterable[CaseRequest]) -> Group:
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


def _has_room(group: Group, daemon: CaseRequest) -> bool:
    """Return whether the DaemonSet's pod can start there. One that cannot takes nothing from others."""
    return (
        daemon.cpu_milli <= group.cpu_milli
        and daemon.memory_mib <= group.memory_mib
        and group.pods > 0
        and all(it <= group.resources.get(name, 0) for name, it in daemon.resources.items())
    )


def _card(cloud: autoscaling.CloudType) -> NewCard:
    """Return the card as its driver reports it, where that is known."""
    words = set(re.findall(r"[a-z0-9]+", cloud.model.lower()))
    for model in MODELS.values():
        same_name = model.key.lower().split("-")[0] in words or model.name == cloud.model
        if same_name and (1 - SAME_CARD) * cloud.card_mib <= model.memory_mib <= cloud.card_mib:
            return NewCard(model=model.name, memory_mib=model.memory_mib)
    return NewCard(model=cloud.model, memory_mib=_lowered(cloud.card_mib))


def _lowered(amount: int) -> int:
    return int(amount * (1 - CLOUD_MARGIN))


COMING: frozenset[autoscaling.OrderState] = frozenset({"written", "asked", "known", "joined"})
"""States of slots whose nodes do not offer their cards yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
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
        unhelpful: offers that do not help classes of pods, as `plan_case.class_key` names them.
        status: what was published last, so that times survive a change of the leader.
        evicted: UIDs of pods that leave nodes which are taken back, and whose successors do not exist yet.
        schedulers: the schedulerNames that are served, empty for all.
        cloud_problem: why the cloud could not be read the last time, empty if it could.
    """

    now: float
    config: AutoscalerConfig
    state: ClusterState
    nodes: Mapping[str, objects.Node] = field(default_factory=dict)
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

    def group(self, name: str) -> GroupConfig | None:
        """Return the configuration of a group, None if it has been removed."""
        return next((group for group in self.config.groups if group.name == name), None)

    def instance_of(self, node: objects.Node) -> Instance | None:
        """Return the machine that a node is, None if it is none of this cluster's tag."""
        wanted = node.spec.provider_id
        if not wanted:
            return None
        return next(
            (instance for instance in self.instances.values() if instance.provider_id == wanted),
            None,
        )

    def instances_by_provider_id(self) -> dict[str, Instance]:
        """Return all instances by their provider ids, for those who look up many."""
        return {
            instance.provider_id: instance
            for instance in self.instances.values()
            if instance.provider_id
        }

    def node_of(self, instance: Instance) -> objects.Node | None:
        """Return the node of a machine, None if it has not joined or is gone."""
        wanted = instance.provider_id
        if not wanted:
            # Not known yet. Nodes of other origin may have none either.
            return None
        return next((node for node in self.nodes.values() if node.spec.provider_id == wanted), None)

    def own_nodes(self) -> list[objects.Node]:
        """Return the nodes that were bought, by name. A node is this autoscaler's by its label."""
        own = (node for node in self.nodes.values() if autoscaling.ORDER in node.metadata.labels)
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

    def waiting(self, slot: autoscaling.Slot) -> list[ElasticPod]:
        """Return the pods planned for a slot that exist and have no node yet."""
        return [
            pod
            for uid in slot.pods
            if (pod := self.pods.get(uid)) is not None
            and not pod.spec.node_name
            and not pod.finished
            and pod.metadata.deletion_timestamp is None
        ]


def offer_of(record: autoscaling.OrderRecord) -> OfferKey:
    """Return the offer of an order."""
    return OfferKey(record.group, record.type, record.zone, record.capacity)


def coming(
    orders: Mapping[str, autoscaling.OrderRecord],
) -> Iterable[tuple[str, int, autoscaling.OrderRecord, autoscaling.Slot]]:
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
