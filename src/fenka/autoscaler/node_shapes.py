"""Facts that are learnt of nodes when they come: their shapes, and offers that did not help. Pure."""

from dataclasses import dataclass

from fenka.autoscaler.demand import Inexpressible, affinity_rules, case_request, class_key
from fenka.autoscaler.new_nodes import shape_for
from fenka.autoscaler.node_registration import pinned_until, waiting_gangs
from fenka.autoscaler.snapshot import (
    LIVE,
    Shape,
    Snapshot,
    UnknownShape,
    common,
    offer_of,
)
from fenka.autoscaler.supply import has_whole_cards
from fenka.autoscaler.watch import ElasticPod, allocatable
from fenka.cloud.port import OfferKey
from fenka.cluster import autoscaling
from fenka.cluster.objects import Node
from fenka.cluster.pod_groups import group_key
from fenka.core.nodes.case import CaseRequest, NewCard
from fenka.core.nodes.problem import ZONE_LABEL
from fenka.dialects.base import NVIDIA_GPU, InvalidRecord
from fenka.dialects.registry import WITH_HAMI, resource_names


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


OF_ONE_NODE = ("kubernetes.io/hostname", ZONE_LABEL, "topology.kubernetes.io/region")
"""Labels that another node of the type may not have."""


_OWN_PREFIXES = ("fenka.io/", "topology.", "failure-domain.")


_PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "fenka.io/")


FENKA_RESOURCES = resource_names(WITH_HAMI)
