"""What a pod holds of a sharing node, from its own record or from its node's report."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from fenka.cluster.objects import ObjectMeta, Pod
from fenka.core.request import Placement, Slice
from fenka.dialects.base import Dialect, InvalidRecord, SharedNode, SliceRequest, driver_uuid
from fenka.dialects.leases import Lingering
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
        placements = demand.dialect.decode(request, parts, shared)
        if placements is not None:
            reason = None
    except InvalidRecord as error:
        reason = str(error)
    if placements is None:
        placements = fallback_placement(shared, parts)
    return PodAllocation(pod, placements or (Placement(shared.node.name, ()),), reason)


def reported_placements(shared: SharedNode, slices: Sequence[Slice]) -> tuple[Placement, ...]:
    """Return what a node reports of a pod: whole cards apart from slices."""
    name, cards = shared.node.name, {card.uuid: card for card in shared.node.cards}

    def is_whole(piece: Slice) -> bool:
        card = cards[piece.uuid]
        return piece.memory_mib >= card.memory_mib and piece.compute >= card.compute

    present = on_present_cards(shared, Placement(name, tuple(slices))).slices
    whole = tuple(piece for piece in present if is_whole(piece))
    parts = tuple(piece for piece in present if not is_whole(piece))
    placements = [Placement(name, whole, whole=True)] if whole else []
    if parts or not whole:
        placements.append(Placement(name, parts))
    return tuple(placements)


def on_present_cards(shared: SharedNode, placement: Placement) -> Placement:
    """Return the placement without cards that the node no longer has.

    An index stands for a card only if no plugin has named the card, now or when the slice was recorded.
    """
    kept = list[Slice]()
    cards = {card.index: card for card in shared.node.cards}
    for piece in placement.slices:
        card = cards.get(piece.card)
        if card is None:
            continue
        if card.uuid == piece.uuid:
            kept.append(piece)
        elif not (driver_uuid(card.uuid) and driver_uuid(piece.uuid)):
            kept.append(replace(piece, uuid=card.uuid))
    slices = tuple(kept)
    return placement if slices == placement.slices else replace(placement, slices=slices)


def lingering_allocation(shared: SharedNode, uid: str, report: Lingering) -> PodAllocation:
    """Return what a pod still holds that the API server no longer shows."""
    namespace, _, name = report.name.rpartition("/")
    pod = Pod(metadata=ObjectMeta(name=name, namespace=namespace, uid=uid))
    return PodAllocation(pod, reported_placements(shared, report.slices), lingering=True)
