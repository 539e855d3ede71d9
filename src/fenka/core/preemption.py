"""Preemption: the cheapest set of allocations to evict so that a request of higher priority fits.

kube-scheduler's own preemption adds up resources over a node, which does not help if each card has a little
left.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from fenka.core.backfill import needs_host
from fenka.core.evaluate import Policy, place
from fenka.core.gangs import place_gang
from fenka.core.inventory import DeviceId, Node
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.usage import UsageOverlay, UsageView

MAX_EXACT = 10
"""Of at most this number of candidates all subsets are compared."""


@dataclass(frozen=True, slots=True)
class DisruptionBudget:
    """A disruption budget. allowed: how many of the pods that it covers may be evicted now."""

    name: str
    allowed: int = 0


@dataclass(frozen=True, slots=True)
class Preemptor:
    """The pod or gang to place, with its requests."""

    requests: tuple[Request, ...]
    priority: int


@dataclass(frozen=True, slots=True)
class VictimCandidate:
    """An allocation that may be evicted.

    Attributes:
        priority: larger is more important.
        gang: all members of a gang are evicted, or none.
        budgets: the disruption budgets that cover it.
    """

    id: str
    placement: Placement
    priority: int = 0
    gang: str | None = None
    budgets: frozenset[DisruptionBudget] = frozenset()


@dataclass(frozen=True, slots=True)
class Victims:
    """Ids to evict in order, the placements that then fit, and the number of violated disruption budgets."""

    ids: tuple[str, ...]
    placements: tuple[Placement, ...]
    violations: int


Place = Callable[[UsageView], tuple[Placement, ...] | None]
"""Returns where all requests go with this usage, None if they do not fit."""

Cost = tuple[int, int, int, int, int, tuple[str, ...]]
"""Violated budgets, the highest priority, number of victims, sum of priorities, MiB, ids. The first that
differs decides. kube-scheduler compares violated budgets first too."""


@dataclass(frozen=True, slots=True)
class _VictimGroup:
    """Candidates that are evicted together: one, or a gang."""

    members: tuple[VictimCandidate, ...]

    @property
    def priority(self) -> int:
        return max(member.priority for member in self.members)

    @property
    def placements(self) -> list[Placement]:
        return [member.placement for member in self.members]

    @property
    def mib(self) -> int:
        return sum(piece.memory_mib for placement in self.placements for piece in placement.slices)


def cheapest_victims(
    view: UsageView,
    candidates: Iterable[VictimCandidate],
    preemptor: Preemptor,
    nodes: Collection[Node],
    policy: Policy = "binpack",
    reserved: Collection[DeviceId] = (),
) -> Victims | None:
    """Return the cheapest set of victims; None if evicting any allowed set does not make room.

    The set is the cheapest of each card, of each node for several cards, of all nodes for a gang. With at
    most MAX_EXACT candidates that is exact. Beyond that candidates are reprieved one by one, the most
    expensive first. If the request fits as it is, `ids` is empty.

    Args:
        view: what is allocated now, by the candidates among others.
        candidates: only those of lower priority are evicted, a gang only if all its members have lower ones.
        preemptor: what is to be placed.
        nodes: the eligible nodes; candidates elsewhere are evicted only with their gang.
        policy: a name in SCORES.
        reserved: cards that are kept for other requests.

    Raises:
        KeyError: for an unknown policy.
    """
    groups = [group for group in _groups(candidates) if group.priority < preemptor.priority]
    best: tuple[Cost, Victims] | None = None
    for scope, in_reach in _scopes(preemptor.requests, groups, nodes):
        what_if = _WhatIf(view, _placing(preemptor.requests, policy, scope, reserved))
        cheapest = _in_scope(what_if, in_reach, best[0] if best else None)
        if cheapest is not None and (best is None or cheapest[0] < best[0]):
            best = cheapest
    return best[1] if best else None


def cheap_victims(
    view: UsageView,
    candidates: Iterable[VictimCandidate],
    priority: int,
    place_all: Place,
) -> Victims | None:
    """Return a set of victims after which a request fits; None if evicting all candidates is not enough.

    For requests that only the caller can place. Candidates are reprieved one by one, the most expensive
    first, so that each victim is needed.

    Args:
        view: what is allocated now.
        candidates: as for `cheapest_victims`.
        priority: the request's.
        place_all: returns where all of the request goes.
    """
    groups = [group for group in _groups(candidates) if group.priority < priority]
    what_if = _WhatIf(view, place_all)
    if what_if.without(groups) is None:
        return None
    chosen = _reprieve(what_if, groups)
    cost, placements = _cost(chosen), what_if.without(chosen)
    assert placements is not None
    return Victims(cost[-1], placements, cost[0])


def _groups(candidates: Iterable[VictimCandidate]) -> list[_VictimGroup]:
    together: dict[tuple[str, str], list[VictimCandidate]] = {}
    for candidate in candidates:
        key = ("gang", candidate.gang) if candidate.gang else ("alone", candidate.id)
        together.setdefault(key, []).append(candidate)
    return [_VictimGroup(tuple(members)) for members in together.values()]


def _scopes(
    requests: Sequence[Request], groups: Sequence[_VictimGroup], nodes: Collection[Node]
) -> Iterator[tuple[list[Node], list[_VictimGroup]]]:
    """Yield the parts of the cluster to search, with the groups that have allocations there."""
    if len(requests) > 1:
        yield list(nodes), [group for node in nodes for group in groups if _is_on(group, node)]
        return
    by_node: dict[str, list[_VictimGroup]] = {}
    for group in groups:
        for name in sorted({placement.node for placement in group.placements}):
            by_node.setdefault(name, []).append(group)
    (request,) = requests
    for node in nodes:
        near = by_node.get(node.name, [])
        if request.cards > 1 or needs_host(request, node):
            yield [node], near
            continue
        for card in node.cards:
            single = replace(node, cards=(card,))
            yield [single], [group for group in near if _is_on(group, single)]


def _is_on(group: _VictimGroup, node: Node) -> bool:
    """Return whether the group has slices of these cards, or only a part of the host."""
    cards = {card.uuid for card in node.cards}
    here = [placement for placement in group.placements if placement.node == node.name]
    return any(not placement.slices for placement in here) or any(
        piece.uuid in cards for placement in here for piece in placement.slices
    )


@dataclass(frozen=True, slots=True)
class _WhatIf:
    """Places the requests as if some victims were evicted."""

    view: UsageView
    place: Place

    def without(self, groups: Iterable[_VictimGroup]) -> tuple[Placement, ...] | None:
        view = UsageOverlay(self.view)
        for group in groups:
            for placement in group.placements:
                view.remove(placement)
        return self.place(view)


def _placing(
    requests: Sequence[Request],
    policy: Policy,
    nodes: Sequence[Node],
    reserved: Collection[DeviceId],
) -> Place:
    def place_all(view: UsageView) -> tuple[Placement, ...] | None:
        if len(requests) == 1:
            placed = place(view, requests[0], policy, nodes, reserved)
            return None if isinstance(placed, Unschedulable) else (placed,)
        gang = place_gang(view, requests, policy, nodes, reserved)
        return None if isinstance(gang, Unschedulable) else gang

    return place_all


def _in_scope(
    what_if: _WhatIf, groups: Sequence[_VictimGroup], limit: Cost | None
) -> tuple[Cost, Victims] | None:
    """Return the cheapest set; None if there is none that costs less than the limit."""
    different = list(dict.fromkeys(groups))
    if what_if.without(different) is None:
        return None
    if len(different) <= MAX_EXACT:
        chosen = _exact(what_if, different, limit)
    else:
        chosen = _reprieve(what_if, different)
    if chosen is None:
        return None
    placements = what_if.without(chosen)
    assert placements is not None
    cost = _cost(chosen)
    return cost, Victims(cost[-1], placements, cost[0])


def _exact(
    what_if: _WhatIf, groups: Sequence[_VictimGroup], limit: Cost | None
) -> tuple[_VictimGroup, ...] | None:
    sets = (chosen for count in range(len(groups) + 1) for chosen in combinations(groups, count))
    for chosen in sorted(sets, key=_cost):
        if limit is not None and _cost(chosen) >= limit:
            return None
        if what_if.without(chosen) is not None:
            return chosen
    return None


def _reprieve(what_if: _WhatIf, groups: Sequence[_VictimGroup]) -> tuple[_VictimGroup, ...]:
    victims = sorted(groups, key=lambda group: _cost((group,)))
    for group in reversed(list(victims)):
        others = [other for other in victims if other is not group]
        if what_if.without(others) is not None:
            victims = others
    return tuple(victims)


def _cost(chosen: Iterable[_VictimGroup]) -> Cost:
    groups = list(chosen)
    members = [member for group in groups for member in group.members]
    left = {budget.name: budget.allowed for member in members for budget in member.budgets}
    violations = 0
    for member in members:
        violations += any(left[budget.name] <= 0 for budget in member.budgets)
        for budget in member.budgets:
            left[budget.name] -= 1
    return (
        violations,
        max((group.priority for group in groups), default=-(2**31)),
        len(members),
        sum(group.priority for group in groups),
        sum(group.mib for group in groups),
        tuple(sorted(member.id for member in members)),
    )
