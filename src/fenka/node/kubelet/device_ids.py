"""Which ids the kubelet may give away. Anonymous device_list: a card that is away takes its worth along."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.node.kubelet.client import unit_id


@dataclass(frozen=True, slots=True)
class Held:
    """A container's ids and what they stand for; nothing is known of slices until the lease is bound."""

    ids: tuple[str, ...]
    slices: tuple[Slice, ...] = ()


def device_list(
    cards: Sequence[Card],
    worth_of: Callable[[Card], int],
    held: Iterable[Held],
    withheld: Collection[str],
) -> list[tuple[str, bool]]:
    """All ids of a resource of which each card has so many, each with whether it can be used.

    Of a sick card the ids that its pods hold cannot, and as many free ones as it has other units. Of a
    cordoned card, and of those in `withheld` (UUIDs: given away whole), only free ones cannot.
    """
    held = list(held)
    worth: dict[str, int] = {card.uuid: worth_of(card) for card in cards}
    total = sum(worth.values())
    taken = {one for it in held for one in it.ids}
    free = [one for one in map(unit_id, range(total)) if one not in taken]
    away: set[str] = set()
    short = 0
    for card in cards:
        if card.healthy and not card.cordoned and card.uuid not in withheld:
            continue
        on_card = _ids_on(card.uuid, held, worth)
        short += max(worth[card.uuid] - len(on_card), 0)
        if not card.healthy:
            away |= on_card
    away.update(free[len(free) - min(short, len(free)) :])
    return [(one, one not in away) for one in map(unit_id, range(total))]


def _ids_on(uuid: str, held: Iterable[Held], worth: Mapping[str, int]) -> set[str]:
    """Ids of containers on this card; of one with several cards its part, from the front."""
    found: set[str] = set()
    for it in held:
        position = next((n for n, piece in enumerate(it.slices) if piece.uuid == uuid), None)
        if position is not None and uuid in worth:
            share = len(it.ids) // len(it.slices)
            found.update(it.ids[position * share : (position + 1) * share])
    return found


def whole(
    cards: Sequence[Card], held: Collection[str], withheld: Collection[str]
) -> list[tuple[str, bool]]:
    """All cards by UUID, each with whether it can be used: sick ones cannot, nor can cordoned ones and
    those in `withheld` unless a pod holds them already."""
    return [
        (
            card.uuid,
            card.healthy and (card.uuid in held or not (card.cordoned or card.uuid in withheld)),
        )
        for card in cards
    ]
