"""Decodes JSON records in annotations for dialects: placements, cards, and a container's part of them.

They are not trusted: users who may annotate an object can write one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, TypeVar

import msgspec
from msgspec.json import Decoder

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Placement, Request, Slice
from fenka.dialects import base

VISIBLE = "NVIDIA_VISIBLE_DEVICES"


def card_at(node: Node, index: int) -> Card:
    """Return the card of a pod's record. Raises InvalidRecord if its node does not have it."""
    for card in node.cards:
        if card.index == index and card.parent is None:
            return card
    raise base.InvalidRecord(
        f"the pod's card {index} is not one of the {len(node.cards)} of its node"
    )


def placement_on(node: Node, request: Request, indexes: Sequence[int]) -> Placement:
    """Return the request placed on these cards. Raises InvalidRecord if the node does not have them."""
    slices = []
    for index in sorted(set(indexes)):
        # A foreign record counts as it is, even on a card that is too small.
        slices.append(nominal_slice(request, node, card_at(node, index)))
    if len(slices) != request.cards or len(slices) != len(indexes):
        raise base.InvalidRecord(
            f"the pod's record names the cards {','.join(map(str, indexes)) or 'none'}, "
            f"it asks for {request.cards} different ones"
        )
    return Placement(node.name, tuple(slices), whole=request.whole)


def fallback_placement(
    shared: base.SharedNode, parts: Iterable[base.SliceRequest]
) -> tuple[Placement, ...]:
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
    parts: Sequence[base.SliceRequest], placements: Sequence[Placement], container: str
) -> tuple[base.SliceRequest, Placement] | None:
    """Return the slice request and placement of a container; None if it has none."""
    pairs = zip(parts, placements, strict=True)
    return next((pair for pair in pairs if container in pair[0].containers), None)


def whole_slices(
    parse: Callable[[base.PodRequest], tuple[base.SliceRequest, ...]],
) -> Callable[[base.PodRequest, base.SharedNode, Sequence[Placement], str], tuple[Slice, ...]]:
    """Return `container_slices` of a dialect whose containers each use all of their slice request.

    A weight stands in place of the compute, none of which is reserved.
    """

    def container_slices(
        pod: base.PodRequest, _: base.SharedNode, placements: Sequence[Placement], container: str
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
    _pod: base.PodRequest, _shared: base.SharedNode, slices: Sequence[Slice], _container: str
) -> dict[str, str]:
    """Return `environment` of a dialect whose containers only need to know their cards."""
    return {VISIBLE: ",".join(base.driver_uuid(piece.uuid) for piece in slices)}


Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number that no record exceeds."""
CardIndex = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]

MAX_REASON = 200
"""Characters of an error."""

T = TypeVar("T")


def decode(text: str, record: Decoder[T], name: str) -> T:
    """Return the record.

    Args:
        text: JSON.
        record: decodes its type.
        name: what the error calls it, such as the annotation.

    Raises:
        InvalidRecord: if the text is anything else.
    """
    try:
        return record.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as why:
        # The reason quotes field names, which may be of any length.
        raise base.InvalidRecord(f"{name} is not understood: {str(why)[:MAX_REASON]}") from None


def encode(record: object) -> str:
    """Return the record as JSON without spaces."""
    return msgspec.json.encode(record).decode()


def encode_card_uuids(parts: Iterable[Iterable[Slice]]) -> str:
    """Return `fenka.io/cards` of a pod: UUIDs by index, by which an exchanged card is noticed."""
    return encode(
        {piece.card: base.driver_uuid(piece.uuid) for slices in parts for piece in slices}
    )


_CARD_UUIDS = Decoder(dict[CardIndex, str])


def decode_card_uuids(annotations: Mapping[str, str]) -> dict[int, str]:
    """Return the UUIDs of a pod's cards by index; empty if there is no record. Raises InvalidRecord."""
    text = annotations.get(base.CARDS)
    return {} if text is None else decode(text, _CARD_UUIDS, f"annotation {base.CARDS} of the pod")


def check_cards(uuids: Mapping[int, str], slices: Iterable[Slice]) -> None:
    """Raise InvalidRecord if a card of the pod is not the one that the pod was given."""
    for piece in slices:
        uuid = base.driver_uuid(piece.uuid)
        recorded = uuids.get(piece.card, uuid)
        if uuid and recorded != uuid:
            raise base.InvalidRecord(
                f"the pod's card {piece.card} was {recorded[:60]!r} and is now {uuid!r}"
            )


def placements_on(
    pod: base.PodRequest,
    shared: base.SharedNode,
    parts: Iterable[base.SliceRequest],
    recorded_cards: Callable[[base.SliceRequest], Sequence[int]],
) -> tuple[Placement, ...]:
    """Return each part of the pod on its recorded cards.

    Raises:
        InvalidRecord: if the node does not have them, or a card has been exchanged since.
    """
    placements = tuple(
        placement_on(shared.node, part.request, recorded_cards(part)) for part in parts
    )
    uuids = decode_card_uuids(pod.annotations)
    check_cards(uuids, (piece for placement in placements for piece in placement.slices))
    return placements
