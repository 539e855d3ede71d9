"""Planning: which new nodes serve the most pending requests, by priority, for the least money.

`make_plan` is the function for the live loop, dry runs and what-ifs. Its quick plan needs nothing but
Python; a solver that is passed in improves it and says how far it is from the best. As the last step
`evaluate` judges every placement in turn.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from fenka.core.evaluate import Fit, evaluate
from fenka.core.inventory import WHOLE_COMPUTE, Card, DeviceId, Node
from fenka.core.nodes.case import (
    FORMAT,
    PRICE_UNIT,
    BuyLimits,
    CaseNode,
    CaseRequest,
    HeldCard,
    NodeGroup,
    PlanningCase,
    check_case,
    whole_price,
)
from fenka.core.nodes.price_bound import price_bound
from fenka.core.nodes.problem import AnyMachine, Problem, card_needs, domain_of, ineligible
from fenka.core.nodes.quick import quick_plan
from fenka.core.nodes.solution import Fill, Solution, solution_of, topped_up
from fenka.core.request import Placement, Slice
from fenka.core.topology.domains import Domain
from fenka.core.units import card_units
from fenka.core.usage import UsageTotals


@dataclass(frozen=True, slots=True)
class PlannedPod:
    """One pod of a request and where it goes.

    Attributes:
        request: the request's name.
        node: a node there, or `new:GROUP:K`.
        cards: indices of its cards.
    """

    request: str
    node: str
    cards: tuple[int, ...]


def checked(
    case: PlanningCase, slots: Mapping[str, AnyMachine], pods: Iterable[PlannedPod]
) -> list[PlannedPod]:
    """Return the placements that are possible, in their order, without rests of gangs.

    Args:
        case: what was planned.
        slots: nodes there and new ones, by name.
        pods: the placements.
    """
    world = _World(slots)
    requests = {request.name: request for request in case.requests}
    passed = [pod for pod in pods if world.admit(requests[pod.request], pod)]
    served: dict[str, int] = {}
    domains: dict[str, set[Domain | None]] = {}
    for pod in passed:
        served[pod.request] = served.get(pod.request, 0) + 1
        gang = requests[pod.request].gang
        if gang is not None and gang in case.gangs and case.gangs[gang].in_one_domain:
            domain = domain_of(case.gangs[gang], slots[pod.node])
            domains.setdefault(gang, set()).add(domain)
    broken = {gang for gang, used in domains.items() if len(used) > 1 or None in used}
    broken |= {
        request.gang
        for request in case.requests
        if request.gang is not None and served.get(request.name, 0) < request.count
    }
    return [pod for pod in passed if requests[pod.request].gang not in broken]


class _World:
    """The virtual nodes, with what is allocated of them."""

    def __init__(self, slots: Mapping[str, AnyMachine]) -> None:
        self._slots, self._usage = slots, UsageTotals()
        self._nodes: dict[str, Node] = {}
        self._counted: dict[tuple[str, str], int] = {}
        """The rest of pods (empty name) and counted resources, by node and name."""

    def admit(self, request: CaseRequest, pod: PlannedPod) -> bool:
        """Allocate the placement if it is possible; return whether it was."""
        machine = self._slots.get(pod.node)
        if machine is None or ineligible(request, machine) or len(pod.cards) != request.cards:
            return False
        if pod.node not in self._nodes:
            self._add(pod.node, machine)
        node = self._nodes[pod.node]
        counted = {"": 1, **{name: amount for name, amount in request.resources.items() if amount}}
        if any(amount > self._counted.get((pod.node, name), 0) for name, amount in counted.items()):
            return False
        placement = self._judge(request, node, pod.cards)
        if placement is None:
            return False
        self._usage.add(placement)
        for name, amount in counted.items():
            self._counted[pod.node, name] -= amount
        return True

    def _judge(self, request: CaseRequest, node: Node, cards: tuple[int, ...]) -> Placement | None:
        asked = request.card_request()
        if asked is not None:
            # Only these cards, so that the verdict is about them.
            part = replace(node, cards=tuple(card for card in node.cards if card.index in cards))
            (verdict,) = evaluate(self._usage, asked, "binpack", (part,))
            return verdict.placement if isinstance(verdict, Fit) else None
        # `evaluate` knows no requests without cards.
        cpu, memory = self._usage.host_usage(node.name)
        for amount, used, total in (
            (request.cpu_milli, cpu, node.cpu_milli),
            (request.memory_mib, memory, node.memory_mib),
        ):
            if amount and total is not None and amount > total - used:
                return None
        return Placement(node.name, (), request.cpu_milli, request.memory_mib)

    def _add(self, name: str, machine: AnyMachine) -> None:
        self._nodes[name], placements = virtual_node(name, machine)
        self._counted[name, ""] = machine.pods
        self._counted.update({(name, key): amount for key, amount in machine.resources.items()})
        for placement in placements:
            self._usage.add(placement)
        if isinstance(machine, CaseNode):
            self._counted[name, ""] -= machine.held.pods
            for key, amount in machine.held.resources.items():
                self._counted[name, key] = self._counted.get((name, key), 0) - amount


def virtual_node(name: str, machine: AnyMachine) -> tuple[Node, tuple[Placement, ...]]:
    """Return a machine as a node of this name, and what is allocated of it."""
    cards = tuple(
        Card(
            index,
            DeviceId(f"{name}/{index}"),
            card.model,
            card.memory_mib,
            cordoned=isinstance(card, HeldCard) and card.closed,
        )
        for index, card in enumerate(machine.cards)
    )
    held = _held_placements(machine, cards) if isinstance(machine, CaseNode) else ()
    return Node(name, cards, machine.cpu_milli, machine.memory_mib), tuple(held)


def _held_placements(node: CaseNode, cards: tuple[Card, ...]) -> Iterable[Placement]:
    """Yield what the node's holders have, as placements."""
    yield Placement(node.name, (), node.held.cpu_milli, node.held.memory_mib)
    for card, held in zip(cards, node.cards, strict=True):
        if held.held_mib or held.held_compute or held.whole:
            piece = Slice(card.index, card.uuid, held.held_mib, held.held_compute)
            yield Placement(node.name, (piece,), whole=held.whole)


def unserved_reason(case: PlanningCase, request: CaseRequest, new: Sequence[int]) -> str:
    """Return `0/3 groups help: 2 cards too small (14 units, 15 wanted), 1 at its max of 10`.

    Args:
        case: what was planned.
        request: one that is left out.
        new: the number of new nodes by group.
    """
    if not case.groups:
        return "no group may grow: there is none"
    counts: Counter[str] = Counter()
    details: dict[str, set[tuple[int, str]]] = {}
    for number, group in enumerate(case.groups):
        code, measure, detail = _misfit(request, group) or _bound(case, number, new)
        counts[code] += 1
        if detail:
            details.setdefault(code, set()).add((measure, detail))
    helping = counts.pop(_HELPS, 0)
    parts = [f"{count} {code}{_of(details.get(code))}" for code, count in counts.most_common()]
    if request.gang is not None:
        parts.append(f"gang {request.gang} starts whole or not at all")
    elif helping:
        parts.append("the rest is needed by requests before it")
    return f"{helping}/{len(case.groups)} groups help: {', '.join(parts)}"


Reason = tuple[str, int, str]
"""The reason that is counted, the key that sorts details, and the detail, of which the largest is shown."""

_HELPS = "helps"


def _of(details: set[tuple[int, str]] | None) -> str:
    return f" ({max(details)[1]})" if details else ""


def _misfit(request: CaseRequest, group: NodeGroup) -> Reason | None:
    """Return why the request does not fit an empty node of the group, None if it does."""
    if reason := ineligible(request, group):
        return reason, 0, ""
    hosts = [
        ("with too little CPU", request.cpu_milli / 1000, group.cpu_milli / 1000, "cores"),
        ("with too little host memory", request.memory_mib, group.memory_mib, "MiB"),
        ("without room for pods", 1, group.pods, "pods"),
    ]
    hosts += [
        (f"with too few {name}", amount, group.resources.get(name, 0), "there")
        for name, amount in request.resources.items()
    ]
    for code, wanted, total, measure in hosts:
        if wanted > total:
            return code, int(total), f"{total:g} {measure}, {wanted:g} wanted"
    return _card_misfit(request, group)


def _card_misfit(request: CaseRequest, group: NodeGroup) -> Reason | None:
    asked = request.card_request()
    if asked is None:
        return None
    if not group.cards:
        return "without cards", 0, ""
    of_model = [card for card in group.cards if not asked.models or card.model in asked.models]
    if not of_model:
        return "of another model", 0, ""
    fitting = sum(need is not None for need in card_needs(asked, group))
    if not fitting:
        largest = max(card.memory_mib for card in of_model)
        assert asked.memory is not None
        unit = asked.memory.unit_mib or 1
        name = "MiB" if unit == 1 else "units"
        units = card_units(largest, unit)
        return "cards too small", units, f"{units} {name}, {asked.memory.amount} wanted"
    if fitting < asked.cards:
        return "with too few cards", fitting, f"{fitting}, {asked.cards} wanted"
    assert asked.compute <= WHOLE_COMPUTE
    return None


def _bound(case: PlanningCase, number: int, new: Sequence[int]) -> Reason:
    """Return what keeps the group from growing further."""
    group, bought = case.groups[number], new[number]
    if group.size + bought >= group.max:
        if group.min == group.max:
            return f"fixed at {group.max} node{'s' * (group.max != 1)}", 0, ""
        return f"at its max of {group.max}", 0, ""
    if group.stock is not None and bought >= group.stock:
        return f"out of stock ({group.stock} left before this plan)", 0, ""
    return _limit(case.limits, case.groups, number, new) or (_HELPS, 0, "")


def _limit(
    limits: BuyLimits, groups: Sequence[NodeGroup], number: int, new: Sequence[int]
) -> Reason | None:
    if limits.nodes is not None and sum(new) >= limits.nodes:
        return f"beyond the limit of {limits.nodes} new nodes", 0, ""
    if limits.price is not None:
        price = sum(
            count * whole_price(group.price) for group, count in zip(groups, new, strict=True)
        )
        if price + whole_price(groups[number].price) > whole_price(limits.price):
            return f"beyond the price limit of {limits.price:g} an hour", 0, ""
    for model, most in limits.cards.items():
        per_node = [sum(card.model == model for card in group.cards) for group in groups]
        have = sum(count * cards for count, cards in zip(new, per_node, strict=True))
        if per_node[number] and have + per_node[number] > most:
            return f"beyond the limit of {most} new {model} cards", 0, ""
    return None


QUICK_SHARE = 0.3
"""The part of the time that the quick plan may take where a solver follows."""

CHECK_SHARE = 0.05
"""The least part of the time that is kept for the check of the plan."""

CHECK_BY_FIRST = 0.6
"""The time of the check by that of the first plan, at most: it shows how fast this machine is now."""

Remaining = Callable[[], float]
"""Returns the seconds that are left."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A solver's answer.

    Attributes:
        solution: the best that is known.
        bound: a price in ten-thousandths below which nobody can serve as many.
        optimal: whether nothing better exists.
    """

    solution: Solution
    bound: int
    optimal: bool


class Solver(Protocol):
    """Improves a solution. It keeps to the time, and answers the same for the same problem if time allows."""

    def __call__(
        self, problem: Problem, best: Solution, fills: list[Fill], remaining: Remaining
    ) -> Solved:
        """Return the best solution. fills: contents of nodes that other solutions had."""


@dataclass(frozen=True, slots=True)
class NewNodes:
    """How many nodes of a group are bought."""

    group: str
    count: int


@dataclass(frozen=True, slots=True)
class Unserved:
    """How many pods of a request are left out, and why."""

    request: str
    count: int
    why: str


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A plan, with the field names of `fenka.plan/1`.

    Attributes:
        nodes: the new ones.
        cost: their price per hour.
        bound: no plan that serves as many costs less.
        optimal: whether no plan is better.
        placements: one for each pod that is served.
        unserved: the others.
    """

    format: Literal["fenka.plan/1"]
    nodes: tuple[NewNodes, ...]
    cost: float
    bound: float
    optimal: bool
    placements: tuple[PlannedPod, ...]
    unserved: tuple[Unserved, ...]


def make_plan(case: PlanningCase, remaining: Remaining, solver: Solver | None = None) -> NodePlan:
    """Return the best plan that is found in time.

    Args:
        case: what is there and what is pending.
        remaining: the seconds that are left; a first plan is made in any case.
        solver: improves the quick plan; without it that stands.

    Raises:
        InvalidCase: if the case contradicts itself.
    """
    check_case(case)
    pace = _Pace(remaining)
    problem = Problem(case)
    fills: list[Fill] = []
    best = quick_plan(problem, pace.enough_quick_plans(solver is not None), fills.append)
    least = solution_of(problem, ())
    full = sum(best.served) == problem.servable_pods
    minimal = best.rank[1:] == least.rank[1:]
    solved = Solved(best, least.price, full and minimal)
    if solver is not None and not solved.optimal and pace.solver_has_time():
        solved = solver(problem, best, fills, pace.remaining)
    if not full:
        # A search that ran out of time may have left pods out that have room.
        solved = replace(solved, solution=topped_up(problem, solved.solution))
    bound = max(solved.bound, price_bound(problem, solved.solution.served))
    solved = replace(solved, bound=bound)
    return _plan_of(problem, solved)


class _Pace:
    """Divides the time among the steps of one plan, by how long the first ones took."""

    def __init__(self, remaining: Remaining) -> None:
        self._remaining = remaining
        self._limit = self._last = remaining()
        self._longest_s = 0.0
        # Of infinite time no part is needed.
        self._check_s = self._limit * CHECK_SHARE if self._limit < float("inf") else 0.0

    def remaining(self) -> float:
        """Return the seconds that are left before the check."""
        return self._remaining() - self._check_s

    def solver_has_time(self) -> bool:
        """Return whether a solver, which first reads the problem as a quick plan does, has time for more."""
        return self.remaining() > self._longest_s

    def enough_quick_plans(self, solver: bool) -> Callable[[], bool]:
        """Return what says whether a further quick plan would take too long.

        Args:
            solver: whether a solver follows, which needs the larger part of the time.
        """
        reserve = self._limit * (1 - QUICK_SHARE) if solver else 0.0

        def enough() -> bool:
            left = self._remaining()
            if not self._longest_s and self._limit < float("inf"):
                self._check_s = max(self._check_s, CHECK_BY_FIRST * (self._limit - left))
            self._longest_s = max(self._longest_s, self._last - left)
            self._last = left
            return left - self._longest_s <= max(reserve, self._check_s)

        return enough


def _plan_of(problem: Problem, solved: Solved) -> NodePlan:
    case, solution = problem.case, solved.solution
    slots: dict[str, AnyMachine] = {node.name: node for node in case.nodes}
    bought = [0] * len(case.groups)
    placed: list[tuple[str, Fill]] = []
    there = {number: list(type_.nodes) for number, type_ in enumerate(problem.types)}
    for fill in solution.fills:
        group = problem.types[fill.type].group
        if group is None:
            placed.append((case.nodes[there[fill.type].pop(0)].name, fill))
            continue
        name = f"new:{case.groups[group].name}:{bought[group]}"
        slots[name] = case.groups[group]
        bought[group] += 1
        placed.append((name, fill))
    pods = checked(case, slots, _pods(problem, placed))
    served: dict[str, int] = {}
    for pod in pods:
        served[pod.request] = served.get(pod.request, 0) + 1
    left = [(request, request.count - served.get(request.name, 0)) for request in case.requests]
    return NodePlan(
        format=FORMAT,
        nodes=tuple(
            NewNodes(group.name, count)
            for group, count in zip(case.groups, bought, strict=True)
            if count
        ),
        cost=solution.price / PRICE_UNIT,
        bound=solved.bound / PRICE_UNIT,
        optimal=solved.optimal,
        placements=tuple(pods),
        unserved=tuple(
            Unserved(request.name, count, unserved_reason(case, request, bought))
            for request, count in left
            if count
        ),
    )


def _pods(problem: Problem, placed: list[tuple[str, Fill]]) -> list[PlannedPod]:
    """Return the placements with the names of requests: those of a class take turns in the case's order."""
    names = [
        [
            problem.case.requests[number].name
            for number in class_.requests
            for _ in range(problem.case.requests[number].count)
        ][::-1]
        for class_ in problem.classes
    ]
    return [
        PlannedPod(names[number].pop(), node, cards)
        for node, fill in placed
        for number, cards in fill.items
    ]
