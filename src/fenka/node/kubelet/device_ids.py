"""Device lists: which IDs of a resource the kubelet may allocate.

IDs are interchangeable and name no card. An unavailable card removes as many free IDs as it has units.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fenka.core.inventory import Card, DeviceId
from fenka.core.request import Slice
from fenka.dialects.base import split_instance
from fenka.node.kubelet.client import unit_id


@dataclass(frozen=True, slots=True)
class AllocatedIds:
    """A container's IDs and the slices that they stand for; no slices until the lease is bound."""

    ids: tuple[str, ...]
    slices: tuple[Slice, ...] = ()


def device_list(
    cards: Sequence[Card],
    units: Mapping[DeviceId, int],
    allocated: Sequence[AllocatedIds],
    unavailable: Collection[str],
    unhealthy_instances: Collection[str] = (),
) -> list[tuple[str, bool]]:
    """Return all IDs of a resource, each with whether it is healthy.

    Of an unhealthy card the allocated IDs are unhealthy, and as many free IDs as it has other units. Of a
    cordoned or unavailable card only the free IDs are.

    Args:
        cards: The node's cards.
        units: Units of the resource per card, by UUID.
        allocated: What containers hold.
        unavailable: UUIDs of cards that give no slices now.
        unhealthy_instances: MIG instances by their place.
    """
    ids = [unit_id(number) for number in range(sum(units[card.uuid] for card in cards))]
    in_use = {device for container in allocated for device in container.ids}
    free = [device for device in ids if device not in in_use]
    unhealthy = {id_ for place in unhealthy_instances for id_ in _ids_on(place, allocated)}
    reserved = 0
    for card in cards:
        if card.healthy and not card.cordoned and card.uuid not in unavailable:
            continue
        on_card = _ids_on(card.uuid, allocated)
        reserved += max(units[card.uuid] - len(on_card), 0)
        if not card.healthy:
            unhealthy |= on_card
    unhealthy.update(free[max(len(free) - reserved, 0) :])
    return [(device, device not in unhealthy) for device in ids]


def _ids_on(uuid: str, allocated: Iterable[AllocatedIds]) -> set[str]:
    """Return the allocated IDs of a card, or of an instance by its place.

    Each slice of a container has its part of the IDs, in order.
    """
    ids: set[str] = set()
    for container in allocated:
        part = len(container.ids) // max(len(container.slices), 1)
        for number, piece in enumerate(container.slices):
            place = split_instance(piece.uuid)
            if uuid in (piece.uuid, place[0] if place else ""):
                ids.update(container.ids[number * part : (number + 1) * part])
    return ids


def whole(cards: Sequence[Card], allocated: Collection[str]) -> list[tuple[str, bool]]:
    """Return all cards by UUID, each with whether it is healthy.

    Cordoned cards are unhealthy unless they are allocated already.
    """
    return [
        (card.uuid, card.healthy and (card.uuid in allocated or not card.cordoned))
        for card in cards
    ]
