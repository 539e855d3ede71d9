"""The rules of one scheduling pass on one machine: caps, card-hours and bookings of its users."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property

from fenka.core.backfill import Booked, PassRules
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.queue import Allocation, PendingRequest, Reservation
from fenka.core.reasons import ReasonCode, Unschedulable
from fenka.core.request import Placement, Request, Slice
from fenka.core.users.bookings import BookedCards, Occurrence, free_from, name_cards
from fenka.core.users.caps import (
    HOUR_S,
    NO_CAPS,
    CapCheck,
    CapExceeded,
    Caps,
    CardTime,
    HeldAmount,
    alone_exceeds,
    amount_of,
    held_amounts,
    largest_pieces,
    least_amount,
    limit_exceeds,
)


class Policies:
    """An administrator's decisions, and today's use. Here nobody is limited."""

    def __init__(self) -> None:
        self.card_time = CardTime()

    def caps(self, user: str) -> Caps:
        """Return a user's caps."""
        del user
        return NO_CAPS

    def name(self, user: str) -> str:
        """Return a user's name."""
        return user

    def occurrences(self, now: float) -> Sequence[Occurrence]:
        """Return the times of all bookings that have not ended, those of weekly ones for some weeks."""
        del now
        return ()

    def members(self, booking: str, users: Iterable[str]) -> frozenset[str]:
        """Return those of the users whom a booking is for."""
        del booking, users
        return frozenset()

    def title(self, occurrence: Occurrence) -> str:
        """Return who has booked it for whom and until when, as `booked by …`."""
        return f"booked ({occurrence.booking})"

    def on_named(self, booked: Sequence[BookedCards]) -> None:
        """A pass has named the cards of all occurrences."""

    def on_saved(self) -> None:
        """Jobs were recorded."""

    def hours(self, user: str, now: float) -> float:
        """Return the card-hours that a user has used since midnight."""
        return self.card_time.used_s(now).get(user, 0.0) / HOUR_S


class UserRules(PassRules):
    """The rules of one pass."""

    def __init__(
        self,
        policies: Policies,
        node: Node,
        allocations: Iterable[Allocation],
        users: Iterable[str],
        now: float,
    ) -> None:
        """Args:
        policies: what was decided.
        node: the machine.
        allocations: all that is held of it.
        users: those of pending requests.
        now: in the caller's time.
        """
        allocations = tuple(allocations)
        self._policies, self.node, self.now = policies, node, now
        self.allocations = allocations
        self.cards: Callable[[], Sequence[Card]] = lambda: node.cards
        """The cards with the instances that the pass has planned."""
        self._reserved: dict[str, list[tuple[HeldAmount, Reservation]]] = {}
        users = frozenset(users) | {allocation.user for allocation in allocations}
        occurrences = policies.occurrences(now)
        self.booked = (
            name_cards(occurrences, free_from(node.cards, allocations), now) if occurrences else []
        )
        self._members = {
            cards.occurrence.booking: policies.members(cards.occurrence.booking, users)
            for cards in self.booked
            if cards.occurrence.begun(now)
        }
        self.bookings = tuple(self._as_allocation(cards) for cards in self.booked if cards.cards)

    def _as_allocation(self, booked: BookedCards) -> Booked:
        slices = tuple(
            Slice(card.index, card.uuid, card.memory_mib, card.compute)
            for card in self.node.cards
            if card.uuid in booked.cards
        )
        occurrence = booked.occurrence
        begun = occurrence.begun(self.now)
        return Booked(
            Allocation(Placement(self.node.name, slices, whole=True), occurrence.end),
            occurrence.start,
            self._members[occurrence.booking] if begun else (),
        )

    # ---- caps ----

    @cached_property
    def check(self) -> CapCheck:
        """The users' caps beside what they hold; on most machines nobody has any."""
        held = held_amounts(((a.user, a.placement) for a in self.allocations), self.node.cards)
        policies, now = self._policies, self.now
        return CapCheck(policies.caps, lambda user: policies.hours(user, now), policies.name, held)

    def _is_capped(self, user: str) -> bool:
        return self._policies.caps(user) != NO_CAPS

    def rejection(self, request: PendingRequest, deadline: float | None) -> Unschedulable | None:
        """Return the cap that a request waits for; it takes no place in the meantime."""
        if not self._is_capped(request.user):
            return None
        sentence = self.check.hours_rejection(request.user)
        if not sentence:
            before = HeldAmount()
            for amount, reservation in self._reserved.get(request.user, ()):
                if reservation.blocks(deadline):
                    before = before.plus(amount)
            least = least_amount(request.requests, self.node)
            sentence = self.check.rejection(request.user, least, before)
        return CapExceeded(sentence) if sentence else None

    def excess(
        self, user: str, placements: tuple[Placement, ...]
    ) -> tuple[Unschedulable, frozenset[DeviceId]] | None:
        """Return the cap that placements exceed, and their largest cards."""
        if not self._is_capped(user):
            return None
        sentence = self.check.rejection(user, amount_of(placements, self.cards()))
        return (CapExceeded(sentence), largest_pieces(placements)) if sentence else None

    def on_placed(self, user: str, placements: tuple[Placement, ...]) -> None:
        """Count what was granted."""
        if self._is_capped(user):
            self.check.grant(user, amount_of(placements, self.cards()))

    def on_reserved(
        self, user: str, placements: tuple[Placement, ...], reservation: Reservation
    ) -> None:
        """Count what a request will hold against the user's later ones that would not end before."""
        if not self._is_capped(user):
            return
        amount = amount_of(placements, self.cards())
        self._reserved.setdefault(user, []).append((amount, reservation))

    # ---- bookings ----

    def blocked(self, user: str, deadline: float | None) -> frozenset[DeviceId]:
        """Return the cards that bookings keep from a request."""
        return frozenset[DeviceId]().union(
            *(booked.cards for booked in self._blocking(user, deadline))
        )

    def _blocking(self, user: str, deadline: float | None) -> Iterable[BookedCards]:
        """Yield the occurrences that keep cards: before, from all who do not end; during, from strangers."""
        for booked in self.booked:
            occurrence = booked.occurrence
            if occurrence.begun(self.now):
                if user not in self._members[occurrence.booking]:
                    yield booked
            elif Reservation(booked.cards, occurrence.start).blocks(deadline):
                yield booked

    def own_cards(self, user: str) -> frozenset[DeviceId]:
        """Return the cards that are booked for a user now."""
        return frozenset[DeviceId]().union(
            *(booked.cards for booked in self.bookings if user in booked.own)
        )

    def other_cards(self, own: frozenset[DeviceId]) -> frozenset[DeviceId]:
        """Return all cards and instances but these."""
        return frozenset(card.uuid for card in self.node.cards) - own

    def booking_reasons(self, request: PendingRequest, unschedulable: Unschedulable) -> list[str]:
        """Return the bookings that keep a card from a request on which it would fit, in sentences."""
        lacking = {
            reason.card for reason in unschedulable.reasons if reason.code is ReasonCode.RESERVED
        }
        limit_s = request.time_limit_s
        deadline = None if limit_s is None else self.now + limit_s
        said: dict[str, str] = {}
        for booked in self._blocking(request.user, deadline):
            indices = self._indices(booked.cards) if booked.occurrence.booking not in said else []
            if lacking.intersection(indices):
                title = self._policies.title(booked.occurrence)
                said[booked.occurrence.booking] = f"{_cards_are(indices)} {title}"
        return [*said.values()]

    def growth_rejection(
        self, user: str, before: Sequence[Slice], after: Sequence[Slice], deadline: float | None
    ) -> str:
        """Return why a job may not grow; empty if it may."""
        added = tuple(
            Slice(
                old.card,
                old.uuid,
                max(new.memory_mib - old.memory_mib, 0),
                max(new.compute - old.compute, 0),
            )
            for old, new in zip(before, after, strict=True)
        )
        amount = amount_of((Placement(self.node.name, added),), self.node.cards)
        if amount != HeldAmount() and self._is_capped(user):
            sentence = self.check.rejection(user, amount)
            if sentence:
                return sentence
        uuids = {piece.card_uuid for piece in added if piece.memory_mib or piece.compute}
        for booked in self._blocking(user, deadline):
            if uuids & booked.cards:
                indices = self._indices(booked.cards)
                return f"{_cards_are(indices)} {self._policies.title(booked.occurrence)}"
        return ""

    def _indices(self, cards: Collection[DeviceId]) -> list[int]:
        return [card.index for card in self.node.cards if card.uuid in cards]


def never_allowed(
    policies: Policies,
    user: str,
    requests: Sequence[Request],
    limit_s: float | None,
    node: Node,
) -> str:
    """Return why a user can never be granted requests; empty if that is possible.

    limit_s: their time limit; None for none.
    """
    caps, name = policies.caps(user), policies.name(user)
    if caps == NO_CAPS:
        return ""
    least = least_amount(requests, node)
    return alone_exceeds(name, caps, least) or limit_exceeds(name, caps, limit_s)


def _cards_are(indices: Sequence[int]) -> str:
    listed = ", ".join(map(str, indices))
    return f"card {listed} is" if len(indices) == 1 else f"cards {listed} are"
