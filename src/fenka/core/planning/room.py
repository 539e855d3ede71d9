"""What a node has free, as plain numbers, and what a pod takes of it.

Planning tries very many placements, and `evaluate` is too slow for that. Both read the same sizes; each
placement of the plan that is chosen is judged by `evaluate` at the end (`check.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

CLOSED = -1
"""The free memory of a card that admits nobody."""


class CardRoom(NamedTuple):
    """What a card has free. idle: nobody holds anything of it."""

    free_mib: int
    free_compute: int
    idle: bool = True


class Need(NamedTuple):
    """What a pod takes of nodes of one shape.

    Attributes:
        host: amounts by dimension of the host, without zeros.
        cards: the number of cards.
        mib: memory by card of the node; None for cards that cannot serve it.
        least_mib: the least of these; 0 for pods without cards.
        compute: percent of each card.
        whole: wants idle cards.
        share: the largest part of the empty node that it takes of anything.
    """

    host: tuple[tuple[int, int], ...]
    cards: int
    mib: tuple[int | None, ...]
    least_mib: int
    compute: int
    whole: bool
    share: float


class Room:
    """The free amounts of one node while it is filled."""

    __slots__ = ("compute", "host", "idle", "mib")

    def __init__(self, host: Sequence[int], cards: Sequence[CardRoom]) -> None:
        self.host = list(host)
        self.mib = [card.free_mib for card in cards]
        self.compute = [card.free_compute for card in cards]
        self.idle = [card.idle for card in cards]

    def copy(self) -> "Room":
        """Return a room that is filled by itself."""
        twin = Room((), ())
        twin.host, twin.mib = self.host.copy(), self.mib.copy()
        twin.compute, twin.idle = self.compute.copy(), self.idle.copy()
        return twin

    def most_mib(self) -> int:
        """Return the free memory of the card that has the most; 0 without open cards."""
        return max([0, *self.mib])

    def take(self, need: Need) -> tuple[int, ...] | None:
        """Take what a pod needs, of the tightest cards. Return the cards, None if it does not fit."""
        host = self.host
        for dimension, amount in need.host:
            if amount > host[dimension]:
                return None
        cards = self._tightest(need) if need.cards else ()
        if cards is not None:
            self.put(need, cards)
        return cards

    def put(self, need: Need, cards: Sequence[int]) -> None:
        """Take what a pod needs, of these cards."""
        for card in cards:
            self.mib[card] -= need.mib[card] or 0
            self.compute[card] -= need.compute
            self.idle[card] = False
        for dimension, amount in need.host:
            self.host[dimension] -= amount

    def _tightest(self, need: Need) -> tuple[int, ...] | None:
        compute, whole, free = need.compute, need.whole, self.mib
        if need.cards == 1:
            best, least = -1, 0
            for card, mib in enumerate(need.mib):
                if mib is None or mib > free[card] or compute > self.compute[card]:
                    continue
                if (best < 0 or free[card] < least) and (not whole or self.idle[card]):
                    best, least = card, free[card]
            return None if best < 0 else (best,)
        fitting = [
            (free[card], self.compute[card], card)
            for card, mib in enumerate(need.mib)
            if mib is not None
            and mib <= free[card]
            and compute <= self.compute[card]
            and (not whole or self.idle[card])
        ]
        if len(fitting) < need.cards:
            return None
        return tuple(sorted(card for _, _, card in sorted(fitting)[: need.cards]))
