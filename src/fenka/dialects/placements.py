"""What dialects share to read placements: recorded cards as slices, and a container's part of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Placement, Request, Slice
from fenka.dialects.base import InvalidRecord, PodRequest, SharedNode, SliceRequest, driver_uuid

VISIBLE = "NVIDIA_VISIBLE_DEVICES"


def card_at(node: Node, index: int) -> Card:
    """Return the card of a pod's record. Raises InvalidRecord if its node does not have it."""
    for card in node.cards:
        if card.index == index and card.parent is None:
            return card
    raise InvalidRecord(f"the pod's card {index} is not one of the {len(node.cards)} of its node")


def placement_on(node: Node, request: Request, indexes: Sequence[int]) -> Placement:
    """Return the request placed on these cards. Raises InvalidRecord if the node does not have them."""
    slices = []
    for index in sorted(set(indexes)):
        # A foreign record counts as it is, even on a card that is too small.
        slices.append(nominal_slice(request, node, card_at(node, index)))
    if len(slices) != request.cards or len(slices) != len(indexes):
        raise InvalidRecord(
            f"the pod's record names the cards {','.join(map(str, indexes)) or 'none'}, "
            f"it asks for {request.cards} different ones"
        )
    return Placement(node.name, tuple(slices), whole=request.whole)


def fallback_placement(shared: SharedNode, parts: Iterable[SliceRequest]) -> tuple[Placement, ...]:
    """Return what counts for a pod whose cards are unknown: its request, once, on the first that it is for.

    The pod's owner can write its record. Counted on every card, one such pod would block the whole node.
    """
    placements, whole = list[Placement](), set[DeviceId]()
    for part in parts:
        request = part.request
        cards = [
            card
            for card in shared.node.cards
            if request.is_for(card.profile, divided=card.divided) and card.uuid not in whole
        ][: request.cards]
        if request.whole:
            whole.update(card.uuid for card in cards)
        nominal = ((card, nominal_slice(request, shared.node, card)) for card in cards)
        slices = (
            replace(piece, memory_mib=min(piece.memory_mib, card.memory_mib))
            for card, piece in nominal
        )
        placements.append(Placement(shared.node.name, tuple(slices), whole=request.whole))
    return tuple(placements)


def nominal_slice(request: Request, node: Node, card: Card) -> Slice:
    """Return what a request takes of the card, also if the card has less."""
    compute = card.compute if request.whole else request.compute
    return Slice(card.index, card.uuid, nominal_mib(request, node, card), compute)


def nominal_mib(request: Request, node: Node, card: Card) -> int:
    """Return the MiB of the card that a request takes, also if the card has fewer."""
    if request.whole:
        return card.memory_mib
    if request.memory is None:
        return 0
    mib = request.memory.mib_on(card.memory_mib, node.unit_mib)
    return request.memory.nominal_mib(node.unit_mib) if mib is None else mib


def find_container(
    parts: Sequence[SliceRequest], placements: Sequence[Placement], container: str
) -> tuple[SliceRequest, Placement] | None:
    """Return the slice request and placement of a container; None if it has none."""
    pairs = zip(parts, placements, strict=True)
    return next((pair for pair in pairs if container in pair[0].containers), None)


def whole_slices(
    parse: Callable[[PodRequest], tuple[SliceRequest, ...]],
) -> Callable[[PodRequest, SharedNode, Sequence[Placement], str], tuple[Slice, ...]]:
    """Return `container_slices` of a dialect whose containers each use all of their slice request.

    A weight stands in place of the compute, none of which is reserved.
    """

    def container_slices(
        pod: PodRequest, _: SharedNode, placements: Sequence[Placement], container: str
    ) -> tuple[Slice, ...]:
        pair = find_container(parse(pod), placements, container)
        if pair is None:
            return ()
        part, placement = pair
        if not part.weight:
            return placement.slices
        return tuple(replace(piece, compute=part.weight) for piece in placement.slices)

    return container_slices


def visible_devices(
    _pod: PodRequest, _shared: SharedNode, slices: Sequence[Slice], _container: str
) -> dict[str, str]:
    """Return `environment` of a dialect whose containers only need to know their cards."""
    return {VISIBLE: ",".join(driver_uuid(piece.uuid) for piece in slices)}
