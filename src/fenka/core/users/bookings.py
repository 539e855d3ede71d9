"""Bookings: cards that are kept for some users from one time to another.

A booking names no cards when it is made. In each scheduling pass its occurrences get the cards that are
certain to be free when they begin, as a reservation before all requests. One that has begun keeps its cards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from fenka.core.inventory import Card, DeviceId
from fenka.core.queue import Allocation


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time of a booking.

    Attributes:
        booking: the booking's id.
        cards: how many cards.
        start, end: in the caller's time.
        ends_others: jobs that would run into it are ended.
        named: its cards, once it has begun.
    """

    booking: str
    cards: int
    start: float
    end: float
    ends_others: bool = False
    named: frozenset[DeviceId] = frozenset()

    def begun(self, now: float) -> bool:
        """Return whether its time has come."""
        return self.start <= now


@dataclass(frozen=True, slots=True)
class BookedCards:
    """The cards of an occurrence. certain: whether all are certain to be free when it begins."""

    occurrence: Occurrence
    cards: frozenset[DeviceId]
    certain: bool


def free_from(cards: Iterable[Card], allocations: Iterable[Allocation]) -> dict[DeviceId, float]:
    """Return from when on each card that can be booked is certain to be free; infinite if that is unknown.

    Cards that are divided into instances cannot be booked, nor those that take no slices.
    """
    at = {
        card.uuid: -inf for card in cards if card.parent is None and card.open and not card.divided
    }
    for allocation in allocations:
        end = inf if allocation.deadline is None else allocation.deadline
        for piece in allocation.placement.slices:
            if piece.card_uuid in at:
                at[piece.card_uuid] = max(at[piece.card_uuid], end)
    return at


def name_cards(
    occurrences: Iterable[Occurrence], certain_from: Mapping[DeviceId, float], now: float
) -> list[BookedCards]:
    """Return the cards of each occurrence, by their starts.

    A card that is certain at a time stays so. So whether there are enough does not depend on which are taken.
    Cards are chosen that are named already, then those that are in use the longest: others stay for jobs.

    Args:
        occurrences: those that have not ended.
        certain_from: from when on each card is free, see `free_from`. In the order of the cards.
        now: in the caller's time.
    """
    booked: list[BookedCards] = []
    certain, often = dict(certain_from), dict.fromkeys(certain_from, 0)
    rank = {card: position for position, card in enumerate(certain)}
    for occurrence in sorted(occurrences, key=lambda item: (item.start, item.booking)):
        kept = occurrence.named & certain.keys() if occurrence.begun(now) else frozenset()
        taken = {
            card
            for other in booked
            if other.occurrence.end > occurrence.start
            for card in other.cards
        }
        # One that has begun has its cards from now on.
        start = max(occurrence.start, now)

        def order(card: DeviceId, start: float = start) -> tuple[bool, float, int, float, int]:
            late = certain[card] > start
            wait = certain[card] if late else 0.0
            return late, wait, -often[card], -certain[card], -rank[card]

        left = sorted((card for card in certain if card not in taken | kept), key=order)
        more = left[: max(occurrence.cards - len(kept), 0)]
        named = kept | frozenset(more)
        sure = len(named) >= occurrence.cards and (
            occurrence.ends_others or all(certain[card] <= start for card in more)
        )
        booked.append(BookedCards(occurrence, named, sure))
        for card in named:
            often[card] += 1
            if occurrence.ends_others and not occurrence.begun(now):
                certain[card] = min(certain[card], occurrence.start)
    return booked
