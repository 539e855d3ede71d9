"""The queue of a cluster: by priority and time, fair between users, with backfill.

A waiter that does not fit *names* the cards it will get: the cheapest set, by when enough of it will be
free. Those behind it use other cards; the named ones only if they prove that they end before it starts. So
a stream of small requests does not starve a large one, and a large one does not empty the cluster.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from fenka.core.cards import Card, Node
from fenka.core.evaluate import Empty, Fit, Policy, Used, evaluate, fits_card
from fenka.core.gangs import plan_gang
from fenka.core.ledger import Tally
from fenka.core.reasons import Rejected
from fenka.core.requests import Placement, Request
from fenka.core.verdicts import Verdicts


@dataclass(frozen=True, slots=True)
class Fairness:
    """What orders waiters of one priority.

    A user's n-th request counts as if it came n times `turn_s` seconds later, n being what the user holds
    and has asked for before it. `starvation_s` bounds that: nobody is overtaken by a request of the same
    priority that came so many seconds after its own. With turn_s 0 it is time alone.
    """

    turn_s: float = 60
    starvation_s: float = 3600

    def lateness(self, turns: int) -> float:
        """Seconds by which a request counts as later than it is."""
        return min(turns * self.turn_s, self.starvation_s)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Who waits: one request, or all those of a gang, which counts as one.

    requested_at: in the caller's time. priority: the larger is served first. runs_for: seconds after which
    it is ended whatever it does (activeDeadlineSeconds); None if nothing ends it.
    """

    id: str
    requests: tuple[Request, ...]
    requested_at: float
    priority: int = 0
    user: str = ""
    runs_for: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A placement that holds. ends_by: when it is ended whatever it does, None if nothing ends it."""

    placement: Placement
    ends_by: float | None = None
    user: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The cards that a waiter named, by UUID, and when they will do at the latest; None: nobody can tell."""

    cards: frozenset[str]
    starts_by: float | None

    def bars(self, ends_by: float | None) -> bool:
        """Whether its cards are barred for who would end then."""
        return self.starts_by is None or ends_by is None or ends_by > self.starts_by


@dataclass(frozen=True, slots=True)
class Standing:
    """How a waiter stands. position: 1 is served next. Only the first few that wait have a reservation."""

    id: str
    position: int
    why: Rejected
    reservation: Reservation | None

    @property
    def reason(self) -> str:
        """One sentence."""
        return self.why.sentence()


@dataclass(frozen=True, slots=True)
class Round:
    """What serving the queue once comes to, both in order."""

    placed: tuple[tuple[str, tuple[Placement, ...]], ...]
    waiting: tuple[Standing, ...]


def in_order(
    waiting: Iterable[Waiting], held: Mapping[str, int], fairness: Fairness
) -> list[Waiting]:
    """Who is served first. held: how many placements each user holds.

    By priority; then by the time of the request, later by the user's turns; then by id.
    """
    turns = dict(held)
    keyed = []
    for it in sorted(waiting, key=lambda it: (-it.priority, it.requested_at, it.id)):
        before = turns.get(it.user, 0) if it.user else 0
        turns[it.user] = before + 1
        late = fairness.lateness(before)
        keyed.append(((-it.priority, it.requested_at + late, it.requested_at, it.id), it))
    return [it for _, it in sorted(keyed, key=lambda pair: pair[0])]


class Backfill:
    """Serves the waiting. It remembers verdicts on nodes whose state has not changed since; nothing else.

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
        self._verdicts = Verdicts(self._nodes, policy)

    def serve(self, waiting: Iterable[Waiting], held: Iterable[Held], now: float) -> Round:
        """Place in order what fits now, each on what those before it leave; name cards for who does not."""
        holding = list(held)
        users: dict[str, int] = {}
        for it in holding:
            users[it.user] = users.get(it.user, 0) + 1
        turn = _Turn(self._nodes, holding, self._verdicts, self._policy, now)
        placed: list[tuple[str, tuple[Placement, ...]]] = []
        standings: list[Standing] = []
        reservations: list[Reservation] = []
        for it in in_order(waiting, users, self._fairness):
            ends_by = None if it.runs_for is None else now + it.runs_for
            barred = frozenset[str]().union(*(r.cards for r in reservations if r.bars(ends_by)))
            verdict = turn.place(it.requests, barred)
            if isinstance(verdict, Rejected):
                reservation = None
                if len(reservations) < self._depth:
                    reservation = turn.name_cards(it)
                if reservation is not None:
                    reservations.append(reservation)
                standings.append(Standing(it.id, len(standings) + 1, verdict, reservation))
            else:
                for placement in verdict:
                    turn.hold(Held(placement, ends_by, it.user))
                placed.append((it.id, verdict))
        return Round(tuple(placed), tuple(standings))


class _Turn:
    """One serving: what is held, by whom and until when, as placements come to it."""

    def __init__(
        self,
        nodes: Sequence[Node],
        held: Iterable[Held],
        verdicts: Verdicts,
        policy: Policy,
        now: float,
    ) -> None:
        self._nodes, self._policy, self._now = nodes, policy, now
        self._verdicts, self._tally = verdicts, Tally()
        self._by_node: dict[str, list[Held]] = {}
        for it in held:
            self._tally.add(it.placement)
            self._by_node.setdefault(it.placement.node, []).append(it)
        self._future: dict[str, list[Held]] = {}
        self._costs: dict[Request, dict[str, list[_Cost]]] = {}
        self._refused: dict[tuple[tuple[Request, ...], frozenset[str]], tuple[int, Rejected]] = {}
        self._placed = 0
        verdicts.renew(self._tally)

    def hold(self, held: Held) -> None:
        node = held.placement.node
        self._tally.add(held.placement)
        self._by_node.setdefault(node, []).append(held)
        self._forget_costs(node)
        self._verdicts.forget(node)
        self._placed += 1

    def _forget_costs(self, node: str) -> None:
        for by_node in self._costs.values():
            by_node.pop(node, None)

    def place(
        self, requests: tuple[Request, ...], barred: frozenset[str]
    ) -> tuple[Placement, ...] | Rejected:
        # Who wants the same is refused for the same reasons until something else is placed.
        known = self._refused.get((requests, barred))
        if known is not None and known[0] == self._placed:
            return known[1]
        verdict: tuple[Placement, ...] | Rejected
        if len(requests) == 1:
            found = self._verdicts.place(self._tally, requests[0], barred)
            verdict = (found,) if isinstance(found, Placement) else found
        else:
            verdict = plan_gang(self._tally, requests, self._policy, self._nodes, barred)
        if isinstance(verdict, Rejected):
            self._refused[requests, barred] = self._placed, verdict
        return verdict

    def name_cards(self, waiting: Waiting) -> Reservation | None:
        """The cheapest cards for it, kept in mind as its own for those who name cards later.

        None for who could not even be placed if nothing were held.
        """
        cards: set[str] = set()
        starts, chosen = self._now, list[tuple[Node, _Choice]]()
        for request in waiting.requests:
            found = self._cheapest(request)
            if found is None:
                for node, choice in chosen:
                    self._future[node.name].remove(choice.future)
                    self._forget_costs(node.name)
                return None
            node, choice = found
            cards |= {card.uuid for card in choice.named}
            starts = max(starts, choice.at)
            chosen.append(found)
            self._future.setdefault(node.name, []).append(choice.future)
            self._forget_costs(node.name)
        if starts < inf and waiting.runs_for is not None:
            for node, choice in chosen:
                futures = self._future[node.name]
                futures[futures.index(choice.future)] = Held(
                    choice.future.placement, starts + waiting.runs_for
                )
        return Reservation(frozenset(cards), starts if starts < inf else None)

    def _cheapest(self, request: Request) -> "tuple[Node, _Choice] | None":
        by_node = self._costs.setdefault(request, {})
        best: tuple[tuple[float, int, str], Node, list[_Cost]] | None = None
        for node in self._nodes:
            costs = by_node.get(node.name)
            if costs is None:
                costs = by_node[node.name] = self._node_costs(request, node)
            if len(costs) < request.cards:
                continue
            # Sorted: with any time not certain, those of the fewest uncertain ends come first.
            needed = costs[: request.cards]
            price = needed[-1].at, sum(it.uncertain for it in needed), node.name
            if best is None or price < best[0]:
                best = price, node, needed
        if best is None:
            return None
        (at, _, _), node, needed = best
        chosen = tuple(it.card for it in needed)
        (alone,) = evaluate(Empty(), request, self._policy, (replace(node, cards=chosen),))
        assert isinstance(alone, Fit)
        named = node.cards if _on_host(request, node) else chosen
        return node, _Choice(named, at, Held(alone.placement))

    def _node_costs(self, request: Request, node: Node) -> "list[_Cost]":
        """Of its cards that could do, the earliest first; empty if the node cannot."""
        if _on_host(request, node):
            (alone,) = evaluate(Empty(), request, self._policy, (node,))
            if not isinstance(alone, Fit):
                return []
        held = sorted(
            [*self._by_node.get(node.name, ()), *self._future.get(node.name, ())],
            key=lambda it: (_end(it), -_largest(it)),
        )
        host_at, host_uncertain = self._host(request, node, held)
        costs = []
        for card in node.cards:
            found = self._when(request, card, held)
            if found is not None:
                at, uncertain = found
                costs.append(_Cost(max(at, host_at), uncertain + host_uncertain, card.index, card))
        return sorted(costs, key=lambda it: (it.at, it.uncertain, it.index))

    def _when(self, request: Request, card: Card, held: Sequence[Held]) -> tuple[float, int] | None:
        """When the card will do, and after how many ends that nobody can tell; None: never."""
        pieces = [
            (it, piece) for it in held for piece in it.placement.slices if piece.card == card.index
        ]
        used = Used(
            sum(piece.memory_mib for _, piece in pieces),
            sum(piece.compute for _, piece in pieces),
            len(pieces),
            sum(it.placement.whole for it, _ in pieces),
        )
        at, uncertain = self._now, 0
        for it, piece in pieces:
            if fits_card(card, used, request):
                return at, uncertain
            used = Used(
                used.memory_mib - piece.memory_mib,
                used.compute - piece.compute,
                used.holders - 1,
                used.whole - it.placement.whole,
            )
            at = max(at, _end(it))
            uncertain += it.ends_by is None
        return (at, uncertain) if fits_card(card, used, request) else None

    def _host(self, request: Request, node: Node, held: Sequence[Held]) -> tuple[float, int]:
        """When the host has what is asked of it, and after how many ends that nobody can tell."""
        if not _on_host(request, node):
            return self._now, 0
        cpu, memory = (
            sum(it.placement.cpu_milli for it in held),
            sum(it.placement.host_memory_mib for it in held),
        )
        at, uncertain = self._now, 0
        for it in held:
            enough_cpu = node.cpu_milli is None or cpu + request.cpu_milli <= node.cpu_milli
            enough = node.memory_mib is None or memory + request.host_memory_mib <= node.memory_mib
            if enough_cpu and enough:
                break
            cpu -= it.placement.cpu_milli
            memory -= it.placement.host_memory_mib
            at = max(at, _end(it))
            uncertain += it.ends_by is None
        return at, uncertain


@dataclass(frozen=True, slots=True)
class _Cost:
    """What waiting for a card comes to."""

    at: float
    uncertain: int
    index: int
    card: Card


@dataclass(frozen=True, slots=True)
class _Choice:
    """Cards named, when they will do, and what will then hold them."""

    named: tuple[Card, ...]
    at: float
    future: Held


def _end(held: Held) -> float:
    return inf if held.ends_by is None else held.ends_by


def _largest(held: Held) -> int:
    return max((piece.memory_mib for piece in held.placement.slices), default=0)


def _on_host(request: Request, node: Node) -> bool:
    """Whoever takes another of the node's cards may take what it waits for too."""
    cpu = node.cpu_milli is not None and request.cpu_milli > 0
    return cpu or (node.memory_mib is not None and request.host_memory_mib > 0)
