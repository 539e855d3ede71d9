"""Gangs: requests that are placed together or not at all, over cards and nodes, in shared slices.

A reservation covers all members of a gang or none. It holds all its cards from the start, so two gangs never
each hold a part of what the other needs. If a member is still missing when it expires, all of it ends, and
the caller evicts the members that have started: a gang restarts as one.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from fenka.core.evaluate import Fit, Policy, evaluate
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.usage import CardUsage, UsageOverlay, UsageView
from fenka.core.verdict_cache import VerdictCache

SEARCH_LIMIT = 2000
"""Nodes that the exact search evaluates before it gives up, after a fraction of a second."""


def place_gang(
    view: UsageView,
    requests: Sequence[Request],
    policy: Policy,
    nodes: Collection[Node],
    reserved: Collection[DeviceId] = (),
) -> tuple[Placement, ...] | Unschedulable:
    """Return a placement for each request, in their order, that are possible together; or why there are none.

    First the requests are placed one after the other: in their order, then the largest first, by the policy
    and by binpack. If that fails, all distributions are tried, equal cards and equal requests once, until
    SEARCH_LIMIT nodes have been evaluated. So a rejection is certain for small gangs. For large ones on
    fragmented cards it can be wrong; a placement never is.

    Raises:
        KeyError: for an unknown policy.
    """
    by_size = sorted(range(len(requests)), key=lambda number: _size(requests[number]), reverse=True)
    refused = Unschedulable(())
    for order, by in ((range(len(requests)), policy), (by_size, policy), (by_size, "binpack")):
        placed, refusal = _greedy(view, requests, order, by, nodes, reserved)
        if refusal is None:
            return tuple(placed[number] for number in range(len(requests)))
        if not refused.rejections:
            refused = Unschedulable(
                refusal.rejections,
                f"{len(placed)} of the gang's {len(requests)} would fit together",
            )
        if not placed:
            # The largest does not fit even alone.
            return refused
    search = _Search(UsageOverlay(view), [requests[number] for number in by_size], nodes, reserved)
    chosen = search.run()
    if chosen is None:
        return refused
    in_order = sorted(zip(by_size, chosen, strict=True), key=lambda numbered: numbered[0])
    return tuple(placement for _, placement in in_order)


def _size(request: Request) -> tuple[int, int, int, int]:
    # Nodes may have different units; one fixed unit is enough for an order.
    nominal = request.memory.nominal_mib(1024) if request.memory else 0
    return request.cards * request.whole, request.cards, nominal, request.compute


def _greedy(
    view: UsageView,
    requests: Sequence[Request],
    order: Iterable[int],
    policy: Policy,
    nodes: Collection[Node],
    reserved: Collection[DeviceId],
) -> tuple[dict[int, Placement], Unschedulable | None]:
    overlay, verdicts = UsageOverlay(view), VerdictCache(nodes, policy)
    placed: dict[int, Placement] = {}
    for number in order:
        verdict = verdicts.place(overlay, requests[number], reserved)
        if isinstance(verdict, Unschedulable):
            return placed, verdict
        overlay.add(verdict)
        placed[number] = verdict
    return placed, None


class _Search:
    """Searches depth first, the largest request first."""

    def __init__(
        self,
        view: UsageOverlay,
        requests: Sequence[Request],
        nodes: Collection[Node],
        reserved: Collection[DeviceId],
    ) -> None:
        self._view, self._requests, self._reserved = view, requests, reserved
        self._nodes = sorted(nodes, key=lambda node: node.name)
        self._left = SEARCH_LIMIT

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
            self._view.add(placement)
            rest = self.run(number + 1, where if following == [request] else ("", []))
            self._view.remove(placement)
            if rest is not None:
                return [placement, *rest]
            if self._left <= 0:
                return None
        return None

    def _options(self, request: Request) -> Iterator[Placement]:
        for node in self._nodes:
            self._left -= 1
            if self._left < 0:
                return
            (verdict,) = evaluate(self._view, request, "binpack", (node,), self._reserved)
            if isinstance(verdict, Fit):
                yield from self._on(node, request, verdict.cards)

    def _on(self, node: Node, request: Request, cards: Sequence[Card]) -> Iterator[Placement]:
        tried: set[tuple[tuple[object, ...], ...]] = set()
        for chosen in combinations(sorted(cards, key=lambda card: card.index), request.cards):
            self._left -= 1
            if self._left < 0:
                return
            alike = tuple(sorted(self._state(node, card) for card in chosen))
            if alike in tried:
                continue
            tried.add(alike)
            (verdict,) = evaluate(
                self._view, request, "binpack", (replace(node, cards=chosen),), self._reserved
            )
            if isinstance(verdict, Fit):
                yield verdict.placement

    def _state(self, node: Node, card: Card) -> tuple[object, ...]:
        used = self._view.card_usage(node.name, card.uuid)
        held = used.memory_mib, used.compute, used.holders, used.whole
        return card.model, card.memory_mib, card.compute, held


# ---- reservations ----


@dataclass(frozen=True, slots=True)
class GangReservation:
    """The placements of a gang's members. expires_at: when all must have started, in the caller's time."""

    placements: Mapping[str, Placement]
    """By member."""
    expires_at: float
    started: frozenset[str] = field(default_factory=frozenset)

    @property
    def complete(self) -> bool:
        """Return whether all its members have started."""
        return len(self.started) == len(self.placements)


class GangReservations:
    """The reservations of gangs whose members have not all started.

    It is a UsageView over the view that it is given: members that have not started are added to it. Members
    that have started are in the view itself.
    """

    def __init__(self, under: UsageView) -> None:
        self._view, self._reservations = UsageOverlay(under), dict[str, GangReservation]()

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """Return what is allocated of this card, reservations included."""
        return self._view.card_usage(node, device)

    def host_usage(self, node: str) -> tuple[int, int]:
        """Return the CPU (thousandths of a core) and host memory (MiB) allocated, reservations included."""
        return self._view.host_usage(node)

    def generation(self, node: str) -> int:
        """Return a number that changes with the view under this one, and with reservations on this node."""
        return self._view.generation(node)

    def get(self, gang: str) -> GangReservation | None:
        """Return the gang's reservation, if it has one."""
        return self._reservations.get(gang)

    def outstanding(self) -> dict[str, tuple[Placement, ...]]:
        """Return the placements of members that have not started, by gang."""
        return {
            gang: tuple(
                placement
                for member, placement in reservation.placements.items()
                if member not in reservation.started
            )
            for gang, reservation in self._reservations.items()
        }

    def reserve(
        self,
        gang: str,
        members: Mapping[str, Request],
        policy: Policy,
        nodes: Collection[Node],
        expires_at: float,
        reserved: Collection[DeviceId] = (),
    ) -> GangReservation | Unschedulable:
        """Return the gang's reservation, made now if it has none; or why there can be none."""
        if gang in self._reservations:
            return self._reservations[gang]
        placements = place_gang(self, list(members.values()), policy, nodes, reserved)
        if isinstance(placements, Unschedulable):
            return placements
        reservation = GangReservation(dict(zip(members, placements, strict=True)), expires_at)
        for placement in placements:
            self._view.add(placement)
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
        self._view.remove(reservation.placements[member])
        reservation = replace(reservation, started=reservation.started | {member})
        if reservation.complete:
            del self._reservations[gang]
        else:
            self._reservations[gang] = reservation

    def release(self, gang: str) -> frozenset[str]:
        """End a reservation, if there is one. Return its members that have started, which must end too."""
        reservation = self._reservations.pop(gang, None)
        if reservation is None:
            return frozenset()
        for member, placement in reservation.placements.items():
            if member not in reservation.started:
                self._view.remove(placement)
        return reservation.started

    def overdue(self, now: float) -> list[str]:
        """Return the gangs whose reservations have expired."""
        return [
            gang
            for gang, reservation in self._reservations.items()
            if reservation.expires_at <= now
        ]

    def expire(self, now: float) -> dict[str, frozenset[str]]:
        """End the expired reservations. Return by gang the members that have started, which must end too."""
        return {gang: self.release(gang) for gang in self.overdue(now)}
