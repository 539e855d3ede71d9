"""A dialect that nobody has: a module like this and a row in `registry.py` are all that a new one needs."""

from collections.abc import Sequence

from msgspec.json import Decoder

from fenka.core.request import Placement, Request
from fenka.dialects import card_records
from fenka.dialects.base import (
    CARDS,
    ContainerRequest,
    NodeResource,
    PodRequest,
    SharedNode,
    SliceRequest,
)
from fenka.dialects.card_records import visible_devices, whole_slices
from fenka.dialects.parsing import memory_request, per_container

NAME = "made-up"
GB = "example.com/gpu-gb"
"""Extended resource: units of 1000 MiB."""
RESOURCES: tuple[str, ...] = (GB,)
RECORD = "example.com/cards"
OPTIONS: tuple[str, ...] = ()
PLACEMENT: tuple[str, ...] = (RECORD, CARDS)
RECORDS = PLACEMENT
LEASED = GB
ASSIGNED = "example.com/assigned"
_CARDS = Decoder(dict[str, card_records.CardIndex])
NODE_RESOURCES: tuple[NodeResource, ...] = (
    NodeResource(GB, "made-up", lambda _, card: card.memory_mib // 1000, lambda mode: mode.memory),
)


def matches(pod: PodRequest) -> bool:
    """Return whether the pod requests memory by this name."""
    return bool(pod.requested_resources(RESOURCES))


def parse(pod: PodRequest) -> tuple[SliceRequest, ...]:
    """Return a slice for each container."""
    return per_container(pod, _request)


def _request(container: ContainerRequest) -> Request | None:
    amount = container.amount(GB)
    return memory_request(amount, 1000, 0) if amount else None


def encode(
    pod: PodRequest,
    share: SharedNode,
    placements: Sequence[Placement],
    now_ns: int,
) -> dict[str, str]:
    """Return the card of each container."""
    slices = [placement.slices[0] for placement in placements]
    cards = {part.containers[0]: piece.card for part, piece in zip(parse(pod), slices, strict=True)}
    return {RECORD: card_records.encode(cards), CARDS: card_records.encode_card_uuids([slices])}


def decode(
    pod: PodRequest, parts: Sequence[SliceRequest], share: SharedNode
) -> tuple[Placement, ...] | None:
    """Return the placements on the recorded cards."""
    if RECORD not in pod.annotations:
        return None
    cards = card_records.decode(pod.annotations[RECORD], _CARDS, RECORD)
    recorded = [part for part in parts if cards.keys() >= set(part.containers)]
    return card_records.placements_on(
        pod, share, recorded, lambda part: [cards[name] for name in part.containers]
    )


container_slices = whole_slices(parse)
environment = visible_devices
