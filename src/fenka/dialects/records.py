"""JSON records in annotations, decoded by msgspec: whoever may annotate an object can write one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec.json import Decoder

from fenka.core.request import Placement, Slice
from fenka.dialects.base import (
    CARDS,
    InvalidRecord,
    PodRequest,
    SharedNode,
    SliceRequest,
    driver_uuid,
)
from fenka.dialects.placements import placement_on

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
        raise InvalidRecord(f"{name} is not understood: {str(why)[:MAX_REASON]}") from None


def encode(record: object) -> str:
    """Return the record as JSON without spaces."""
    return msgspec.json.encode(record).decode()


def encode_card_uuids(parts: Iterable[Iterable[Slice]]) -> str:
    """Return `fenka.io/cards` of a pod: UUIDs by index, by which an exchanged card is noticed."""
    return encode({piece.card: driver_uuid(piece.uuid) for slices in parts for piece in slices})


_CARD_UUIDS = Decoder(dict[CardIndex, str])


def decode_card_uuids(annotations: Mapping[str, str]) -> dict[int, str]:
    """Return the UUIDs of a pod's cards by index; empty if there is no record. Raises InvalidRecord."""
    text = annotations.get(CARDS)
    return {} if text is None else decode(text, _CARD_UUIDS, f"annotation {CARDS} of the pod")


def check_cards(uuids: Mapping[int, str], slices: Iterable[Slice]) -> None:
    """Raise InvalidRecord if a card of the pod is not the one that the pod was given."""
    for piece in slices:
        uuid = driver_uuid(piece.uuid)
        recorded = uuids.get(piece.card, uuid)
        if uuid and recorded != uuid:
            raise InvalidRecord(
                f"the pod's card {piece.card} was {recorded[:60]!r} and is now {uuid!r}"
            )


def placements_on(
    pod: PodRequest,
    shared: SharedNode,
    parts: Iterable[SliceRequest],
    recorded_cards: Callable[[SliceRequest], Sequence[int]],
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
