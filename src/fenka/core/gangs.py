"""Gangs: requests that are placed together or not at all, over cards and nodes, in shared slices.

A plan is whole or nothing. It holds all its cards from the moment it is made, so two gangs never each hold
a part of what the other needs; and it ends whole: when its time is over and a member is still missing, all
of it is let go, the members that started included (the caller evicts them: a gang restarts as one).
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
"""Nodes that the exact search judges before it gives up: a fraction of a second."""


def place_gang(
    view: UsageView,
    requests: Sequence[Request],
    policy: Policy,
    nodes: Collection[Node],
    reserved: Collection[DeviceId] = (),
) -> tuple[Placement, ...] | Unschedulable:
    """A placement for each request, in their order, so that all hold at once; or why there is none.

    First one after the other, as if alone: in their order, then the largest first, by the policy and by
    binpack. Where that fails all choices are tried in turn, equal cards and equal requests once, until
    BUDGET nodes have been judged. So a no is certain for small gangs; for large ones on fragmented cards it
    can be wrong, a yes never is. Raises KeyError for an unknown policy.
    """
    by_size = sorted(range(len(requests)), key=lambda number: _size(requests[number]), reverse=True)
    refused = Unschedulable(())
    for order, by in ((range(len(requests)), policy), (by_size, policy), (by_size, "binpack")):
        found, refusal = _greedy(view, requests, order, by, nodes, reserved)
        if refusal is None:
            return tuple(found[number] for number in range(len(requests)))
        if not refused.rejections:
            refused = Unschedulable(
                refusal.rejections,
                f"{len(found)} of the gang's {len(requests)} would fit together",
            )
        if not found:
            # The largest does not even fit alone.
            return refused
    search = _Search(UsageOverlay(view), [requests[number] for number in by_size], nodes, reserved)
    chosen = search.run()
    if chosen is None:
        return refused
    return tuple(it for _, it in sorted(zip(by_size, chosen, strict=True), key=lambda it: it[0]))


def _size(request: Request) -> tuple[int, int, int, int]:
    # Nodes of different units order amounts in their own units differently: any fixed unit does for an order.
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
    stacked, verdicts, found = (
        UsageOverlay(view),
        VerdictCache(nodes, policy),
        dict[int, Placement](),
    )
    for number in order:
        verdict = verdicts.place(stacked, requests[number], reserved)
        if isinstance(verdict, Unschedulable):
            return found, verdict
        stacked.add(verdict)
        found[number] = verdict
    return found, None


class _Search:
    """Depth first, the largest request first."""

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
        """Placements of the requests from this one on. `least`: where an equal one before it went."""
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


# ---- plans that hold ----


@dataclass(frozen=True, slots=True)
class GangReservation:
    """Where a gang's members go. expires_at: in the caller's time, until all have started."""

    placements: Mapping[str, Placement]
    """By member."""
    expires_at: float
    started: frozenset[str] = field(default_factory=frozenset)

    @property
    def complete(self) -> bool:
        """All its members have started."""
        return len(self.started) == len(self.placements)


class GangReservations:
    """The gangs that were planned and have not all started. Their cards are held from plan to start.

    A View over the world's: what is planned for members that have not started counts as held, what has
    started is in the world's own record.
    """

    def __init__(self, world: UsageView) -> None:
        self._view, self._plans = UsageOverlay(world), dict[str, GangReservation]()

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """Return what is allocated of this card, reservations included."""
        return self._view.card_usage(node, device)

    def host_usage(self, node: str) -> tuple[int, int]:
        """CPU (thousandths of a core) and host memory (MiB) held on this node, by plans too."""
        return self._view.host_usage(node)

    def generation(self, node: str) -> int:
        """Return a number that changes with the view under this one, and with reservations on this node."""
        return self._view.generation(node)

    def get(self, gang: str) -> GangReservation | None:
        """Of this gang, if it has one."""
        return self._plans.get(gang)

    def outstanding(self) -> dict[str, tuple[Placement, ...]]:
        """Of members that have not started, by gang."""
        return {
            gang: tuple(it for member, it in plan.placements.items() if member not in plan.started)
            for gang, plan in self._plans.items()
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
        """The gang's plan, made now if it has none; it holds from here on. Or why there can be none."""
        if gang in self._plans:
            return self._plans[gang]
        found = place_gang(self, list(members.values()), policy, nodes, reserved)
        if isinstance(found, Unschedulable):
            return found
        plan = GangReservation(dict(zip(members, found, strict=True)), expires_at)
        for placement in found:
            self._view.add(placement)
        self._plans[gang] = plan
        return plan

    def mark_started(self, gang: str, member: str) -> None:
        """The member is where it was planned, and in the world's record from now on.

        The plan ends with the last one. Raises KeyError where that was not planned.
        """
        plan = self._plans[gang]
        if member in plan.started:
            return
        self._view.remove(plan.placements[member])
        plan = replace(plan, started=plan.started | {member})
        if plan.complete:
            del self._plans[gang]
        else:
            self._plans[gang] = plan

    def release(self, gang: str) -> frozenset[str]:
        """End the plan, if there is one: its members that have started, who must go with it."""
        plan = self._plans.pop(gang, None)
        if plan is None:
            return frozenset()
        for member, placement in plan.placements.items():
            if member not in plan.started:
                self._view.remove(placement)
        return plan.started

    def overdue(self, now: float) -> list[str]:
        """Gangs whose plans have waited too long."""
        return [gang for gang, plan in self._plans.items() if plan.expires_at <= now]

    def expire(self, now: float) -> dict[str, frozenset[str]]:
        """Drop the plans whose time is over: by gang, the members that have started and must go too."""
        return {gang: self.release(gang) for gang in self.overdue(now)}
