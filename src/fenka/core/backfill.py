"""Serves the queue: by priority and time, fair between users, with backfill.

A pending request that does not fit *reserves* cards: the set that is free for it first. Requests behind it
use other cards, and reserved ones only if their deadline comes before the reservation starts. So a stream of
small requests does not starve a large one, and a large one does not leave the cluster empty.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from fenka.core.availability import Timeline, needs_host
from fenka.core.evaluate import Fit, Policy, evaluate
from fenka.core.fairness import Fairness, UsageHistory
from fenka.core.gangs import Limits, Placer, place_all
from fenka.core.inventory import Card, DeviceId
from fenka.core.queue import (
    Allocation,
    PendingRequest,
    QueueStatus,
    Reservation,
    SchedulingResult,
    history_lookup,
    queue_order,
)
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.steps import Steps
from fenka.core.usage import EmptyUsage

MAX_IMPOSSIBLE = 1024
"""The number of requests that `Backfill` remembers to be impossible."""

_Shape = tuple[tuple[Request, ...], frozenset[str] | None, bool]
"""What decides whether requests could ever be placed: they, the eligible nodes, whether on one node."""


class Backfill:
    """Serves pending requests. depth: the number of requests that reserve cards.

    Those behind them reserve when they have moved up.
    """

    def __init__(self, policy: Policy, fairness: Fairness | None = None, depth: int = 4) -> None:
        self.policy, self.depth = policy, depth
        self._fairness = fairness or Fairness()
        self._no_history = UsageHistory(self._fairness)
        self._impossible: set[_Shape] = set()
        """What could not be placed if nothing were allocated. Only the exact search for gangs is long."""

    def forget_impossible(self) -> None:
        """Nodes, or the health of cards, have changed."""
        self._impossible.clear()

    def serve(
        self,
        pending: Collection[PendingRequest],
        placer: Placer,
        timeline: Timeline,
        held: Mapping[str, int],
        now: float,
        history: UsageHistory | None = None,
    ) -> Steps[SchedulingResult]:
        """Place in order what fits now, each on what those before it leave; reserve cards for the others.

        Each step serves one request. Placer and timeline must not change in between.

        Args:
            pending: the requests.
            placer: the nodes, and what is allocated of them. What is placed is added.
            timeline: the same nodes and allocations. What is placed and reserved is added.
            held: the number of placements of each user.
            now: in the caller's time.
            history: what users have used.
        """
        current = _SchedulingPass(self, placer, timeline, self._impossible)
        placed: list[tuple[str, tuple[Placement, ...]]] = []
        statuses: list[QueueStatus] = []
        reservations: list[Reservation] = []
        past = history_lookup(held, history or self._no_history, now)
        for request in queue_order(pending, past, self._fairness, now):
            yield
            deadline = None if request.time_limit_s is None else now + request.time_limit_s
            blocking = (it.cards for it in reservations if it.blocks(deadline))
            verdict = current.place(request, frozenset[DeviceId]().union(*blocking))
            if isinstance(verdict, Unschedulable):
                reserves = len(reservations) < self.depth
                reservation = current.reserve_cards(request) if reserves else None
                if reservation is not None:
                    reservations.append(reservation)
                statuses.append(QueueStatus(request.id, len(statuses) + 1, verdict, reservation))
            else:
                for placement in verdict:
                    current.allocate(Allocation(placement, deadline, request.user))
                placed.append((request.id, verdict))
        return SchedulingResult(tuple(placed), tuple(statuses))


@dataclass(frozen=True, slots=True)
class _ReservationOption:
    """Cards that could be reserved, when they are free, and what will be allocated then."""

    cards: tuple[Card, ...]
    at: float
    allocation: Allocation


class _SchedulingPass:
    """One pass over the queue."""

    def __init__(
        self, backfill: Backfill, placer: Placer, timeline: Timeline, impossible: set[_Shape]
    ) -> None:
        self._policy, self._placer, self._timeline = backfill.policy, placer, timeline
        self._impossible = impossible
        self._rejected: dict[tuple[_Shape, frozenset[DeviceId]], Unschedulable] = {}
        """Until something is placed: people submit many equal requests, a gang's search may be long."""

    def allocate(self, allocation: Allocation) -> None:
        """Add an allocation."""
        self._placer.add(allocation.placement)
        self._timeline.add(allocation)
        self._rejected.clear()

    def place(
        self, pending: PendingRequest, blocked: frozenset[DeviceId]
    ) -> tuple[Placement, ...] | Unschedulable:
        """Place all of the request or nothing."""
        key = (pending.requests, pending.nodes, pending.same_node), blocked
        if key in self._rejected:
            return self._rejected[key]
        verdict = self._place(pending, blocked)
        if isinstance(verdict, Unschedulable):
            self._rejected[key] = verdict
        return verdict

    def _place(
        self, pending: PendingRequest, blocked: frozenset[DeviceId]
    ) -> tuple[Placement, ...] | Unschedulable:
        requests, limits = pending.requests, Limits(blocked, pending.nodes)
        if len(requests) == 1:
            single = self._placer.place(requests[0], self._policy, limits)
            return (single,) if isinstance(single, Placement) else single
        if pending.same_node:
            return self._placer.place_on_one_node(requests, self._policy, limits)
        return place_all(self._placer, requests, self._policy, limits)

    # ---- reservations ----

    def reserve_cards(self, pending: PendingRequest) -> Reservation | None:
        """Reserve the cards that are free first, also against later reservations.

        Return None for a request that could not be placed even if nothing were allocated.
        """
        shape = pending.requests, pending.nodes, pending.same_node
        if shape in self._impossible:
            return None
        options = self._options(pending)
        if not options:
            if len(self._impossible) >= MAX_IMPOSSIBLE:
                self._impossible.clear()
            self._impossible.add(shape)
            return None
        at = max(option.at for option in options)
        known = at < inf and pending.time_limit_s is not None
        deadline = at + (pending.time_limit_s or 0) if known else None
        for option in options:
            self._timeline.add(replace(option.allocation, deadline=deadline))
        cards = frozenset(card.uuid for option in options for card in option.cards)
        self._timeline.reserve(cards, at)
        return Reservation(cards, at if at < inf else None)

    def _options(self, pending: PendingRequest) -> list[_ReservationOption]:
        """Return one option for each of its requests; none if it can never be placed."""
        requests, nodes = pending.requests, pending.nodes
        if not pending.same_node or len(requests) == 1:
            return self._options_among(requests, nodes)
        for name in self._timeline.by_start(list(dict.fromkeys(requests)), nodes):
            if options := self._options_among(requests, frozenset((name,))):
                return options
        return []

    def _options_among(
        self, requests: Sequence[Request], among: frozenset[str] | None
    ) -> list[_ReservationOption]:
        """Return the earliest cards for each request on what those before it leave."""
        options: list[_ReservationOption] = []
        for request in requests:
            option = self._earliest(request, among)
            if option is None:
                break
            options.append(option)
            self._timeline.add(option.allocation)
        for option in options:
            self._timeline.remove(option.allocation)
        if len(options) == len(requests):
            return options
        # One after the other there is no room; another distribution may fit.
        if len(requests) == 1:
            return []
        empty = self._placer.emptied()
        placements = place_all(empty, requests, self._policy, Limits(among=among))
        if isinstance(placements, Unschedulable):
            return []
        return [
            _ReservationOption(
                tuple(
                    card
                    for card in self._timeline.nodes[placement.node].cards
                    if card.uuid in {piece.uuid for piece in placement.slices}
                ),
                inf,
                Allocation(placement),
            )
            for placement in placements
        ]

    def _earliest(
        self, request: Request, among: frozenset[str] | None
    ) -> _ReservationOption | None:
        start = self._timeline.earliest(request, among)
        if start is None:
            return None
        node = replace(start.node, cards=start.cards)
        (fit,) = evaluate(EmptyUsage(), request, self._policy, (node,))
        assert isinstance(fit, Fit)
        # Another slice on any card of the node may take the host's share too.
        cards = start.node.cards if needs_host(request, node) else start.cards
        # It does not end to make room for the next request of the same gang.
        return _ReservationOption(cards, start.at, Allocation(fit.placement, deadline=inf))


def held_by_user(allocations: Mapping[str, Sequence[Allocation]]) -> Counter[str]:
    """Return the number of placements of each user. allocations: by node."""
    return Counter(it.user for on_node in allocations.values() for it in on_node)
