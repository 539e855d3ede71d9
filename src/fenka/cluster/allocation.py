"""What a pod holds of a sharing node, from its own record or from its node's report."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import msgspec

from fenka.cluster.objects import ObjectMeta, Pod
from fenka.core.inventory import Card, DeviceId
from fenka.core.mig.geometry import Place
from fenka.core.request import Placement, Slice
from fenka.dialects import pod_records
from fenka.dialects.base import Dialect, InvalidRecord, SharedNode, SliceRequest, driver_uuid
from fenka.dialects.leases import Lingering
from fenka.dialects.mig_records import with_instances
from fenka.dialects.placements import fallback_placement
from fenka.dialects.registry import DIALECTS

_FOREIGN = "no record says on which card the pod is: it was not placed by fenka's scheduler"


class PodAllocation(msgspec.Struct, frozen=True, gc=False):
    """What a pod holds of its node, in at least one placement.

    Attributes:
        error: why the pod's record cannot be read, if its node does not report what it holds.
        lingering: the API server no longer shows the pod, but its node reports that it still holds this.
    """

    pod: Pod
    placements: tuple[Placement, ...]
    error: str | None = None
    lingering: bool = False

    @property
    def node(self) -> str:
        """Return the node of all its placements."""
        return self.placements[0].node

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Return the slices of all its placements. Two of them may be on one card."""
        if len(self.placements) == 1:
            # Nearly all pods of a cluster.
            return self.placements[0].slices
        return tuple(piece for placement in self.placements for piece in placement.slices)


def read_allocation(
    shared: SharedNode, pod: Pod, dialects: tuple[Dialect, ...] = DIALECTS
) -> PodAllocation | None:
    """Return what a pod holds by its own record, at most what it requests; None if it requests nothing."""
    request = pod.request
    demand = pod.demand(dialects, request)
    if not demand.requests_gpu:
        return None
    parts: Sequence[SliceRequest] = ()
    placements: tuple[Placement, ...] | None = None
    reason: str | None = _FOREIGN
    try:
        # A pod whose request cannot be read gets nothing from any node.
        parts = demand.parts
        assert demand.dialect is not None
        placements = pod_records.decode(demand.dialect, request, parts, shared)
        if placements is not None:
            reason = None
    except InvalidRecord as error:
        reason = str(error)
    if placements is None:
        placements = fallback_placement(shared, parts)
    return PodAllocation(pod, placements or (Placement(shared.node.name, ()),), reason)


def reported_placements(shared: SharedNode, slices: Sequence[Slice]) -> tuple[Placement, ...]:
    """Return what a node reports of a pod: whole cards apart from slices."""
    shared = with_instances(shared, (piece.uuid for piece in slices))
    name, cards = shared.node.name, {card.uuid: card for card in shared.node.cards}

    def is_whole(piece: Slice) -> bool:
        card = cards[piece.uuid]
        return piece.memory_mib >= card.memory_mib and piece.compute >= card.compute

    present = on_present_cards(shared, Placement(name, tuple(slices))).slices
    whole = tuple(piece for piece in present if is_whole(piece))
    # Mostly none is whole: then the node's own tuple is kept, and no second one for each pod of a cluster.
    parts = tuple(piece for piece in present if not is_whole(piece)) if whole else present
    placements = [Placement(name, whole, whole=True)] if whole else []
    if parts or not whole:
        placements.append(Placement(name, parts))
    return tuple(placements)


def on_present_cards(shared: SharedNode, placement: Placement) -> Placement:
    """Return the placement without cards that the node no longer has.

    An index stands for a card only if no plugin has named the card, now or when the slice was recorded.
    """
    kept = list[Slice]()
    shared = with_instances(shared, (piece.uuid for piece in placement.slices))
    present = {(card.index, card.uuid) for card in shared.node.cards}
    # Instances have the index of the card that they are on.
    cards = {card.index: card for card in shared.node.cards if card.parent is None}
    for piece in placement.slices:
        card = cards.get(piece.card)
        if (piece.card, piece.uuid) in present:
            kept.append(piece)
        elif card and not (driver_uuid(card.uuid) and driver_uuid(piece.uuid)):
            kept.append(replace(piece, uuid=card.uuid))
    slices = tuple(kept)
    return placement if slices == placement.slices else replace(placement, slices=slices)


def with_held_instances(shared: SharedNode, held: Collection[DeviceId]) -> SharedNode:
    """Return the node with the instances that pods hold, and with those idle ones that may stay beside them.

    held: the devices that pods hold.
    """
    shared = with_instances(shared, sorted(held))
    node, geometries = shared.node, shared.division.geometries
    layouts: dict[DeviceId, list[Place]] = {}
    instances = list[Card]()
    parts = (card for card in node.cards if card.parent is not None)
    for card in sorted(parts, key=lambda card: (card.uuid not in held, card.rank)):
        assert card.parent is not None
        geometry, layout = geometries[card.parent], layouts.setdefault(card.parent, [])
        place = Place(geometry.by_name[card.profile], card.start)
        if card.uuid in held or not geometry.conflict(layout, place):
            layout.append(place)
            instances.append(card)
    instances.sort(key=lambda card: card.rank)
    return replace(shared, node=replace(node, cards=(*shared.physical_cards, *instances)))


def lingering_allocation(shared: SharedNode, uid: str, report: Lingering) -> PodAllocation:
    """Return what a pod still holds that the API server no longer shows."""
    namespace, _, name = report.name.rpartition("/")
    pod = Pod(metadata=ObjectMeta(name=name, namespace=namespace, uid=uid))
    return PodAllocation(pod, reported_placements(shared, report.slices), lingering=True)
