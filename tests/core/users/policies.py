"""Policies and passes of one machine for tests: caps and bookings by hand."""

from collections.abc import Iterable, Mapping, Sequence

from fenka.core.backfill import Backfill, Timeline, complete
from fenka.core.gangs import PlainPlacer
from fenka.core.inventory import Node
from fenka.core.queue import Allocation, PendingRequest, SchedulingResult
from fenka.core.request import Request
from fenka.core.usage import EmptyUsage
from fenka.core.users.bookings import BookedCards, Occurrence
from fenka.core.users.caps import NO_CAPS, Caps
from fenka.core.users.rules import Policies, UserRules


class FixedPolicies(Policies):
    """Caps by user, and bookings for some users. Remembers the cards of bookings that have begun."""

    def __init__(
        self,
        caps: Mapping[str, Caps] | None = None,
        bookings: Iterable[tuple[Occurrence, Iterable[str]]] = (),
    ) -> None:
        super().__init__()
        self.caps_by_user = dict(caps or {})
        self.bookings = {
            occurrence.booking: (occurrence, {*users}) for occurrence, users in bookings
        }
        self.booked: Sequence[BookedCards] = ()

    def caps(self, user: str) -> Caps:
        """Return the caps by user."""
        return self.caps_by_user.get(user, NO_CAPS)

    def occurrences(self, now: float) -> Sequence[Occurrence]:
        """Return those that have not ended."""
        return [occurrence for occurrence, _ in self.bookings.values() if occurrence.end > now]

    def members(self, booking: str, users: Iterable[str]) -> frozenset[str]:
        """Return the members among these."""
        return frozenset(users) & self.bookings[booking][1]

    def on_named(self, booked: Sequence[BookedCards]) -> None:
        """Remember the cards, which those that have begun keep."""
        self.booked = booked


def ask(
    name: str, request: Request, user: str, limit_s: float | None = None, *, at: float = 0
) -> PendingRequest:
    """A pending request of one process."""
    return PendingRequest(name, (request,), at, 0, user, limit_s)


def serve(
    node: Node,
    pending: Sequence[PendingRequest],
    policies: Policies,
    *,
    holding: Sequence[Allocation] = (),
    now: float = 100.0,
) -> tuple[SchedulingResult, UserRules]:
    """Serve requests in this order. Return also the rules of the pass."""
    placer = PlainPlacer((node,), EmptyUsage())
    for allocation in holding:
        placer.add(allocation.placement)
    rules = UserRules(policies, node, holding, [request.user for request in pending], now)
    timeline = Timeline((node,), {node.name: holding}, now)
    return complete(Backfill("binpack").serve(pending, placer, timeline, now, rules)), rules


def cards(result: SchedulingResult) -> dict[str, list[int]]:
    """Return the cards that each request was granted."""
    return {
        name: [piece.card for placement in placements for piece in placement.slices]
        for name, placements in result.placed
    }


def reasons(result: SchedulingResult) -> dict[str, str]:
    """Return why each of the others is pending."""
    return {status.id: status.reason for status in result.pending}
