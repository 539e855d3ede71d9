"""Changes of nodes and pods when ordered nodes come, and facts that are learnt of these nodes. Pure.

A plan reaches the scheduler by annotations: each planned pod names its order and slot, and so does the node.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from fenka.autoscaler.demand import Inexpressible, affinity_rules, case_request, class_key
from fenka.autoscaler.new_nodes import shape_for
from fenka.autoscaler.snapshot import (
    LIVE,
    Shape,
    Snapshot,
    UnknownShape,
    common,
    offer_of,
)
from fenka.autoscaler.supply import has_whole_cards, protected_until
from fenka.autoscaler.watch import ElasticPod, allocatable
from fenka.cloud.config import GroupConfig
from fenka.cloud.port import Instance, OfferKey
from fenka.cluster import autoscaling
from fenka.cluster.objects import Node
from fenka.cluster.pending_queue import is_open
from fenka.cluster.pod_groups import group_key
from fenka.core.nodes.case import Capacity, CaseRequest, NewCard
from fenka.core.nodes.problem import ZONE_LABEL
from fenka.dialects.base import NVIDIA_GPU, InvalidRecord
from fenka.dialects.registry import WITH_HAMI, resource_names


def is_partial_gang(snapshot: Snapshot, slot: autoscaling.Slot) -> bool:
    """Return whether a slot's node has waiting members of gangs alone, and their rest is not on its way."""
    if slot.state != "offering" or not slot.pods:
        return False
    waiting = snapshot.waiting(slot)
    gangs = {group_key(pod) for pod in waiting}
    if not waiting or None in gangs or _is_used(snapshot, slot.node):
        return False
    arriving = {
        group_key(pod) for *_, other in snapshot.coming() for pod in snapshot.waiting(other)
    }
    return gangs.isdisjoint(arriving)


def _is_used(snapshot: Snapshot, node: str) -> bool:
    """Return whether pods are there that would have to be moved."""
    return any(
        not (pod.of_daemon_set or pod.mirrors_file or pod.finished)
        for pod in snapshot.pods_on.get(node, ())
    )


def waiting_gangs(snapshot: Snapshot, offered: frozenset[str]) -> frozenset[str]:
    """Return the gangs of which members have no node yet, so that none of their pods may start.

    offered: UIDs of pods whose nodes offer their cards.
    """
    gangs = (
        group_key(pod) for uid, pod in snapshot.pods.items() if is_open(pod) and uid not in offered
    )
    return frozenset(gang for gang in gangs if gang is not None)


V = TypeVar("V", str, str | None)

OF_ONE_NODE = ("kubernetes.io/hostname", ZONE_LABEL, "topology.kubernetes.io/region")
"""Labels that another node of the type may not have."""
_OWN_PREFIXES = ("fenka.io/", "topology.", "failure-domain.")

_PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "fenka.io/")

FENKA_RESOURCES = resource_names(WITH_HAMI)


@dataclass(frozen=True, slots=True)
class NodeChange:
    """Labels and annotations that a node lacks, None for one to remove. It is one patch."""

    node: Node
    labels: Mapping[str, str]
    annotations: Mapping[str, str | None]


def node_changes(snapshot: Snapshot) -> list[NodeChange]:
    """Return what the nodes of orders lack."""
    changes, marked = list[NodeChange](), set[str]()
    for name, number, record, slot in snapshot.slots(LIVE):
        node = snapshot.nodes.get(slot.node)
        if node is None:
            continue
        config = snapshot.group(record.group)
        marked.add(slot.node)
        labels = {
            **(config.labels if config is not None else {}),
            autoscaling.ORDER: name,
            autoscaling.GROUP: record.group,
            autoscaling.CAPACITY: record.capacity,
        }
        pin = snapshot.config.scale_out.pin
        annotations = {
            autoscaling.SLOT: str(number),
            # The scheduler counts from when it sees the cards, and one that starts later from then.
            autoscaling.PIN: f"{pin:g}" if snapshot.now < pinned_until(snapshot, slot) else None,
            autoscaling.PLANNED_PODS: autoscaling.encode_planned_pods(slot.pods, slot.cards),
            **_spot_annotations(config, record.capacity, snapshot.instances.get(slot.instance)),
            **autoscaling.KEPT_FROM_OTHERS,
        }
        changes.append(_change(node, labels, annotations))
    changes += _changes_of_spot_nodes(snapshot, marked)
    return [change for change in changes if change.labels or change.annotations]


def _changes_of_spot_nodes(snapshot: Snapshot, marked: Collection[str]) -> Iterable[NodeChange]:
    """Yield what spot nodes lack whose order is over: the configuration may have changed since."""
    nodes = [
        node
        for name, node in snapshot.nodes.items()
        if node.metadata.labels.get(autoscaling.CAPACITY) == "spot" and name not in marked
    ]
    machines = snapshot.instances_by_provider_id() if nodes else {}
    for node in nodes:
        config = snapshot.group(node.metadata.labels.get(autoscaling.GROUP, ""))
        instance = machines.get(node.spec.provider_id)
        yield _change(node, {}, _spot_annotations(config, "spot", instance))


def _change(
    node: Node, labels: Mapping[str, str], annotations: Mapping[str, str | None]
) -> NodeChange:
    return NodeChange(
        node,
        _missing(labels, node.metadata.labels),
        _missing(annotations, node.metadata.annotations),
    )


def _spot_annotations(
    config: GroupConfig | None, capacity: Capacity, instance: Instance | None
) -> dict[str, str | None]:
    """Return the annotations that say which pods a spot node admits. Unknown ones stay as they are."""
    if config is None or capacity != "spot":
        return {}
    annotations: dict[str, str | None] = {autoscaling.SPOT_ADMIT: config.spot.admit}
    if instance is not None:
        until = protected_until(config, instance)
        annotations[autoscaling.PROTECTED_UNTIL] = (
            None if until is None else autoscaling.encode_time(until)
        )
    return annotations


def pinned_until(snapshot: Snapshot, slot: autoscaling.Slot) -> float:
    """Return until when a slot's node admits its planned pods only."""
    since = snapshot.now if slot.offering_at is None else slot.offering_at
    return since + snapshot.config.scale_out.pin


def _missing(wanted: Mapping[str, V], present: Mapping[str, str]) -> dict[str, V]:
    return {key: value for key, value in wanted.items() if present.get(key) != value}


def planned_annotations(snapshot: Snapshot) -> list[tuple[ElasticPod, str]]:
    """Return the pods that do not say yet which slot they are planned for, with the annotation."""
    changes = []
    for name, number, _, slot in snapshot.slots(LIVE):
        text = msgspec.json.encode(autoscaling.Planned(name, number)).decode()
        changes += [
            (pod, text)
            for pod in snapshot.waiting(slot)
            if pod.metadata.annotations.get(autoscaling.PLANNED) != text
        ]
    return changes


def new_shapes(snapshot: Snapshot) -> dict[str, Shape]:
    """Return by type what nodes that offer their cards are, where that is not known yet."""
    found: dict[str, Shape] = {}
    for _, _, record, slot in snapshot.slots(LIVE):
        node = snapshot.nodes.get(slot.node)
        if slot.state == "offering" and node is not None and node.ready:
            shape = shape_of_node(snapshot, node, _expected_cards(snapshot, record))
            if shape is not None:
                known = found.get(record.type)
                found[record.type] = common(known, shape) if known is not None else shape
    return {kind: shape for kind, shape in found.items() if snapshot.shapes.get(kind) != shape}


def _expected_cards(snapshot: Snapshot, record: autoscaling.OrderRecord) -> tuple[NewCard, ...]:
    """Return the cards of an order's type, as far as they are known."""
    config = snapshot.group(record.group)
    try:
        return shape_for(snapshot, config, record.type).cards if config is not None else ()
    except UnknownShape:
        return ()


def shape_of_node(
    snapshot: Snapshot, node: Node, expected: tuple[NewCard, ...] = ()
) -> Shape | None:
    """Return what a node is; None if some of its cards are not usable now.

    expected: its cards, where the node itself does not say what they are: of whole cards it shows the number.
    """
    shared = snapshot.state.shared_node(node.metadata.name)
    physical = tuple(shared.physical_cards) if shared is not None and shared.shares_cards else ()
    if any(not card.healthy for card in physical):
        return None
    amounts = dict(allocatable(node))
    cards = tuple(NewCard(model=card.model, memory_mib=card.memory_mib) for card in physical)
    if not cards and expected:
        whole = amounts.get(NVIDIA_GPU, 0)
        if not has_whole_cards(node) or 0 < whole < len(expected):
            return None
        cards = expected if whole else ()
    return Shape(
        cpu_milli=amounts.pop("cpu", 0),
        memory_mib=amounts.pop("memory", 0),
        pods=amounts.pop("pods", 110),
        resources={
            name: amount
            for name, amount in amounts.items()
            if name not in FENKA_RESOURCES and name != "ephemeral-storage" and amount
        },
        labels={
            key: value
            for key, value in node.metadata.labels.items()
            if key not in OF_ONE_NODE and not key.startswith(_OWN_PREFIXES)
        },
        taints=tuple(
            taint for taint in node.spec.taints if not taint.key.startswith(_PASSING_TAINTS)
        ),
        cards=cards,
    )


@dataclass(frozen=True, slots=True)
class UnhelpfulOffer:
    """A pod that an offer does not help. pod_class: names all pods that are equal to it."""

    offer: OfferKey
    pod: ElasticPod
    pod_class: str


def new_unhelpful_offers(snapshot: Snapshot) -> list[UnhelpfulOffer]:
    """Return pods that an offer does not help, though the plan says so.

    Their node has come and admitted nobody else for as long as it was pinned, and they are still pending. By
    its real shape the plan would buy the same again.
    """
    late = [
        (record, slot)
        for _, _, record, slot in snapshot.slots(LIVE)
        if slot.offering_at is not None and snapshot.now > pinned_until(snapshot, slot)
    ]
    if not late:
        return []
    gangs = waiting_gangs(snapshot, frozenset(uid for _, slot in late for uid in slot.pods))
    found = (
        _unhelpful_offer(snapshot, record, pod)
        for record, slot in late
        for pod in snapshot.waiting(slot)
        if group_key(pod) not in gangs
    )
    return [offer for offer in found if offer is not None]


def _unhelpful_offer(
    snapshot: Snapshot, record: autoscaling.OrderRecord, pod: ElasticPod
) -> UnhelpfulOffer | None:
    """Return what a pod is that is pending still; None if its shape or itself explains that."""
    config, key = snapshot.group(record.group), offer_of(record)
    if config is None or record.type not in snapshot.shapes or pod.unschedulable is None:
        return None
    try:
        request = case_request(pod, snapshot.state.dialects)
    except (Inexpressible, InvalidRecord):
        return None
    if not _fits(shape_for(snapshot, config, record.type), request):
        return None
    name = class_key(request, affinity_rules(pod).affinity)
    return None if name in snapshot.unhelpful.get(key, ()) else UnhelpfulOffer(key, pod, name)


def _fits(shape: Shape, request: CaseRequest) -> bool:
    """Return whether a node of this shape would serve the pod by the plan's rules, as far as cards decide."""
    asked = request.card_request()
    if asked is None or asked.memory is None:
        return True
    sizes = [asked.memory.mib_on(card.memory_mib, 1) for card in shape.cards]
    return sum(size is not None for size in sizes) >= request.cards
