"""The queue of a cluster: by priority and time, fair between users, with backfill.

A waiter that does not fit *names* the cards it will get: the cheapest set, by when enough of it will be
free. Those behind it use other cards; the named ones only if they prove that they end before it starts. So
a stream of small requests does not starve a large one, and a large one does not empty the cluster.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from fenka.core.evaluate import Fit, Policy, evaluate, fits_card
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
from fenka.core.request import Placement, Request, Slice
from fenka.core.usage import NO_USAGE, CardUsage, EmptyUsage, UsageOverlay, UsageTotals, UsageView
from fenka.core.verdict_cache import MAX_SHAPES, VerdictCache


class Backfill:
    """Serves the waiting. What it remembers are answers that have not changed since, nothing else.

    depth: so many of the waiters that do not fit name cards. The others are held up by nothing but their
    order, and name cards once they have moved up.
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
        self._no_uses = UsageHistory(self._fairness)
        self._verdicts, self._ends = VerdictCache(self._nodes, policy), _AvailabilityCache()

    def set_nodes(self, nodes: Sequence[Node]) -> None:
        """The nodes, or the health of their cards, are these from now on."""
        self._nodes = tuple(nodes)
        self._ends.never.clear()
        for name in self._verdicts.set_nodes(self._nodes):
            self._ends.forget(name)

    def serve(
        self,
        waiting: Collection[PendingRequest],
        held: Iterable[Allocation],
        now: float,
        usage: UsageView | None = None,
        uses: UsageHistory | None = None,
    ) -> SchedulingResult:
        """Place in order what fits now, each on what those before it leave; name cards for who does not.

        usage: what `held` adds up to, from whoever keeps that anyway. Nodes whose generation there is the
        same as in the last call are not judged again. uses: what users have had.
        """
        if not waiting:
            return SchedulingResult((), ())
        turn = _SchedulingPass(self._nodes, self._policy, self._verdicts, self._ends, now)
        turns = turn.begin(held, usage)
        placed: list[tuple[str, tuple[Placement, ...]]] = []
        standings: list[QueueStatus] = []
        reservations: list[Reservation] = []
        past = history_lookup(turns, uses or self._no_uses, now)
        for it in queue_order(waiting, past, self._fairness, now):
            deadline = None if it.time_limit_s is None else now + it.time_limit_s
            barred = frozenset[DeviceId]().union(
                *(r.cards for r in reservations if r.blocks(deadline))
            )
            verdict = turn.place(it, barred)
            if isinstance(verdict, Unschedulable):
                reservation = turn.reserve_cards(it) if len(reservations) < self._depth else None
                if reservation is not None:
                    reservations.append(reservation)
                standings.append(QueueStatus(it.id, len(standings) + 1, verdict, reservation))
            else:
                for placement in verdict:
                    turn.hold(Allocation(placement, deadline, it.user))
                placed.append((it.id, verdict))
        return SchedulingResult(tuple(placed), tuple(standings))


_Shape = tuple[tuple[Request, ...], frozenset[DeviceId], frozenset[str] | None, bool]
"""What is asked for, cards that are barred for it, the nodes to which it may go, and whether to one alone."""

MAX_TRIED_NODES = 64
"""Nodes on which what goes together is tried out: those on which each of it fits alone, the best first."""


class _SchedulingPass:
    """One serving: what is held, by whom and until when, as placements come to it."""

    def __init__(
        self,
        nodes: Sequence[Node],
        policy: Policy,
        verdicts: VerdictCache,
        ends: "_AvailabilityCache",
        now: float,
    ) -> None:
        self._nodes, self._policy, self._now = nodes, policy, now
        self._verdicts, self._ends = verdicts, ends
        self._usage = UsageOverlay(EmptyUsage())
        self._by_node: dict[str, list[Allocation]] = {}
        self._named: dict[str, list[Allocation]] = {}
        """What will hold named cards, by node."""
        self._barred: dict[DeviceId, float] = {}
        """Until when named cards, by UUID, are kept from those who name cards later."""
        self._changed: dict[str, dict[Request, list[_CardAvailability]]] = {}
        """Costs on nodes that are no more as they were when the turn began."""
        self._refused: dict[_Shape, tuple[int, Unschedulable]] = {}
        self._placed = 0

    def begin(self, held: Iterable[Allocation], usage: UsageView | None) -> dict[str, int]:
        """Take in what is held; how many placements each user has."""
        users: dict[str, int] = {}
        totals = UsageTotals()
        for it in held:
            if usage is None:
                totals.add(it.placement)
            self._by_node.setdefault(it.placement.node, []).append(it)
            users[it.user] = users.get(it.user, 0) + 1
        self._usage = UsageOverlay(usage or totals)
        self._ends.renew(self._by_node)
        return users

    def hold(self, held: Allocation) -> None:
        """From now on."""
        node = held.placement.node
        self._usage.add(held.placement)
        self._by_node.setdefault(node, []).append(held)
        self._changed[node] = {}
        self._placed += 1

    def place(
        self, waiting: PendingRequest, barred: frozenset[DeviceId]
    ) -> tuple[Placement, ...] | Unschedulable:
        """All that it asks for or nothing, on what is held now."""
        requests = waiting.requests
        shape = requests, barred, waiting.nodes, waiting.same_node
        # Who wants the same is refused for the same reasons until something else is placed.
        known = self._refused.get(shape)
        if known is not None and known[0] == self._placed:
            return known[1]
        verdict: tuple[Placement, ...] | Unschedulable
        if len(requests) == 1:
            found = self._verdicts.place(self._usage, requests[0], barred, waiting.nodes)
            verdict = (found,) if isinstance(found, Placement) else found
        elif waiting.same_node:
            verdict = self._place_together(waiting, barred)
        else:
            nodes = waiting.eligible_nodes(self._nodes)
            verdict = place_gang(self._usage, requests, self._policy, nodes, barred)
        if isinstance(verdict, Unschedulable):
            self._refused[shape] = self._placed, verdict
        return verdict

    def _place_together(
        self, waiting: PendingRequest, barred: frozenset[DeviceId]
    ) -> tuple[Placement, ...] | Unschedulable:
        """All of it on one node, the best one by its first request. A no can be wrong beyond TRIES nodes."""
        fits: dict[str, tuple[tuple[float, ...], str, Node]] = {}
        rejections: dict[str, NodeRejection] = {}
        for request in dict.fromkeys(waiting.requests):
            judged = self._verdicts.evaluate(self._usage, request, barred, waiting.nodes)
            for node, verdict in judged:
                if isinstance(verdict, NodeRejection):
                    rejections.setdefault(node.name, verdict)
                else:
                    fits.setdefault(node.name, (verdict.score, node.name, node))
        likely = sorted(fit for name, fit in fits.items() if name not in rejections)
        for _, name, node in likely[:MAX_TRIED_NODES]:
            found = place_gang(self._usage, waiting.requests, self._policy, (node,), barred)
            if not isinstance(found, Unschedulable):
                return found
            rejections[name] = found.rejections[0]
        return Unschedulable(tuple(rejections.values()))

    def reserve_cards(self, waiting: PendingRequest) -> Reservation | None:
        """The cheapest cards for it, kept in mind as its own for those who name cards later.

        None for who could not even be placed if nothing were held.
        """
        shape = waiting.requests, frozenset[DeviceId](), waiting.nodes, waiting.same_node
        if shape in self._ends.never:
            return None
        nodes = waiting.eligible_nodes(self._nodes)
        choices: list[_ReservationOption] = []
        one_node = waiting.same_node and len(waiting.requests) > 1
        for among in self._each_alone(waiting, nodes) if one_node else (nodes,):
            choices = self._choose(waiting.requests, among)
            if choices:
                break
        if not choices:
            if len(self._ends.never) > MAX_SHAPES:
                self._ends.never.clear()
            self._ends.never.add(shape)
            return None
        at = max(choice.at for choice in choices)
        known = at < inf and waiting.time_limit_s is not None
        deadline = at + (waiting.time_limit_s or 0) if known else None
        for choice in choices:
            self._name(replace(choice, held=replace(choice.held, deadline=deadline)))
        cards = frozenset(card.uuid for choice in choices for card in choice.cards)
        for uuid in cards:
            self._barred[uuid] = max(at, self._barred.get(uuid, at))
        return Reservation(cards, at if at < inf else None)

    def _choose(
        self, requests: Sequence[Request], nodes: Sequence[Node]
    ) -> "list[_ReservationOption]":
        """The cheapest for each on what those before it leave; none if they could never be there together."""
        choices: list[_ReservationOption] = []
        for request in requests:
            choice = self._cheapest(request, nodes)
            if choice is None:
                break
            # None of them goes to make room for the next.
            choices.append(replace(choice, held=replace(choice.held, deadline=inf)))
            self._name(choices[-1])
        for choice in choices:
            self._unname(choice)
        if len(choices) == len(requests):
            return choices
        # One after the other they do not find room; perhaps another way.
        if len(requests) == 1:
            return []
        found = place_gang(EmptyUsage(), requests, self._policy, nodes)
        if isinstance(found, Unschedulable):
            return []
        cards = {(node.name, card.uuid): card for node in nodes for card in node.cards}
        return [
            _ReservationOption(
                tuple(cards[it.node, piece.uuid] for piece in it.slices), inf, Allocation(it)
            )
            for it in found
        ]

    def _each_alone(self, waiting: PendingRequest, nodes: Iterable[Node]) -> list[tuple[Node]]:
        """Nodes one by one, the first where each of the requests alone would start first."""
        priced = []
        for node in nodes:
            found = [self._cheapest(it, (node,)) for it in dict.fromkeys(waiting.requests)]
            ats = [it.at for it in found if it is not None]
            if len(ats) == len(found):
                priced.append((max(ats), node.name, node))
        return [(node,) for _, _, node in sorted(priced, key=lambda it: it[:2])]

    def _name(self, choice: "_ReservationOption") -> None:
        self._named.setdefault(choice.held.placement.node, []).append(choice.held)
        self._changed[choice.held.placement.node] = {}

    def _unname(self, choice: "_ReservationOption") -> None:
        self._named[choice.held.placement.node].remove(choice.held)
        self._changed[choice.held.placement.node] = {}

    def _cheapest(self, request: Request, nodes: Iterable[Node]) -> "_ReservationOption | None":
        known = self._ends.of_shape(request)
        best: tuple[tuple[float, int, str], Node, list[_CardAvailability]] | None = None
        for node in nodes:
            mine = self._changed.get(node.name)
            costs = known.get(node.name) if mine is None else mine.get(request)
            if costs is None:
                held = [*self._by_node.get(node.name, ()), *self._named.get(node.name, ())]
                costs = _costs(request, node, held)
                if mine is None:
                    known[node.name] = costs
                else:
                    costs = mine[request] = self._after_bars(costs)
            if len(costs) < request.cards:
                continue
            needed = costs[: request.cards]
            at = max(self._now, needed[-1].at)
            price = at, sum(it.uncertain for it in needed), node.name
            if best is None or price < best[0]:
                best = price, node, needed
        if best is None:
            return None
        (at, _, _), node, needed = best
        cards = tuple(it.card for it in needed)
        (alone,) = evaluate(EmptyUsage(), request, self._policy, (replace(node, cards=cards),))
        assert isinstance(alone, Fit)
        named = node.cards if _on_host(request, node) else cards
        return _ReservationOption(named, at, Allocation(alone.placement))

    def _after_bars(self, costs: "list[_CardAvailability]") -> "list[_CardAvailability]":
        """Also a card that would do now is kept for who named it, until that has started."""
        barred = [(it, self._barred.get(it.card.uuid, -inf)) for it in costs]
        return sorted(
            (
                _CardAvailability(max(it.at, until), it.uncertain + (until == inf), it.card)
                for it, until in barred
            ),
            key=_CardAvailability.order,
        )


class _AvailabilityCache:
    """Remembers what waiting for cards comes to, for nodes that the same hold as before."""

    def __init__(self) -> None:
        self.never: set[_Shape] = set()
        """What could not be placed if nothing were held."""
        self._held: dict[str, list[Allocation]] = {}
        self._known: OrderedDict[Request, dict[str, list[_CardAvailability]]] = OrderedDict()

    def renew(self, held: Mapping[str, Sequence[Allocation]]) -> None:
        """Forget the nodes on which others hold something, or until other times, than before."""
        changed = [
            name for name in self._held.keys() | held if self._held.get(name) != held.get(name)
        ]
        for name in changed:
            self.forget(name)
        # Copies: the turn goes on to add to its own.
        self._held.update((name, list(held[name])) for name in changed if name in held)
        for name in self._held.keys() - held.keys():
            del self._held[name]

    def forget(self, node: str) -> None:
        """Its cards may be others now."""
        for by_node in self._known.values():
            by_node.pop(node, None)

    def of_shape(self, request: Request) -> "dict[str, list[_CardAvailability]]":
        """By node, the costs of its cards, the earliest first."""
        by_node = self._known.setdefault(request, {})
        self._known.move_to_end(request)
        if len(self._known) > MAX_SHAPES:
            self._known.popitem(last=False)
        return by_node


@dataclass(frozen=True, slots=True)
class _CardAvailability:
    """When a card will do, and after how many ends that nobody can tell (then `at` is infinite)."""

    at: float
    uncertain: int
    card: Card

    def order(self) -> tuple[float, int, int]:
        """The cheapest first."""
        return self.at, self.uncertain, self.card.index


@dataclass(frozen=True, slots=True)
class _ReservationOption:
    """Cards named, when they will do, and what will hold them then."""

    cards: tuple[Card, ...]
    at: float
    held: Allocation


def _costs(request: Request, node: Node, held: Sequence[Allocation]) -> list[_CardAvailability]:
    """Of the node's cards that could do, the earliest first; empty if the node cannot."""
    on_host = _on_host(request, node)
    if on_host:
        (alone,) = evaluate(EmptyUsage(), request, "binpack", (node,))
        if not isinstance(alone, Fit):
            return []
    # They go as their time comes; of those whose end nobody can tell the largest first, so that they are few.
    # Who stays for ever (`deadline` infinite) comes last.
    going = sorted(held, key=lambda it: (_end(it), it.deadline == inf, -_largest(it)))
    on_card: dict[DeviceId, list[tuple[Allocation, Slice]]] = {card.uuid: [] for card in node.cards}
    for it in going:
        for piece in it.placement.slices:
            if piece.uuid in on_card:
                on_card[piece.uuid].append((it, piece))
    host = _when_host(request, node, going) if on_host else (-inf, 0)
    if host is None:
        return []
    (host_at, host_uncertain), costs = host, []
    for card in node.cards:
        found = _when(request, node, card, on_card[card.uuid])
        if found is not None:
            costs.append(_CardAvailability(max(found[0], host_at), found[1] + host_uncertain, card))
    return sorted(costs, key=_CardAvailability.order)


def _when(
    request: Request, node: Node, card: Card, going: Sequence[tuple[Allocation, Slice]]
) -> tuple[float, int] | None:
    """When the card will do; None: never."""
    memory = sum(piece.memory_mib for _, piece in going)
    compute = sum(piece.compute for _, piece in going)
    holders, whole = len(going), sum(it.placement.whole for it, _ in going)
    at, uncertain = -inf, 0
    for it, piece in going:
        if fits_card(request, node, card, CardUsage(memory, compute, holders, whole)):
            return at, uncertain
        if it.deadline == inf:
            return None
        memory, compute = memory - piece.memory_mib, compute - piece.compute
        holders, whole = holders - 1, whole - it.placement.whole
        at, uncertain = max(at, _end(it)), uncertain + (it.deadline is None)
    return (at, uncertain) if fits_card(request, node, card, NO_USAGE) else None


def _when_host(
    request: Request, node: Node, going: Sequence[Allocation]
) -> tuple[float, int] | None:
    """When the host has what is asked of it; None: never. Empty it has."""
    cpu = sum(it.placement.cpu_milli for it in going)
    memory = sum(it.placement.host_memory_mib for it in going)
    at, uncertain = -inf, 0
    for it in going:
        if _room(cpu, request.cpu_milli, node.cpu_milli) and _room(
            memory, request.host_memory_mib, node.memory_mib
        ):
            break
        if it.deadline == inf:
            return None
        cpu, memory = cpu - it.placement.cpu_milli, memory - it.placement.host_memory_mib
        at, uncertain = max(at, _end(it)), uncertain + (it.deadline is None)
    return at, uncertain


def _room(used: int, needed: int, total: int | None) -> bool:
    return total is None or needed == 0 or used + needed <= total


def _end(held: Allocation) -> float:
    return inf if held.deadline is None else held.deadline


def _largest(held: Allocation) -> int:
    return max((piece.memory_mib for piece in held.placement.slices), default=0)


def _on_host(request: Request, node: Node) -> bool:
    """Whoever takes another of the node's cards may take what it waits for too."""
    cpu = node.cpu_milli is not None and request.cpu_milli > 0
    return cpu or (node.memory_mib is not None and request.host_memory_mib > 0)
