"""Serves a queue that is in order, with backfill, in steps between which the caller may do something else.

A pending request that does not fit *reserves* cards: the set that is free for it first. Requests behind it
use other cards, and reserved ones only if their deadline comes before the reservation starts. So a stream of
small requests does not starve a large one, and a large one does not leave the cluster empty.
"""

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from fenka.core import queue
from fenka.core.evaluate import Fit, Policy, best_cards, evaluate, fits_card, links_missing
from fenka.core.gangs import PlacementLimits, Placer, domain_search, place_all
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request, Slice
from fenka.core.topology.domains import Proximity
from fenka.core.usage import NO_USAGE, CardUsage, EmptyUsage


@dataclass(frozen=True, slots=True)
class CardAvailability:
    """When a card is free for a request.

    Attributes:
        at: in the caller's time; infinite if unknown.
        uncertain: the number of allocations without a deadline that must end first.
        card: the card.
    """

    at: float
    uncertain: int
    card: Card

    def order(self) -> tuple[float, int, int]:
        """Return what sorts cards, the earliest first."""
        return self.at, self.uncertain, self.card.rank


@dataclass(frozen=True, slots=True)
class EarliestStart:
    """When a request can start on a node, and on which cards.

    Attributes:
        at: in the caller's time, not before now; infinite if unknown.
        uncertain: the number of allocations without a deadline that must end first.
        node: the node.
        cards: the cards that are free first.
    """

    at: float
    uncertain: int
    node: Node
    cards: tuple[Card, ...]

    def order(self) -> tuple[float, int, str]:
        """Return what sorts nodes, the earliest first."""
        return self.at, self.uncertain, self.node.name


class Timeline:
    """Allocations on nodes, and their ends, with those that one scheduling pass adds."""

    def __init__(
        self,
        nodes: Iterable[Node],
        allocations: Mapping[str, Sequence[queue.Allocation]],
        now: float,
    ) -> None:
        """Args:
        nodes: all nodes.
        allocations: all that is allocated on them, by node.
        now: in the caller's time.
        """
        self.nodes = {node.name: node for node in nodes}
        self._allocations, self._now = allocations, now
        self._added: dict[str, list[queue.Allocation]] = {}
        """Additions of the pass on a node: placements, and allocations to come on reserved cards."""
        self._reserved_until: dict[DeviceId, float] = {}
        """When the reservation of a card starts, for those who reserve later."""

    def add(self, allocation: queue.Allocation) -> None:
        """Add an allocation."""
        self._added.setdefault(allocation.placement.node, []).append(allocation)

    def remove(self, allocation: queue.Allocation) -> None:
        """Remove an allocation that was added."""
        self._added[allocation.placement.node].remove(allocation)

    def reserve(self, cards: Iterable[DeviceId], at: float) -> None:
        """Keep cards, also those that are free before, for a reservation that starts at this time."""
        for card in cards:
            self._reserved_until[card] = max(at, self._reserved_until.get(card, at))

    def earliest(
        self, request: Request, among: frozenset[str] | None = None
    ) -> EarliestStart | None:
        """Return where the request can start first; None if it fits no node that is empty.

        among: names of the eligible nodes, None for all.
        """
        names = self.nodes.keys() if among is None else self.nodes.keys() & among
        starts = (self.start_on(request, self.nodes[name]) for name in names)
        return min(
            (start for start in starts if start is not None), key=EarliestStart.order, default=None
        )

    def by_start(
        self, requests: Sequence[Request], among: frozenset[str] | None = None
    ) -> list[str]:
        """Return the nodes on which each request alone can start, by when the last of them can."""
        names = self.nodes.keys() if among is None else self.nodes.keys() & among
        return [name for _, name in sorted(self.starts_on(requests, names))]

    def starts_on(
        self, requests: Sequence[Request], names: Iterable[str]
    ) -> list[tuple[float, str]]:
        """Return the nodes on which each request alone can start, with the time of the last start."""
        starts = []
        for name in names:
            on_node = [self.start_on(request, self.nodes[name]) for request in requests]
            times = [start.at for start in on_node if start is not None]
            if len(times) == len(on_node):
                starts.append((max(times), name))
        return starts

    def start_on(self, request: Request, node: Node) -> EarliestStart | None:
        """Return when the request can start on this node; None if it does not fit even an empty one."""
        added = self._added.get(node.name, [])
        allocations = [*self._allocations.get(node.name, ()), *added]
        if not request.cards:
            return self._host_start(request, node, allocations)
        cards = availabilities(request, node, allocations)
        if added:
            cards = sorted(map(self._after_reservation, cards), key=CardAvailability.order)
        needed = self._earliest_cards(request, node, cards)
        if needed is None:
            return None
        return EarliestStart(
            max(self._now, needed[-1].at),
            sum(card.uncertain for card in needed),
            node,
            tuple(card.card for card in needed),
        )

    def _host_start(
        self, request: Request, node: Node, allocations: Sequence[queue.Allocation]
    ) -> EarliestStart | None:
        (empty,) = evaluate(EmptyUsage(), request, "binpack", (node,))
        if not isinstance(empty, Fit):
            return None
        host = _when_host(request, node, _in_order(allocations))
        return None if host is None else EarliestStart(max(self._now, host[0]), host[1], node, ())

    def _earliest_cards(
        self, request: Request, node: Node, cards: Sequence[CardAvailability]
    ) -> Sequence[CardAvailability] | None:
        """Return as many cards as are requested, the first that are free and may be together.

        cards: those that fit by themselves, the earliest first.
        """
        if not (request.linked and request.by_links):
            return cards[: request.cards] if len(cards) >= request.cards else None
        for count in range(request.cards, len(cards) + 1):
            distances = replace(node, cards=tuple(card.card for card in cards[:count])).distances
            if not links_missing(request, distances, range(count)):
                chosen = best_cards(request, distances, range(count))
                return [cards[position] for position in chosen]
        return None

    def _after_reservation(self, card: CardAvailability) -> CardAvailability:
        """A card that is free now is kept for its reservation until that has started."""
        until = self._reserved_until.get(card.card.uuid, -inf)
        return CardAvailability(max(card.at, until), card.uncertain + (until == inf), card.card)


def availabilities(
    request: Request, node: Node, allocations: Sequence[queue.Allocation]
) -> list[CardAvailability]:
    """Return when each card of the node is free for the request, the earliest first.

    Cards that are too small are left out. The list is empty if the node's host is too small.
    """
    on_host = needs_host(request, node)
    if on_host:
        (empty,) = evaluate(EmptyUsage(), request, "binpack", (node,))
        if not isinstance(empty, Fit):
            return []
    host = _when_host(request, node, _in_order(allocations)) if on_host else (-inf, 0)
    if host is None:
        return []
    host_at, host_uncertain = host
    available = []
    for card, states in zip(node.cards, card_states(node, allocations), strict=True):
        for at, uncertain, usage in states:
            if fits_card(request, node, card, usage):
                available.append(
                    CardAvailability(max(at, host_at), uncertain + host_uncertain, card)
                )
                break
    return sorted(available, key=CardAvailability.order)


CardState = tuple[float, int, CardUsage]
"""When a state begins, how many allocations without a deadline have ended by then, and what is allocated."""


def card_states(node: Node, allocations: Iterable[queue.Allocation]) -> list[Iterator[CardState]]:
    """Return for each card of the node the states that it goes through as its allocations end."""
    on_card: dict[DeviceId, list[tuple[queue.Allocation, Slice]]] = {
        card.uuid: [] for card in node.cards
    }
    for allocation in _in_order(allocations):
        for piece in allocation.placement.slices:
            if piece.uuid in on_card:
                on_card[piece.uuid].append((allocation, piece))
    return [_states(on_card[card.uuid]) for card in node.cards]


def _states(ending: Sequence[tuple[queue.Allocation, Slice]]) -> Iterator[CardState]:
    # Loops take a third of the time of sum() and max(), and these functions run for each card of a cluster.
    memory = compute = whole = uncertain = 0
    for allocation, piece in ending:
        memory, compute = memory + piece.memory_mib, compute + piece.compute
        whole += allocation.placement.whole
    at, holders = -inf, len(ending)
    for allocation, piece in ending:
        yield at, uncertain, CardUsage(memory, compute, holders, whole)
        if allocation.deadline == inf:
            return
        memory, compute = memory - piece.memory_mib, compute - piece.compute
        holders, whole = holders - 1, whole - allocation.placement.whole
        at, uncertain = max(at, _end(allocation)), uncertain + (allocation.deadline is None)
    yield at, uncertain, NO_USAGE


def _in_order(allocations: Iterable[queue.Allocation]) -> list[queue.Allocation]:
    """Return the allocations as they end, by their deadlines.

    Of those without a deadline the largest come first, so that few must end. Those that stay indefinitely (an
    infinite deadline) come last.
    """
    return sorted(allocations, key=_end_order)


def needs_host(request: Request, node: Node) -> bool:
    """Return whether the request needs CPU or memory that this node counts."""
    cpu = node.cpu_milli is not None and request.cpu_milli > 0
    return cpu or (node.memory_mib is not None and request.host_memory_mib > 0)


def _when_host(
    request: Request, node: Node, ending: Sequence[queue.Allocation]
) -> tuple[float, int] | None:
    """Return when the host, which is large enough, has room; None if never."""
    cpu = sum(allocation.placement.cpu_milli for allocation in ending)
    memory = sum(allocation.placement.host_memory_mib for allocation in ending)
    at, uncertain = -inf, 0
    for allocation in ending:
        if _has_room(cpu, request.cpu_milli, node.cpu_milli) and _has_room(
            memory, request.host_memory_mib, node.memory_mib
        ):
            break
        if allocation.deadline == inf:
            return None
        placement = allocation.placement
        cpu, memory = cpu - placement.cpu_milli, memory - placement.host_memory_mib
        at, uncertain = max(at, _end(allocation)), uncertain + (allocation.deadline is None)
    return at, uncertain


def _has_room(used: int, needed: int, total: int | None) -> bool:
    return total is None or needed == 0 or used + needed <= total


def _end_order(allocation: queue.Allocation) -> tuple[float, bool, int]:
    largest = 0
    for piece in allocation.placement.slices:
        largest = max(largest, piece.memory_mib)
    return _end(allocation), allocation.deadline == inf, -largest


def _end(allocation: queue.Allocation) -> float:
    return inf if allocation.deadline is None else allocation.deadline


T = TypeVar("T")

Steps = Generator[None, None, T]
"""Yields after each step; its return value is the result."""


def complete(steps: Steps[T]) -> T:
    """Take all steps at once. Return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class PassRules:
    """The limits of users in one scheduling pass.

    These rules allow everything; `users.rules` has those of a machine.
    """

    bookings: Sequence["Booked"] = ()
    """Cards that are kept from others for a time, as allocations to come."""

    def rejection(
        self, request: queue.PendingRequest, deadline: float | None
    ) -> Unschedulable | None:
        """Return why a request neither starts nor reserves now; None if it may."""

    def blocked(self, user: str, deadline: float | None) -> frozenset[DeviceId]:
        """Return booked cards that a request of this user with this deadline must not use."""
        del user, deadline
        return frozenset()

    def own_cards(self, user: str) -> frozenset[DeviceId]:
        """Return the cards that are booked for this user now."""
        del user
        return frozenset()

    def other_cards(self, own: frozenset[DeviceId]) -> frozenset[DeviceId]:
        """Return all other cards than these."""
        return own

    def excess(
        self, user: str, placements: tuple[Placement, ...]
    ) -> tuple[Unschedulable, frozenset[DeviceId]] | None:
        """Return why placements are too much for their user, and cards to leave out; None if they are not."""

    def on_placed(self, user: str, placements: tuple[Placement, ...]) -> None:
        """Placements of a user were granted."""

    def on_reserved(
        self, user: str, placements: tuple[Placement, ...], reservation: queue.Reservation
    ) -> None:
        """A request of a user has reserved cards for these placements."""


NO_RULES = PassRules()


@dataclass(frozen=True, slots=True)
class Booked:
    """A booking as an allocation of whole cards that begins later, or has begun.

    Attributes:
        allocation: the cards; its deadline is the booking's end.
        start: when it begins, in the caller's time.
        own: users who may use the cards now.
    """

    allocation: queue.Allocation
    start: float
    own: Collection[str] = ()

    @property
    def cards(self) -> frozenset[DeviceId]:
        """Return the cards."""
        return frozenset(piece.uuid for piece in self.allocation.placement.slices)


MAX_GAPS = 6
"""Times between bookings in which a reservation is tried, before one after all bookings is made."""

MAX_IMPOSSIBLE = 1024
"""The number of requests that `Backfill` remembers to be impossible."""

MAX_RESERVED_DOMAINS = 8
"""Topology domains of which the earliest is reserved, for a gang that must be in one."""

_Shape = tuple[tuple[Request, ...], frozenset[str] | None, bool, Proximity | None]
"""The key of whether requests could ever be placed: they, the eligible nodes, whether on one node, and how
close together."""


def _shape(pending: queue.PendingRequest) -> _Shape:
    return pending.requests, pending.nodes, pending.same_node, pending.proximity


class Backfill:
    """Serves pending requests. depth: the number of requests that reserve cards.

    Those behind them reserve when they have moved up.
    """

    def __init__(self, policy: Policy, depth: int = 4) -> None:
        self.policy, self.depth = policy, depth
        self._impossible: set[_Shape] = set()
        """Requests that could not be placed if nothing were allocated. Only the exact search for gangs is
        long."""

    def forget_impossible(self) -> None:
        """Nodes, or the health of cards, have changed."""
        self._impossible.clear()

    def serve(
        self,
        ordered: Iterable[queue.PendingRequest],
        placer: Placer,
        timeline: Timeline,
        now: float,
        rules: PassRules = NO_RULES,
    ) -> Steps[queue.SchedulingResult]:
        """Place in order what fits now, each on what those before it leave; reserve cards for the others.

        Each step serves one request. Placer and timeline must not change in between.

        Args:
            ordered: the pending requests, the first to be served first; see `queue.queue_order`.
            placer: the nodes, and what is allocated of them. Placements are added.
            timeline: the same nodes and allocations. Placements and reservations are added.
            now: in the caller's time.
            rules: the limits of users.
        """
        current = _SchedulingPass(self, placer, timeline, self._impossible, rules)
        placed: list[tuple[str, tuple[Placement, ...]]] = []
        statuses: list[queue.QueueStatus] = []
        reservations: list[queue.Reservation] = []
        for request in ordered:
            yield
            deadline = None if request.time_limit_s is None else now + request.time_limit_s
            verdict: tuple[Placement, ...] | Unschedulable | None
            verdict, may_reserve = rules.rejection(request, deadline), False
            if verdict is None:
                own = rules.own_cards(request.user)
                blocking = (
                    reservation.cards - own
                    for reservation in reservations
                    if reservation.blocks(deadline)
                )
                blocked = rules.blocked(request.user, deadline).union(*blocking)
                verdict, may_reserve = current.place_within(request, blocked, own)
            if isinstance(verdict, Unschedulable):
                reserves = may_reserve and len(reservations) < self.depth
                reservation = current.reserve_cards(request) if reserves else None
                if reservation is not None:
                    reservations.append(reservation)
                statuses.append(
                    queue.QueueStatus(request.id, len(statuses) + 1, verdict, reservation)
                )
            else:
                for placement in verdict:
                    current.allocate(queue.Allocation(placement, deadline, request.user))
                rules.on_placed(request.user, verdict)
                placed.append((request.id, verdict))
        return queue.SchedulingResult(tuple(placed), tuple(statuses))


@dataclass(frozen=True, slots=True)
class _ReservationOption:
    """Cards that could be reserved, when they are free, and what will be allocated then."""

    cards: tuple[Card, ...]
    at: float
    allocation: queue.Allocation


class _SchedulingPass:
    """One pass over the queue."""

    def __init__(
        self,
        backfill: Backfill,
        placer: Placer,
        timeline: Timeline,
        impossible: set[_Shape],
        rules: PassRules,
    ) -> None:
        self._policy, self._placer, self._timeline = backfill.policy, placer, timeline
        self._impossible, self._rules = impossible, rules
        for booked in rules.bookings:
            timeline.add(booked.allocation)
        self._rejected: dict[tuple[_Shape, frozenset[DeviceId]], Unschedulable] = {}
        """Until something is placed: people submit many equal requests, a gang's search may be long."""

    def allocate(self, allocation: queue.Allocation) -> None:
        """Add an allocation."""
        self._placer.add(allocation.placement)
        self._timeline.add(allocation)
        self._rejected.clear()

    def place_within(
        self,
        pending: queue.PendingRequest,
        blocked: frozenset[DeviceId],
        own: frozenset[DeviceId],
    ) -> tuple[tuple[Placement, ...] | Unschedulable, bool]:
        """Place all of the request or nothing, within the rules. Return also whether it may reserve.

        own: cards that are booked for its user, which are tried first.
        """
        attempts = [blocked | self._rules.other_cards(own), blocked] if own else [blocked]
        too_much: Unschedulable | None = None
        verdict: tuple[Placement, ...] | Unschedulable
        for attempt in attempts:
            without = attempt
            verdict = self.place(pending, without)
            while not isinstance(verdict, Unschedulable):
                excess = self._rules.excess(pending.user, verdict)
                if excess is None:
                    return verdict, True
                # Slices of units are smaller on smaller cards.
                too_much, cards = excess
                without |= cards
                verdict = self.place(pending, without)
        return (verdict, True) if too_much is None else (too_much, False)

    def place(
        self, pending: queue.PendingRequest, blocked: frozenset[DeviceId]
    ) -> tuple[Placement, ...] | Unschedulable:
        """Place all of the request or nothing."""
        key = _shape(pending), blocked
        if key in self._rejected:
            return self._rejected[key]
        verdict = self._place(pending, blocked)
        if isinstance(verdict, Unschedulable):
            self._rejected[key] = verdict
        return verdict

    def _place(
        self, pending: queue.PendingRequest, blocked: frozenset[DeviceId]
    ) -> tuple[Placement, ...] | Unschedulable:
        requests, limits = pending.requests, PlacementLimits(blocked, pending.nodes)
        if len(requests) == 1 and pending.proximity is None:
            single = self._placer.place(requests[0], self._policy, limits)
            return (single,) if isinstance(single, Placement) else single
        if pending.same_node:
            return self._placer.place_on_one_node(requests, self._policy, limits)
        return place_all(self._placer, requests, self._policy, limits, pending.proximity)

    # ---- reservations ----

    def reserve_cards(self, pending: queue.PendingRequest) -> queue.Reservation | None:
        """Reserve the cards that are free first, also against later reservations.

        Return None for a request that could not be placed even if nothing were allocated.
        """
        shape = _shape(pending)
        if shape in self._impossible:
            return None
        options = self._options_between(pending)
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
        reservation = queue.Reservation(cards, at if at < inf else None)
        placements = tuple(option.allocation.placement for option in options)
        self._rules.on_reserved(pending.user, placements, reservation)
        return reservation

    def _options_between(self, pending: queue.PendingRequest) -> list[_ReservationOption]:
        """Return the earliest options that end before the next booking of their cards, or are after all."""
        bookings = self._rules.bookings
        if not bookings:
            return self._options(pending)
        others = [booked for booked in bookings if pending.user not in booked.own]
        limit_s = inf if pending.time_limit_s is None else pending.time_limit_s
        tried = [*range(min(len(others), MAX_GAPS)), len(others)]
        options: list[_ReservationOption] = []
        for count in dict.fromkeys(tried):
            later = others[count:]
            hidden = [*(booked for booked in bookings if pending.user in booked.own), *later]
            for booked in hidden:
                self._timeline.remove(booked.allocation)
            options = self._options(pending)
            for booked in hidden:
                self._timeline.add(booked.allocation)
            cards = {card.uuid for option in options for card in option.cards}
            end = max((option.at for option in options), default=inf) + limit_s
            if options and all(end <= booked.start or not cards & booked.cards for booked in later):
                break
        return options

    def _options(self, pending: queue.PendingRequest) -> list[_ReservationOption]:
        """Return one option for each of its requests; none if it can never be placed."""
        requests, nodes = pending.requests, pending.nodes
        if pending.proximity is not None and pending.proximity.required:
            return self._options_in_one_domain(requests, nodes, pending.proximity)
        if not pending.same_node or len(requests) == 1:
            return self._options_among(requests, nodes)
        for name in self._timeline.by_start(list(dict.fromkeys(requests)), nodes):
            if options := self._options_among(requests, frozenset((name,))):
                return options
        return []

    def _options_in_one_domain(
        self, requests: Sequence[Request], among: frozenset[str] | None, proximity: Proximity
    ) -> list[_ReservationOption]:
        """Return the earliest options of those that are in one domain each."""
        limits = PlacementLimits(among=among)
        search = domain_search(self._placer.emptied(), requests, limits, proximity)
        possible: list[list[_ReservationOption]] = []
        for names in search.required_domains():
            if options := self._options_among(requests, names):
                possible.append(options)
            if len(possible) == MAX_RESERVED_DOMAINS:
                break
        return min(possible, key=lambda options: max(option.at for option in options), default=[])

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
        placements = place_all(empty, requests, self._policy, PlacementLimits(among=among))
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
                queue.Allocation(placement),
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
        cards = start.node.cards if start.cards and needs_host(request, node) else start.cards
        # It does not end to make room for the next request of the same gang.
        return _ReservationOption(cards, start.at, queue.Allocation(fit.placement, deadline=inf))


def held_by_user(allocations: Mapping[str, Sequence[queue.Allocation]]) -> Counter[str]:
    """Return the number of placements of each user. allocations: by node."""
    return Counter(allocation.user for on_node in allocations.values() for allocation in on_node)
