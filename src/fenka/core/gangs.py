"""Gangs: requests that are placed together or not at all, over cards and nodes, in shared slices.

The reservations of gangs.

A reservation covers all members of a gang or none. It holds all its cards from the start, so two gangs never
each hold a part of what the other needs. If a member is still missing when it expires, all of it ends, and
the caller evicts the members that have started: a gang restarts as one.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple, Protocol

from fenka.core.evaluate import Fit, Policy, evaluate, place, slices_on
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.reasons import NodeRejection, Unschedulable
from fenka.core.request import NEVER, Placement, Request
from fenka.core.topology.domains import DomainSearch, Proximity
from fenka.core.usage import EmptyUsage, UsageOverlay, UsageView

SEARCH_LIMIT = 700
"""The limits of the exact search: nodes that fit one request, and cards on them. That takes 0.1 s at most."""

KINDS_COUNTED = 4
"""Kinds of requests of a gang for which the room is counted, the most frequent first."""

NO_DEVICES: frozenset[DeviceId] = frozenset()


class PlacementLimits(NamedTuple):
    """Nodes and cards that a placement may not use.

    Attributes:
        reserved: cards that are kept for other requests.
        among: names of the eligible nodes, None for all.
    """

    reserved: frozenset[DeviceId] = NO_DEVICES
    among: frozenset[str] | None = None


NO_LIMITS = PlacementLimits()


class Placer(UsageView, Protocol):
    """Nodes with what is allocated of them, on which placements are tried, and released again."""

    def place(
        self, request: Request, policy: Policy, limits: PlacementLimits = NO_LIMITS
    ) -> Placement | Unschedulable:
        """Return the best placement, or why there is none, as `evaluate.place` does."""

    def place_on_one_node(
        self, requests: Sequence[Request], policy: Policy, limits: PlacementLimits = NO_LIMITS
    ) -> tuple[Placement, ...] | Unschedulable:
        """Return placements of all requests on one node: the best one for the first request that fits all."""

    def fits(
        self, request: Request, limits: PlacementLimits = NO_LIMITS
    ) -> Iterator[tuple[Node, Fit]]:
        """Yield the nodes that fit, by name. In between the caller may change the usage and restore it."""

    def room(self, request: Request, limits: PlacementLimits = NO_LIMITS) -> dict[str, int]:
        """Return, for each node that fits, how many such requests have room on it at most.

        The number is exact for requests for one card; others may leave cards that do not go together.
        """

    def add(self, placement: Placement) -> None:
        """Allocate a placement."""

    def remove(self, placement: Placement) -> None:
        """Release a placement."""

    def emptied(self) -> "Placer":
        """Return a placer of the same nodes on which nothing is allocated."""

    def node_named(self, name: str) -> Node:
        """Return one of the nodes."""


class PlainPlacer(UsageOverlay):
    """The definition of a `Placer`: it evaluates each node for each request."""

    def __init__(self, nodes: Iterable[Node], view: UsageView) -> None:
        super().__init__(view)
        self._nodes = tuple(nodes)

    def place(
        self, request: Request, policy: Policy, limits: PlacementLimits = NO_LIMITS
    ) -> Placement | Unschedulable:
        """Return what `evaluate.place` does."""
        return place(self, request, policy, self._among(limits), limits.reserved)

    def place_on_one_node(
        self, requests: Sequence[Request], policy: Policy, limits: PlacementLimits = NO_LIMITS
    ) -> tuple[Placement, ...] | Unschedulable:
        """Place all requests on each node in turn, the best one for the first request first."""
        nodes = self._among(limits)
        verdicts = evaluate(self, requests[0], policy, nodes, limits.reserved)
        fits = [
            (verdict.score, node.name, node)
            for node, verdict in zip(nodes, verdicts, strict=True)
            if isinstance(verdict, Fit)
        ]
        rejections = [verdict for verdict in verdicts if isinstance(verdict, NodeRejection)]
        for _, _, node in sorted(fits, key=lambda fit: fit[:2]):
            placed = place_gang(self, requests, policy, (node,), limits.reserved)
            if not isinstance(placed, Unschedulable):
                return placed
            rejections.append(placed.rejections[0])
        return Unschedulable(tuple(rejections))

    def fits(
        self, request: Request, limits: PlacementLimits = NO_LIMITS
    ) -> Iterator[tuple[Node, Fit]]:
        """Yield the nodes that fit, by name."""
        for node in sorted(self._among(limits), key=lambda node: node.name):
            (verdict,) = evaluate(self, request, "binpack", (node,), limits.reserved)
            if isinstance(verdict, Fit):
                yield node, verdict

    def room(self, request: Request, limits: PlacementLimits = NO_LIMITS) -> dict[str, int]:
        """Count the slices of all cards that fit, and divide the host."""
        room = {}
        for node, fit in self.fits(request, limits):
            slices = sum(
                slices_on(request, node, card, self.card_usage(node.name, card.uuid))
                for card in fit.cards
            )
            counts = [slices // request.cards if request.cards else NEVER]
            cpu, memory = self.host_usage(node.name)
            for needed, used, total in (
                (request.cpu_milli, cpu, node.cpu_milli),
                (request.host_memory_mib, memory, node.memory_mib),
            ):
                if needed and total is not None:
                    counts.append((total - used) // needed)
            room[node.name] = min(counts)
        return room

    def emptied(self) -> "PlainPlacer":
        """Return a placer of the same nodes on which nothing is allocated."""
        return PlainPlacer(self._nodes, EmptyUsage())

    def node_named(self, name: str) -> Node:
        """Return one of the nodes."""
        return next(node for node in self._nodes if node.name == name)

    def _among(self, limits: PlacementLimits) -> Sequence[Node]:
        names = limits.among
        return [node for node in self._nodes if names is None or node.name in names]


def place_gang(
    view: UsageView,
    requests: Sequence[Request],
    policy: Policy,
    nodes: Collection[Node],
    reserved: Collection[DeviceId] = NO_DEVICES,
    proximity: Proximity | None = None,
) -> tuple[Placement, ...] | Unschedulable:
    """Return what `place_all` does on these nodes with this usage."""
    limits = PlacementLimits(frozenset(reserved))
    return place_all(PlainPlacer(nodes, view), requests, policy, limits, proximity)


def place_all(
    placer: Placer,
    requests: Sequence[Request],
    policy: Policy,
    limits: PlacementLimits = NO_LIMITS,
    proximity: Proximity | None = None,
) -> tuple[Placement, ...] | Unschedulable:
    """Return a placement for each request, in their order, that are possible together; or why there are none.

    First the requests are placed one after the other: in their order, then the largest first, by the policy
    and by binpack. If that fails, all distributions are tried, equal cards and equal requests once, until
    SEARCH_LIMIT is reached. So a rejection is certain for small gangs. For large ones on fragmented cards it
    can be wrong; a placement never is. The placer's usage is afterwards as it was.

    Args:
        placer: the nodes, and what is allocated of them.
        requests: those of the gang's members.
        policy: a name in SCORES.
        limits: what no member may use.
        proximity: how close together the members are placed, None if that does not matter. Sets of close
            nodes are tried first. Only if it is required, a gang is rejected that has room.

    Raises:
        KeyError: for an unknown policy.
    """
    if proximity is not None:
        placed = _place_close(placer, requests, policy, limits, proximity)
        if placed is not None:
            return placed
    in_turn, refused = _in_any_order(placer, requests, policy, limits)
    if refused is None or not in_turn:
        return refused or _along_links(placer, requests, in_turn, proximity)
    chosen, _ = _search(placer, requests, limits, SEARCH_LIMIT)
    return _along_links(placer, requests, chosen, proximity) if chosen else refused


def _place_close(
    placer: Placer,
    requests: Sequence[Request],
    policy: Policy,
    limits: PlacementLimits,
    proximity: Proximity,
) -> tuple[Placement, ...] | Unschedulable | None:
    """Return what `place_all` does on close nodes; None if others must be tried too."""
    search = domain_search(placer, requests, limits, proximity)
    for names in search.candidates():
        placed, refused = _in_any_order(placer, requests, policy, limits._replace(among=names))
        if refused is None:
            return _along_links(placer, requests, placed, proximity)
    if not proximity.required:
        return None
    left = SEARCH_LIMIT
    for names in search.required_domains():
        chosen, left = _search(placer, requests, limits._replace(among=names), left)
        if chosen:
            return _along_links(placer, requests, chosen, proximity)
    domain = search.roomiest()
    if domain is None:
        return Unschedulable(hint=f"no node for it has the label {proximity.label}")
    names = proximity.topology.nodes_of(domain)
    within = limits._replace(among=names if limits.among is None else names & limits.among)
    placed, refused = _in_any_order(placer, requests, policy, within)
    if refused is None:
        # So many domains have room by the bound that this one was not tried.
        return _along_links(placer, requests, placed, proximity)
    return refused.with_hint(
        f"all must be in one {proximity.label}, and {domain[-1]} has the most room: {refused.hint}"
    )


def domain_search(
    placer: Placer, requests: Sequence[Request], limits: PlacementLimits, proximity: Proximity
) -> DomainSearch:
    """Return the search for close nodes that have room for these requests."""
    wanted = Counter(requests)
    rooms = {request: placer.room(request, limits) for request in wanted}
    return DomainSearch(proximity, wanted, rooms)


def _in_any_order(
    placer: Placer, requests: Sequence[Request], policy: Policy, limits: PlacementLimits
) -> tuple[list[Placement], Unschedulable | None]:
    """Place the requests one after the other, in several orders.

    Returns:
        All placements; or, with a reason, as many as the last order has placed. If it has placed none, no
        search finds more.
    """
    by_size = _by_size(requests)
    refused: Unschedulable | None = None
    placed: dict[int, Placement] = {}
    for order, by in ((range(len(requests)), policy), (by_size, policy), (by_size, "binpack")):
        placed, refusal = _one_by_one(placer, requests, order, by, limits)
        if refusal is None:
            return [placed[number] for number in range(len(requests))], None
        if refused is None:
            refused = refusal.with_hint(
                f"{len(placed)} of the gang's {len(requests)} would fit together"
            )
            if not _may_have_room(placer, requests, limits):
                # No other order helps, and no search.
                return [], refused
        if not placed:
            break
    return list(placed.values()), refused


def _may_have_room(placer: Placer, requests: Sequence[Request], limits: PlacementLimits) -> bool:
    """Return whether there may be room for all requests of each kind, beside none of the others."""
    return all(
        sum(placer.room(request, limits).values()) >= count
        for request, count in Counter(requests).most_common(KINDS_COUNTED)
    )


def _search(
    placer: Placer, requests: Sequence[Request], limits: PlacementLimits, most: int
) -> tuple[list[Placement], int]:
    """Try all distributions. Return the placements, none if there are none, and the steps that are left."""
    by_size = _by_size(requests)
    search = _GangSearch(placer, [requests[number] for number in by_size], limits, most)
    chosen = search.run()
    in_order = sorted(zip(by_size, chosen or (), strict=bool(chosen)), key=lambda pair: pair[0])
    return [placement for _, placement in in_order], search.left


def _by_size(requests: Sequence[Request]) -> list[int]:
    """Return the numbers of the requests, the largest request first."""
    return sorted(
        range(len(requests)), key=lambda number: request_size(requests[number]), reverse=True
    )


def _along_links(
    placer: Placer,
    requests: Sequence[Request],
    placements: Sequence[Placement],
    proximity: Proximity | None = None,
) -> tuple[Placement, ...]:
    """Return the placements with those of equal requests exchanged, so that the next one is the nearest.

    Nodes follow each other by domain and name. On each of them the first cards of the placements form a ring.
    """
    by_domain = proximity.topology.order if proximity else None
    by_request: dict[Request, list[int]] = {}
    for number, request in enumerate(requests):
        if request.cards:
            by_request.setdefault(request, []).append(number)
    result = list(placements)
    for numbers in by_request.values():
        by_node: dict[str, list[Placement]] = {}
        for number in numbers:
            by_node.setdefault(placements[number].node, []).append(placements[number])
        in_order = [
            placement
            for name in sorted(by_node, key=by_domain)
            for placement in _ring(placer.node_named(name), by_node[name])
        ]
        for number, placement in zip(numbers, in_order, strict=True):
            result[number] = placement
    return tuple(result)


def _ring(node: Node, placements: list[Placement]) -> list[Placement]:
    """Return placements on one node in the order of a ring, from the one with the first card on."""
    position = {card.uuid: place for place, card in enumerate(node.cards)}
    on_card: dict[int, list[Placement]] = {}
    for placement in sorted(placements, key=lambda placement: position[placement.slices[0].uuid]):
        on_card.setdefault(position[placement.slices[0].uuid], []).append(placement)
    distances = node.distances
    cards = tuple(on_card)
    order = cards
    if distances is not None and len(cards) > 2:
        from fenka.core.topology.card_links import ring

        order = ring(distances, cards)
    return [placement for card in order for placement in on_card[card]]


def first_refusal(
    view: UsageView,
    requests: Sequence[Request],
    policy: Policy,
    node: Node,
    reserved: Collection[DeviceId] = NO_DEVICES,
) -> NodeRejection | None:
    """Return the reasons that `place_gang` gives if it rejects these requests on this node.

    They are those of the first request that has no room beside the ones before it; None if all have.
    """
    placer, limits = PlainPlacer((node,), view), PlacementLimits(frozenset(reserved))
    _, refusal = _one_by_one(placer, requests, range(len(requests)), policy, limits)
    return None if refusal is None else refusal.rejections[0]


def request_size(request: Request) -> tuple[int, int, int, int]:
    """Return what sorts requests by size."""
    # Nodes may have different units; one fixed unit is enough for an order.
    nominal = request.memory.nominal_mib(1024) if request.memory else 0
    return request.cards * request.whole, request.cards, nominal, request.compute


def _one_by_one(
    placer: Placer,
    requests: Sequence[Request],
    order: Iterable[int],
    policy: Policy,
    limits: PlacementLimits,
) -> tuple[dict[int, Placement], Unschedulable | None]:
    placed: dict[int, Placement] = {}
    refusal: Unschedulable | None = None
    for number in order:
        verdict = placer.place(requests[number], policy, limits)
        if isinstance(verdict, Unschedulable):
            refusal = verdict
            break
        placer.add(verdict)
        placed[number] = verdict
    for placement in reversed(placed.values()):
        placer.remove(placement)
    return placed, refusal


class _GangSearch:
    """Searches depth first, the largest request first."""

    def __init__(
        self, placer: Placer, requests: Sequence[Request], limits: PlacementLimits, most: int
    ) -> None:
        """most: the number of steps, of which `left` are left."""
        self._placer, self._requests, self._limits = placer, requests, limits
        self.left = most

    def run(
        self, number: int = 0, least: tuple[str, list[int]] = ("", [])
    ) -> list[Placement] | None:
        """Return placements of the requests from this one on. least: where an equal one before it is."""
        if number == len(self._requests):
            return []
        request = self._requests[number]
        for placement in self._options(request):
            where = placement.node, [piece.card for piece in placement.slices]
            if where < least:
                continue
            following = self._requests[number + 1 : number + 2]
            self._placer.add(placement)
            rest = self.run(number + 1, where if following == [request] else ("", []))
            self._placer.remove(placement)
            if rest is not None:
                return [placement, *rest]
            if self.left <= 0:
                return None
        return None

    def _options(self, request: Request) -> Iterator[Placement]:
        for node, fit in self._placer.fits(request, self._limits):
            self.left -= 1
            if self.left < 0:
                return
            yield from self._on(node, request, fit.cards)

    def _on(self, node: Node, request: Request, cards: Sequence[Card]) -> Iterator[Placement]:
        tried: set[tuple[object, ...]] = set()
        for chosen in combinations(sorted(cards, key=lambda card: card.rank), request.cards):
            self.left -= 1
            if self.left < 0:
                return
            part = replace(node, cards=chosen)
            alike = (
                *sorted(self._state(node, card) for card in chosen),
                bytes(sorted(part.distances or b"")) if request.linked else b"",
            )
            if alike in tried:
                continue
            tried.add(alike)
            (verdict,) = evaluate(self._placer, request, "binpack", (part,), self._limits.reserved)
            if isinstance(verdict, Fit):
                yield verdict.placement

    def _state(self, node: Node, card: Card) -> tuple[object, ...]:
        used = self._placer.card_usage(node.name, card.uuid)
        held = used.memory_mib, used.compute, used.holders, used.whole
        size = card.memory_mib, card.unleased_mib, card.drawn_mib, card.compute
        return card.model, card.profile, card.divided, size, held


@dataclass(frozen=True, slots=True)
class GangReservation:
    """The placements of a gang's members. expires_at: when all must have started, in the caller's time."""

    placements: Mapping[str, Placement]
    """By member."""
    expires_at: float
    started: frozenset[str] = field(default_factory=frozenset)

    @property
    def outstanding(self) -> tuple[Placement, ...]:
        """Return the placements of members that have not started."""
        return tuple(
            placement for name, placement in self.placements.items() if name not in self.started
        )


class GangReservations:
    """The reservations of gangs whose members have not all started.

    Attributes:
        usage: the view that it is given, with the members added that have not started. Members that have
            started are in the view itself.
    """

    def __init__(self, under: UsageView) -> None:
        self.usage = UsageOverlay(under)
        self._reservations: dict[str, GangReservation] = {}

    def get(self, gang: str) -> GangReservation | None:
        """Return the gang's reservation, if it has one."""
        return self._reservations.get(gang)

    def outstanding(self) -> dict[str, tuple[Placement, ...]]:
        """Return the placements of members that have not started, by gang."""
        return {gang: reservation.outstanding for gang, reservation in self._reservations.items()}

    def reserve(  # noqa: PLR0913
        self,
        gang: str,
        members: Mapping[str, Request],
        policy: Policy,
        placer: Placer,
        expires_at: float,
        limits: PlacementLimits = NO_LIMITS,
        *,
        fixed: Mapping[str, Placement] | None = None,
        proximity: Proximity | None = None,
    ) -> GangReservation | Unschedulable:
        """Return the gang's reservation, made now if it has none; or why there can be none.

        Args:
            gang: its key.
            members: their requests.
            policy: a name in SCORES.
            placer: the nodes, with `usage`.
            expires_at: when all members must have started, in the caller's time.
            limits: what no member may use.
            fixed: placements of members that are not to be placed elsewhere. They are possible together.
            proximity: how close together the others are placed.
        """
        if gang in self._reservations:
            return self._reservations[gang]
        fixed = fixed or {}
        rest = {name: request for name, request in members.items() if name not in fixed}
        for placement in fixed.values():
            placer.add(placement)
        placed = place_all(placer, list(rest.values()), policy, limits, proximity)
        for placement in fixed.values():
            placer.remove(placement)
        if isinstance(placed, Unschedulable):
            return placed
        placements = {**fixed, **dict(zip(rest, placed, strict=True))}
        reservation = GangReservation(placements, expires_at)
        for placement in placements.values():
            self.usage.add(placement)
        self._reservations[gang] = reservation
        return reservation

    def mark_started(self, gang: str, member: str) -> None:
        """Record that a member has started and is in the view itself from now on.

        The reservation ends with the last member.

        Raises:
            KeyError: if the gang or the member has no reservation.
        """
        reservation = self._reservations[gang]
        if member in reservation.started:
            return
        self.usage.remove(reservation.placements[member])
        reservation = replace(reservation, started=reservation.started | {member})
        self._reservations[gang] = reservation
        if not reservation.outstanding:
            del self._reservations[gang]

    def release(self, gang: str) -> None:
        """End a reservation, if there is one. Its members that have started must end too."""
        reservation = self._reservations.pop(gang, None)
        for placement in reservation.outstanding if reservation else ():
            self.usage.remove(placement)

    def overdue(self, now: float) -> list[str]:
        """Return the gangs whose reservations have expired."""
        return [
            gang
            for gang, reservation in self._reservations.items()
            if reservation.expires_at <= now
        ]
