"""Caps: how much of the cards a user may hold at once, and for how much of a day."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.queue import cards_of
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request

SLACK = 1e-9
"""Sums of shares are not exact: 14 fourteenths of a card are one card."""

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Caps:
    """The caps of a user. Infinite: no cap.

    Attributes:
        memory_mib: card memory at once, over all cards.
        cards: cards at once. A slice counts for the larger of its shares of memory and compute.
        card_hours: cards × hours since midnight, by the same shares.
        default_limit_s: time limit of a job that names none; infinite for none.
        max_limit_s: the longest time limit.
    """

    memory_mib: float = inf
    cards: float = inf
    card_hours: float = inf
    default_limit_s: float = inf
    max_limit_s: float = inf


NO_CAPS = Caps()


class HeldAmount(NamedTuple):
    """Card memory in MiB, and cards by their shares, that placements hold."""

    memory_mib: int = 0
    cards: float = 0.0

    def plus(self, other: "HeldAmount") -> "HeldAmount":
        """Return the sum."""
        return HeldAmount(self.memory_mib + other.memory_mib, self.cards + other.cards)

    def within(self, caps: Caps) -> bool:
        """Return whether a user with these caps may hold it."""
        return self.memory_mib <= caps.memory_mib and self.cards <= caps.cards + SLACK


NOTHING = HeldAmount()


def amount_of(placements: Iterable[Placement], cards: Sequence[Card]) -> HeldAmount:
    """Return what placements on one node hold. cards: the node's."""
    placements = tuple(placements)
    memory_mib = sum(piece.memory_mib for placed in placements for piece in placed.slices)
    return HeldAmount(memory_mib, cards_of(placements, cards))


def least_amount(requests: Sequence[Request], node: Node) -> HeldAmount:
    """Return the least that requests can hold on this node, whoever else holds what.

    A request for instances that do not exist yet counts as nothing: its placement is checked.
    """
    total = NOTHING
    for request in requests:
        options = sorted(_amounts_on_cards(request, node))
        for amount in options[: request.cards]:
            total = total.plus(amount)
    return total


def _amounts_on_cards(request: Request, node: Node) -> Iterable[HeldAmount]:
    for card in node.cards:
        if not request.is_for(card.profile, divided=card.divided):
            continue
        if request.models and card.model not in request.models:
            continue
        if request.whole:
            yield HeldAmount(card.memory_mib, card.compute / 100 if card.parent else 1)
            continue
        mib = request.memory.mib_on(card.memory_mib, node.unit_mib) if request.memory else 0
        if mib is not None and mib <= card.memory_mib:
            share = max(mib / card.memory_mib, request.compute / card.compute)
            yield HeldAmount(mib, share * card.compute / 100 if card.parent else share)


class CapExceeded(Unschedulable):
    """The request would take its user beyond a cap. It waits without holding others up.

    Attributes:
        cards: the cards of the placement that was too much, of which others may be smaller.
    """

    def __init__(self, sentence: str, cards: frozenset[DeviceId] = frozenset()) -> None:
        super().__init__((), sentence)
        self.cards = cards

    def sentence(self) -> str:
        """Return who holds how much of what cap."""
        return self.hint


def alone_exceeds(name: str, caps: Caps, least: HeldAmount) -> str:
    """Return why a request can never be granted; empty if it can. least: what it holds at least."""
    if least.memory_mib > caps.memory_mib:
        return (
            f"{name} may hold at most {caps.memory_mib:.0f} MiB, and this request needs "
            f"{least.memory_mib} MiB: ask for less"
        )
    if least.cards > caps.cards + SLACK:
        return (
            f"{name} may hold at most {cards_text(caps.cards)}, and this request needs "
            f"{cards_text(least.cards)}: ask for less"
        )
    return ""


def limit_exceeds(name: str, caps: Caps, limit_s: float | None) -> str:
    """Return why a time limit is refused; empty if it is allowed."""
    if caps.max_limit_s < inf and (limit_s is None or limit_s > caps.max_limit_s):
        return (
            f"{name} may run programs for at most {duration_text(caps.max_limit_s)}: give "
            f"--time-limit {duration_text(caps.max_limit_s)} or less"
        )
    return ""


def applied_limit_s(caps: Caps, limit_s: float | None) -> float | None:
    """Return the time limit of a job that names this one."""
    if limit_s is not None:
        return limit_s
    least = min(caps.default_limit_s, caps.max_limit_s)
    return None if least == inf else least


class CapCheck:
    """Checks the requests of one scheduling pass against what their users hold."""

    def __init__(
        self,
        caps_of: Callable[[str], Caps],
        hours_of: Callable[[str], float],
        name_of: Callable[[str], str],
        held: Mapping[str, HeldAmount],
    ) -> None:
        """Args:
        caps_of: a user's caps.
        hours_of: the card-hours that a user has used since midnight.
        name_of: a user's name, for sentences.
        held: what users hold.
        """
        self._caps_of, self._hours_of, self._name_of = caps_of, hours_of, name_of
        self._held = dict(held)

    def held(self, user: str) -> HeldAmount:
        """Return what a user holds, with what the pass has granted."""
        return self._held.get(user, NOTHING)

    def grant(self, user: str, amount: HeldAmount) -> None:
        """Count a placement of the pass."""
        self._held[user] = self.held(user).plus(amount)

    def hours_rejection(self, user: str) -> str:
        """Return that a user has no card-hours left today; empty if it has some."""
        caps = self._caps_of(user)
        if caps.card_hours == inf:
            return ""
        used = self._hours_of(user)
        if used < caps.card_hours:
            return ""
        return (
            f"{self._name_of(user)} has used {used:.4g} of at most {caps.card_hours:.4g} card-hours "
            "since midnight"
        )

    def rejection(self, user: str, amount: HeldAmount, before: HeldAmount = NOTHING) -> str:
        """Return why a user may not hold this amount, too; empty if it may.

        before: what is reserved for the user's earlier requests.
        """
        caps = self._caps_of(user)
        held = self.held(user)
        if held.plus(before).plus(amount).within(caps):
            return ""
        name = self._name_of(user)
        alone = alone_exceeds(name, caps, amount)
        if alone:
            return alone
        if held.memory_mib + before.memory_mib + amount.memory_mib > caps.memory_mib:
            text = f"{name} holds {held.memory_mib} of at most {caps.memory_mib:.0f} MiB"
            reserved = f"{before.memory_mib} MiB" if before.memory_mib else ""
        else:
            text = f"{name} holds {held.cards:.3g} of at most {cards_text(caps.cards)}"
            reserved = cards_text(before.cards) if before.cards else ""
        return f"{text}, and {reserved} wait before this" if reserved else text


def held_amounts(
    allocations: Iterable[tuple[str, Placement]], cards: Sequence[Card]
) -> dict[str, HeldAmount]:
    """Return what users hold. allocations: with their users."""
    held = dict[str, HeldAmount]()
    for user, placement in allocations:
        held[user] = held.get(user, NOTHING).plus(amount_of((placement,), cards))
    return held


def largest_pieces(placements: Iterable[Placement]) -> frozenset[DeviceId]:
    """Return the cards on which placements take the most memory: on others they may take less."""
    pieces = [piece for placed in placements for piece in placed.slices]
    most = max(piece.memory_mib for piece in pieces)
    return frozenset(piece.uuid for piece in pieces if piece.memory_mib == most)


def cards_text(cards: float) -> str:
    """Return `1 card`, `0.571 cards`."""
    return f"{cards:.3g} card{'' if cards == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Return a duration as people write it: 24h, 90m, 45s."""
    whole = round(seconds)
    for size, unit in ((3600, "h"), (60, "m")):
        if whole % size == 0 and whole:
            return f"{whole // size}{unit}"
    return f"{seconds:g}s"


class CardTime:
    """The card-seconds of users since midnight. Times are the caller's, in seconds."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._open: dict[str, tuple[str, float, float]] = {}
        """By holder: its user, its cards, and since when it is counted."""
        self.midnight = -inf
        self._restored_until = -inf

    def begin_day(self, midnight: float) -> bool:
        """Forget what was used before this midnight. Return whether the day is another one."""
        if midnight == self.midnight:
            return False
        self.midnight = midnight
        self._used.clear()
        for holder, (user, cards, since) in self._open.items():
            self._open[holder] = user, cards, max(since, midnight)
        return True

    def restore(self, used_s: Mapping[str, float], until: float) -> None:
        """Take over what an earlier program has counted of this day until then."""
        self._used, self._restored_until = dict(used_s), until

    def hold(self, holder: str, user: str, cards: float, since: float, now: float) -> None:
        """Count a holder from `since` on, which may be past, or one with another size from now on."""
        if holder in self._open:
            self.release(holder, now)
            since = now
        since = max(min(since, now), self.midnight, self._restored_until)
        self._open[holder] = user, cards, since

    def release(self, holder: str, now: float) -> None:
        """Stop counting a holder. Unknown ones are ignored."""
        if holder not in self._open:
            return
        user, cards, since = self._open.pop(holder)
        self._used[user] = self._used.get(user, 0.0) + cards * max(now - since, 0.0)

    def used_s(self, now: float) -> dict[str, float]:
        """Return the card-seconds of all users that have any."""
        used = dict(self._used)
        for user, cards, since in self._open.values():
            used[user] = used.get(user, 0.0) + cards * max(now - since, 0.0)
        return used
