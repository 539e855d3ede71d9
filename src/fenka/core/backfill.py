"""Serves the queue: by priority and time, fair between users, with backfill.

A pending request that does not fit *reserves* cards: the set that is free for it first. Requests behind it
use other cards, and reserved ones only if their deadline comes before the reservation starts. So a stream of
small requests does not starve a large one, and a large one does not leave the cluster empty.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from fenka.core.availability import AvailabilityCache, CardAvailability, availabilities, needs_host
from fenka.core.evaluate import Fit, Policy, evaluate
from fenka.core.fairness import Fairness, UsageHistory
from fenka.core.gangs import place_gang
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.queue import (
    Allocation,
    PendingRequest,
    QueueStatus,
    Reservation,
    SchedulingResult,
    history_lookup,
    queue_order,
)
from fenka.core.reasons import NodeRejection, Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.shape_cache import MAX_SHAPES
from fenka.core.usage import EmptyUsage, UsageOverlay, UsageTotals, UsageView
from fenka.core.verdict_cache import VerdictCache

MAX_TRIED_NODES = 64
"""Nodes on which requests for one node are tried together, the best first, of those that fit each alone."""

_Shape = tuple[tuple[Request, ...], frozenset[DeviceId], frozenset[str] | None, bool]
"""What decides about a request: its parts, the blocked cards, the eligible nodes, and whether one node."""


class Backfill:
    """Serves pending requests. Between passes it keeps only what is still valid.

    depth: the number of requests that reserve cards. Those behind them reserve when they have moved up.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        policy: Policy,
        fairness: Fairness | None = None,
        depth: int = 4,
    ) -> None:
        self._nodes, self._policy, self._depth = tuple(nodes), policy, depth
        self._fairness = fairness or Fairness()
        self._no_history = UsageHistory(self._fairness)
        self._caches = _Caches(VerdictCache(self._nodes, policy), AvailabilityCache(), set())

    def set_nodes(self, nodes: Sequence[Node]) -> None:
        """Replace the nodes, or the health of their cards."""
        self._nodes = tuple(nodes)
        self._caches.impossible.clear()
        for name in self._caches.verdicts.set_nodes(self._nodes):
            self._caches.availability.invalidate(name)

    def serve(
        self,
        pending: Collection[PendingRequest],
        allocations: Iterable[Allocation],
        now: float,
        usage: UsageView | None = None,
        history: UsageHistory | None = None,
    ) -> SchedulingResult:
        """Place in order what fits now, each on what those before it leave; reserve cards for the others.

        Args:
            pending: the requests.
            allocations: all that is allocated on the nodes.
            now: in the caller's time.
            usage: the sum of `allocations`, if the caller keeps it. Only nodes whose generation there has
                changed since the last call are evaluated again.
            history: what users have used.
        """
        if not pending:
            return SchedulingResult((), ())
        current = _SchedulingPass(self._nodes, self._policy, self._caches, now)
        per_user = current.begin(allocations, usage)
        placed: list[tuple[str, tuple[Placement, ...]]] = []
        statuses: list[QueueStatus] = []
        reservations: list[Reservation] = []
        past = history_lookup(per_user, history or self._no_history, now)
        for request in queue_order(pending, past, self._fairness, now):
            deadline = None if request.time_limit_s is None else now + request.time_limit_s
            blocking = (it.cards for it in reservations if it.blocks(deadline))
            verdict = current.place(request, frozenset[DeviceId]().union(*blocking))
            if isinstance(verdict, Unschedulable):
                reserves = len(reservations) < self._depth
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
class _Caches:
    """What is kept between passes. impossible: what could not be placed if nothing were allocated."""

    verdicts: VerdictCache
    availability: AvailabilityCache
    impossible: set[_Shape]


@dataclass(frozen=True, slots=True)
class _ReservationOption:
    """Cards that could be reserved, when they are free, and what will be allocated then."""

    cards: tuple[Card, ...]
    at: float
    allocation: Allocation


class _SchedulingPass:
    """One pass over the queue: what is allocated and until when, with the placements that it adds."""

    def __init__(self, nodes: Sequence[Node], policy: Policy, caches: _Caches, now: float) -> None:
        self._nodes, self._policy, self._caches, self._now = nodes, policy, caches, now
        self._usage = UsageOverlay(EmptyUsage())
        self._allocations: dict[str, list[Allocation]] = {}
        self._reserved: dict[str, list[Allocation]] = {}
        """What will be allocated on reserved cards, by node."""
        self._reserved_until: dict[DeviceId, float] = {}
        """When the reservation of a card starts, for those who reserve later."""
        self._changed: dict[str, dict[Request, list[CardAvailability]]] = {}
        """Availabilities on nodes that this pass has changed."""
        self._rejected: dict[_Shape, tuple[int, Unschedulable]] = {}
        self._placed = 0

    def begin(self, allocations: Iterable[Allocation], usage: UsageView | None) -> dict[str, int]:
        """Take in what is allocated. Return how many placements each user has."""
        per_user: dict[str, int] = {}
        totals = UsageTotals()
        for allocation in allocations:
            if usage is None:
                totals.add(allocation.placement)
            self._allocations.setdefault(allocation.placement.node, []).append(allocation)
            per_user[allocation.user] = per_user.get(allocation.user, 0) + 1
        self._usage = UsageOverlay(usage or totals)
        self._caches.availability.refresh(self._allocations)
        return per_user

    def allocate(self, allocation: Allocation) -> None:
        """Add an allocation."""
        node = allocation.placement.node
        self._usage.add(allocation.placement)
        self._allocations.setdefault(node, []).append(allocation)
        self._changed[node] = {}
        self._placed += 1

    def place(
        self, pending: PendingRequest, blocked: frozenset[DeviceId]
    ) -> tuple[Placement, ...] | Unschedulable:
        """Place all of the request or nothing."""
        requests = pending.requests
        shape = requests, blocked, pending.nodes, pending.same_node
        # An equal request is rejected for equal reasons until something else is placed.
        known = self._rejected.get(shape)
        if known is not None and known[0] == self._placed:
            return known[1]
        verdict: tuple[Placement, ...] | Unschedulable
        if len(requests) == 1:
            single = self._caches.verdicts.place(self._usage, requests[0], blocked, pending.nodes)
            verdict = (single,) if isinstance(single, Placement) else single
        elif pending.same_node:
            verdict = self._place_on_one_node(pending, blocked)
        else:
            nodes = pending.eligible_nodes(self._nodes)
            verdict = place_gang(self._usage, requests, self._policy, nodes, blocked)
        if isinstance(verdict, Unschedulable):
            self._rejected[shape] = self._placed, verdict
        return verdict

    def _place_on_one_node(
        self, pending: PendingRequest, blocked: frozenset[DeviceId]
    ) -> tuple[Placement, ...] | Unschedulable:
        """Place all on the best node by its first request. Of the fitting nodes MAX_TRIED_NODES are tried."""
        fits: dict[str, tuple[tuple[float, ...], str, Node]] = {}
        rejections: dict[str, NodeRejection] = {}
        for request in dict.fromkeys(pending.requests):
            verdicts = self._caches.verdicts.evaluate(self._usage, request, blocked, pending.nodes)
            for node, verdict in verdicts:
                if isinstance(verdict, NodeRejection):
                    rejections.setdefault(node.name, verdict)
                else:
                    fits.setdefault(node.name, (verdict.score, node.name, node))
        likely = sorted(fit for name, fit in fits.items() if name not in rejections)
        for _, name, node in likely[:MAX_TRIED_NODES]:
            placed = place_gang(self._usage, pending.requests, self._policy, (node,), blocked)
            if not isinstance(placed, Unschedulable):
                return placed
            rejections[name] = placed.rejections[0]
        return Unschedulable(tuple(rejections.values()))

    # ---- reservations ----

    def reserve_cards(self, pending: PendingRequest) -> Reservation | None:
        """Reserve the cards that are free first, also against later reservations.

        Return None for a request that could not be placed even if nothing were allocated.
        """
        impossible = self._caches.impossible
        shape = pending.requests, frozenset[DeviceId](), pending.nodes, pending.same_node
        if shape in impossible:
            return None
        options = self._options(pending)
        if not options:
            if len(impossible) > MAX_SHAPES:
                impossible.clear()
            impossible.add(shape)
            return None
        at = max(option.at for option in options)
        known = at < inf and pending.time_limit_s is not None
        deadline = at + (pending.time_limit_s or 0) if known else None
        for option in options:
            self._add(replace(option, allocation=replace(option.allocation, deadline=deadline)))
        cards = frozenset(card.uuid for option in options for card in option.cards)
        for card in cards:
            self._reserved_until[card] = max(at, self._reserved_until.get(card, at))
        return Reservation(cards, at if at < inf else None)

    def _options(self, pending: PendingRequest) -> list[_ReservationOption]:
        """Return one option for each of its requests; none if it can never be placed."""
        nodes = pending.eligible_nodes(self._nodes)
        one_node = pending.same_node and len(pending.requests) > 1
        for among in self._nodes_by_availability(pending, nodes) if one_node else (nodes,):
            if options := self._options_among(pending.requests, among):
                return options
        return []

    def _options_among(
        self, requests: Sequence[Request], nodes: Sequence[Node]
    ) -> list[_ReservationOption]:
        """Return the earliest cards for each request on what those before it leave."""
        options: list[_ReservationOption] = []
        for request in requests:
            option = self._earliest(request, nodes)
            if option is None:
                break
            # None of them ends to make room for the next.
            stays = replace(option.allocation, deadline=inf)
            options.append(replace(option, allocation=stays))
            self._add(options[-1])
        for option in options:
            self._remove(option)
        if len(options) == len(requests):
            return options
        # One after the other there is no room; another distribution may fit.
        if len(requests) == 1:
            return []
        placements = place_gang(EmptyUsage(), requests, self._policy, nodes)
        if isinstance(placements, Unschedulable):
            return []
        cards = {(node.name, card.uuid): card for node in nodes for card in node.cards}
        return [
            _ReservationOption(
                tuple(cards[it.node, piece.uuid] for piece in it.slices), inf, Allocation(it)
            )
            for it in placements
        ]

    def _nodes_by_availability(
        self, pending: PendingRequest, nodes: Iterable[Node]
    ) -> list[tuple[Node]]:
        """Return single nodes, the one first on which each request alone could start first."""
        starts = []
        for node in nodes:
            options = [self._earliest(it, (node,)) for it in dict.fromkeys(pending.requests)]
            times = [option.at for option in options if option is not None]
            if len(times) == len(options):
                starts.append((max(times), node.name, node))
        return [(node,) for _, _, node in sorted(starts, key=lambda start: start[:2])]

    def _add(self, option: _ReservationOption) -> None:
        node = option.allocation.placement.node
        self._reserved.setdefault(node, []).append(option.allocation)
        self._changed[node] = {}

    def _remove(self, option: _ReservationOption) -> None:
        node = option.allocation.placement.node
        self._reserved[node].remove(option.allocation)
        self._changed[node] = {}

    def _earliest(self, request: Request, nodes: Iterable[Node]) -> _ReservationOption | None:
        best: tuple[tuple[float, int, str], Node, list[CardAvailability]] | None = None
        known = self._caches.availability.of(request)
        for node in nodes:
            cards = self._availabilities(request, node, known)
            if len(cards) < request.cards:
                continue
            needed = cards[: request.cards]
            at = max(self._now, needed[-1].at)
            cost = at, sum(it.uncertain for it in needed), node.name
            if best is None or cost < best[0]:
                best = cost, node, needed
        if best is None:
            return None
        (at, _, _), node, needed = best
        chosen = tuple(it.card for it in needed)
        (fit,) = evaluate(EmptyUsage(), request, self._policy, (replace(node, cards=chosen),))
        assert isinstance(fit, Fit)
        # Another slice on any card of the node may take the host's share too.
        reserved = node.cards if needs_host(request, node) else chosen
        return _ReservationOption(reserved, at, Allocation(fit.placement))

    def _availabilities(
        self, request: Request, node: Node, known: dict[str, list[CardAvailability]]
    ) -> list[CardAvailability]:
        """Return them from the cache of unchanged nodes, or from this pass's own."""
        changed = self._changed.get(node.name)
        cached = known.get(node.name) if changed is None else changed.get(request)
        if cached is not None:
            return cached
        reserved = self._reserved.get(node.name, ())
        cards = availabilities(request, node, [*self._allocations.get(node.name, ()), *reserved])
        if changed is None:
            known[node.name] = cards
        else:
            cards = changed[request] = self._after_reservations(cards)
        return cards

    def _after_reservations(self, cards: Iterable[CardAvailability]) -> list[CardAvailability]:
        """A card that is free now is kept for its reservation until that has started."""
        later = []
        for it in cards:
            until = self._reserved_until.get(it.card.uuid, -inf)
            uncertain = it.uncertain + (until == inf)
            later.append(CardAvailability(max(it.at, until), uncertain, it.card))
        return sorted(later, key=CardAvailability.order)
