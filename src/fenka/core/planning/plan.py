"""Planning: which new nodes serve the most pending requests, by priority, for the least money.

`make_plan` is the function for the live loop, dry runs and what-ifs. Its quick plan needs nothing but
Python; a solver that is passed in improves it and says how far it is from the best.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from fenka.core.planning.case import FORMAT, PRICE_UNIT, Case, check_case
from fenka.core.planning.check import PlannedPod, checked
from fenka.core.planning.explain import unserved_reason
from fenka.core.planning.price_bound import price_bound
from fenka.core.planning.problem import AnyMachine, Problem
from fenka.core.planning.quick import quick_plan
from fenka.core.planning.solution import Fill, Solution, solution_of, topped_up

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
    """What a solver answers.

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
class Plan:
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


def make_plan(case: Case, remaining: Remaining, solver: Solver | None = None) -> Plan:
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


def _plan_of(problem: Problem, solved: Solved) -> Plan:
    case, solution = problem.case, solved.solution
    slots: dict[str, AnyMachine] = {node.name: node for node in case.nodes}
    bought = [0] * len(case.groups)
    placed: list[tuple[str, Fill]] = []
    there = {number: list(each.nodes) for number, each in enumerate(problem.types)}
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
    left = [(each, each.count - served.get(each.name, 0)) for each in case.requests]
    return Plan(
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
            Unserved(each.name, count, unserved_reason(case, each, bought))
            for each, count in left
            if count
        ),
    )


def _pods(problem: Problem, placed: list[tuple[str, Fill]]) -> list[PlannedPod]:
    """Return the placements with the names of requests: those of a class take turns in the case's order."""
    names = [
        [
            problem.case.requests[number].name
            for number in each.requests
            for _ in range(problem.case.requests[number].count)
        ][::-1]
        for each in problem.classes
    ]
    return [
        PlannedPod(names[number].pop(), node, cards)
        for node, fill in placed
        for number, cards in fill.items
    ]
