"""Preemption: the cheapest set of allocations to evict so that a request of higher priority fits.

kube-scheduler's own preemption adds up resources over a node, which does not help if each card has a little
left.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

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
    """What is to be placed: one request, or all requests of a gang."""

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


Cost = tuple[int, int, int, int, int, tuple[str, ...]]
"""Violated budgets, the highest priority, number of victims, sum of priorities, MiB, ids. The first that
differs decides. kube-scheduler compares violated budgets first too."""


@dataclass(frozen=True, slots=True)
class _VictimGroup:
    """Victims that are evicted together: one candidate, or a gang."""

    members: tuple[VictimCandidate, ...]

    @property
    def priority(self) -> int:
        return max(it.priority for it in self.members)

    @property
    def mib(self) -> int:
        return sum(piece.memory_mib for it in self.members for piece in it.placement.slices)


def cheapest_victims(
    view: UsageView,
    holders: Iterable[VictimCandidate],
    claim: Preemptor,
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
        holders: only those of lower priority are evicted, a gang only if all its members have lower priority.
        claim: what is to be placed.
        nodes: the eligible nodes; candidates elsewhere are evicted only with their gang.
        policy: a name in SCORES.
        reserved: cards that are kept for other requests.

    Raises:
        KeyError: for an unknown policy.
    """
    gang = claim.requests
    units = [unit for unit in _units(holders) if unit.priority < claim.priority]
    best: tuple[Cost, Victims] | None = None
    for scope, in_reach in _scopes(gang, units, nodes):
        attempt = _WhatIf(view, gang, policy, scope, reserved)
        found = _in_scope(attempt, in_reach, best[0] if best else None)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best[1] if best else None


def _units(holders: Iterable[VictimCandidate]) -> list[_VictimGroup]:
    together: dict[tuple[str, str], list[VictimCandidate]] = {}
    for it in holders:
        together.setdefault(("gang", it.gang) if it.gang else ("alone", it.id), []).append(it)
    return [_VictimGroup(tuple(members)) for members in together.values()]


def _scopes(
    gang: Sequence[Request], units: Sequence[_VictimGroup], nodes: Collection[Node]
) -> Iterator[tuple[list[Node], list[_VictimGroup]]]:
    """Yield the parts of the cluster to search, with the groups that have allocations there."""
    if len(gang) > 1:
        yield list(nodes), [unit for node in nodes for unit in units if _holds(unit, node)]
        return
    by_node: dict[str, list[_VictimGroup]] = {}
    for unit in units:
        for name in sorted({it.placement.node for it in unit.members}):
            by_node.setdefault(name, []).append(unit)
    (request,) = gang
    for node in nodes:
        near = by_node.get(node.name, [])
        on_host = (request.cpu_milli and node.cpu_milli is not None) or (
            request.host_memory_mib and node.memory_mib is not None
        )
        if request.cards > 1 or on_host:
            yield [node], near
            continue
        for card in node.cards:
            one = replace(node, cards=(card,))
            yield [one], [unit for unit in near if _holds(unit, one)]


def _holds(unit: _VictimGroup, node: Node) -> bool:
    cards = {card.uuid for card in node.cards}
    host = any(it.placement.node == node.name and not it.placement.slices for it in unit.members)
    return host or any(
        it.placement.node == node.name and piece.uuid in cards
        for it in unit.members
        for piece in it.placement.slices
    )


@dataclass(frozen=True, slots=True)
class _WhatIf:
    """Places the request, or the gang, as if some victims were evicted."""

    view: UsageView
    gang: Sequence[Request]
    policy: Policy
    nodes: Sequence[Node]
    reserved: Collection[DeviceId]

    def without(self, units: Iterable[_VictimGroup]) -> tuple[Placement, ...] | None:
        view = UsageOverlay(self.view)
        for unit in units:
            for it in unit.members:
                view.remove(it.placement)
        if len(self.gang) == 1:
            verdict = place(view, self.gang[0], self.policy, self.nodes, self.reserved)
            return None if isinstance(verdict, Unschedulable) else (verdict,)
        found = place_gang(view, self.gang, self.policy, self.nodes, self.reserved)
        return None if isinstance(found, Unschedulable) else found


def _in_scope(
    attempt: _WhatIf, units: Sequence[_VictimGroup], limit: Cost | None
) -> tuple[Cost, Victims] | None:
    """Return the cheapest set; None if there is none that costs less than the limit."""
    different = list(dict.fromkeys(units))
    if attempt.without(different) is None:
        return None
    if len(different) <= MAX_EXACT:
        chosen = _exact(attempt, different, limit)
    else:
        chosen = _reprieve(attempt, different)
    if chosen is None:
        return None
    placements = attempt.without(chosen)
    assert placements is not None
    price = _cost(chosen)
    return price, Victims(price[-1], placements, price[0])


def _exact(
    attempt: _WhatIf, units: Sequence[_VictimGroup], limit: Cost | None
) -> tuple[_VictimGroup, ...] | None:
    sets = (some for count in range(len(units) + 1) for some in combinations(units, count))
    for some in sorted(sets, key=_cost):
        if limit is not None and _cost(some) >= limit:
            return None
        if attempt.without(some) is not None:
            return some
    return None


def _reprieve(attempt: _WhatIf, units: Sequence[_VictimGroup]) -> tuple[_VictimGroup, ...]:
    going = sorted(units, key=lambda unit: _cost((unit,)))
    for unit in reversed(list(going)):
        others = [it for it in going if it is not unit]
        if attempt.without(others) is not None:
            going = others
    return tuple(going)


def _cost(chosen: Iterable[_VictimGroup]) -> Cost:
    units = list(chosen)
    members = [it for unit in units for it in unit.members]
    left = {budget.name: budget.allowed for it in members for budget in it.budgets}
    violations = 0
    for it in members:
        violations += any(left[budget.name] <= 0 for budget in it.budgets)
        for budget in it.budgets:
            left[budget.name] -= 1
    return (
        violations,
        max((unit.priority for unit in units), default=-(2**31)),
        len(members),
        sum(unit.priority for unit in units),
        sum(unit.mib for unit in units),
        tuple(sorted(it.id for it in members)),
    )
