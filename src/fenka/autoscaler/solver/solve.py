"""Improves a plan: patterns made as needed, then counts of nodes and cuts (docs/understand/node-plans.md)."""

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil

from fenka.autoscaler.solver.model import (
    INFINITY,
    Counts,
    Cut,
    CutMaster,
    Goals,
    Model,
    NoSolution,
    price_step,
)
from fenka.autoscaler.solver.patterns import (
    PRICING_NODES,
    TOLERANCE,
    NodeVariables,
    PatternPool,
    PatternProgram,
    cut_of,
)
from fenka.core.nodes.case import PRICE_UNIT
from fenka.core.nodes.plan import Remaining, Solved
from fenka.core.nodes.problem import Problem
from fenka.core.nodes.quick import base_weights
from fenka.core.nodes.solution import Fill, Solution, solution_of

MAX_COLUMNS = 20_000
"""A larger program would not be solved in time."""


def packed(pool: PatternPool, counts: Counts, seconds: float) -> Solution | None:
    """Return a solution with these counts, None if it is not known whether there is one.

    Raises:
        NoSolution: if there is certainly none.
    """
    problem, model = pool.problem, Model()
    nodes: list[tuple[int, NodeVariables]] = []
    for number, count in counts.nodes.items():
        pricing = pool.pricings[number]
        for _ in range(count if pricing.classes else 0):
            nodes.append((number, pricing.columns(model)))
            if model.columns > MAX_COLUMNS:
                return None
    for class_, count in counts.pods.items():
        if count:
            pods = [(of.pods[class_], 1.0) for _, of in nodes if class_ in of.pods]
            model.row(float(count), INFINITY, pods)
    result = model.solve_integer(seconds)
    if result is None:
        return None
    return solution_of(
        problem, [Fill(number, columns.items(result.values)) for number, columns in nodes]
    )


CHOICE_SHARE = 0.3
"""The part of the time that is left for the best choice of known patterns."""

DIVES = 4
"""Each makes patterns for the next."""

DIVES_SHARE = 0.5
"""The part of the time after which no other one begins."""

LATER_SHARE = 0.3
"""The part of the time that a priority leaves for what comes after it."""

CUT_LEAST = 1e-5
"""The least violation of a cut: more than HiGHS tolerates, so that the same counts do not come again."""

MAX_PRICING_NODES = 10**7

PACKINGS = 3
"""Tries to pack with patterns what the linear program can pack in parts."""

CHOICES = 400
"""Patterns to choose from: with more of them the best choice is not found in time."""

BOUND_S = 0.05
"""Seconds for a bound where no time is left: a plan says how good it is."""

FEW_CELLS = 4_000
"""Types by classes: in larger problems new nodes are planned by themselves first."""

NEW_NODES_SHARE = 0.8
"""The part of the time that this may take."""

MAX_CELLS = 60_000
"""In larger problems they are all that is improved."""


def improve(problem: Problem, best: Solution, fills: list[Fill], remaining: Remaining) -> Solved:
    """Return the best plan that is found in time. See `plan.Solver`."""
    cells = len(problem.types) * len(problem.servable)
    setup_s = 0.0
    zoned = any(len(gang.options) > 1 for gang in problem.gangs)
    if cells > FEW_CELLS and not zoned:
        reserve = remaining() * (1 - NEW_NODES_SHARE if cells <= MAX_CELLS else 0)
        best, type_s = _improve_new_nodes(problem, best, fills, lambda: remaining() - reserve)
        setup_s = type_s * len(problem.types)
    if cells > MAX_CELLS or remaining() <= setup_s:
        return Solved(best, solution_of(problem, ()).price, optimal=False)
    return _Search(problem, best, fills, remaining).run()


def _improve_new_nodes(
    problem: Problem, best: Solution, fills: list[Fill], remaining: Remaining
) -> tuple[Solution, float]:
    """Return the best plan in which nodes there keep what they have, and the set-up time per type in s."""
    there = [fill for fill in best.fills if problem.types[fill.type].group is None]
    new = [fill for fill in best.fills if problem.types[fill.type].group is not None]
    rest = problem.without_nodes(sum((fill.counts for fill in there), Counter()))
    patterns = [fill for fill in fills if problem.types[fill.type].group is not None]
    begin = remaining()
    search = _Search(rest, solution_of(rest, new), patterns, remaining)
    setup_s = (begin - remaining()) / max(len(problem.offers), 1)
    solution = solution_of(problem, [*there, *search.run().solution.fills])
    return min(solution, best, key=lambda solution: solution.rank), setup_s


class _Search:
    """Settles one goal after the other: pods by priority, the price, the number of nodes."""

    def __init__(
        self, problem: Problem, best: Solution, fills: Sequence[Fill], remaining: Remaining
    ) -> None:
        self._problem, self.best, self._total = problem, best, remaining
        self._reserve = 0.0
        self._pool = PatternPool(problem, [*fills, *best.fills])
        self._cuts: list[Cut] = []
        self._excluded: list[Counts] = []

    def run(self) -> Solved:
        """Return the best that is found."""
        goals, proven = Goals(), True
        for position, level in enumerate(self._problem.levels):
            goals.level = level
            # Later goals need time too, if it is short.
            left = self._total()
            self._reserve = left * LATER_SHARE if left < float("inf") else 0.0
            proven &= self._settle(goals, _served(position)) >= -self.best.served[position]
            goals.served[level] = self.best.served[position]
        goals.level, self._reserve = None, 0.0
        least = solution_of(self._problem, ()).price
        bound = self._settle(goals, lambda solution: solution.price)
        bound = min(max(bound, least), self.best.price)
        proven &= bound == self.best.price
        if proven:
            goals.price, goals.count_only = self.best.price, True
            proven = self._settle(goals, lambda solution: solution.bought) >= self.best.bought
        return Solved(self.best, bound, proven)

    def _remaining(self) -> float:
        return self._total() - self._reserve

    def _settle(self, goals: Goals, value: Callable[[Solution], int]) -> int:
        """Improve the best solution for a goal. Return a bound of the value, which is to be small."""
        bound = _trivial_bound(self._problem, goals)
        if value(self.best) <= bound:
            return bound
        # Cuts of an earlier goal may settle this one at once.
        chosen = not self._cuts
        if chosen:
            self._choose(goals)
            if not self._cuts and self._remaining() <= 0:
                return bound
            self._cuts = self._cuts or [self._rough_cut()]
        while True:
            seconds = max(self._remaining(), BOUND_S)
            answer = CutMaster(self._problem, goals, self._cuts, self._excluded).solve(seconds)
            if answer is None:
                return value(self.best)
            counts, cost = answer
            bound = max(bound, _rounded(self._problem, goals, cost))
            if counts is None or value(self.best) <= bound:
                return bound
            if not chosen:
                self._choose(goals)
                chosen = True
            elif not self._pack(counts, goals):
                return bound

    def _choose(self, goals: Goals) -> None:
        """Look for the best choice of patterns, and make the first cut."""
        reserve = self._remaining() * (1 - DIVES_SHARE)
        for _ in range(DIVES):
            if self._remaining() > reserve:
                self._consider(PatternProgram(self._pool, goals, self._remaining).dive())
        program = PatternProgram(self._pool, goals, self._remaining)
        result = program.converge()
        if result is None:
            return
        duals = program.duals(result)
        # The certain facts at once, then the best choice, then a better bound.
        self._cuts.append(cut_of(duals, program.bounds(duals)))
        fills = list(dict.fromkeys([*program.cheapest(duals, CHOICES), *self.best.fills]))
        few = PatternProgram(self._pool, goals, self._remaining, fills=fills)
        self._consider(few.choose(self._remaining() * CHOICE_SHARE, self.best))
        bounds, _ = program.price(duals, list(self._pool.pricings))
        self._cuts.append(cut_of(duals, bounds))

    def _rough_cut(self) -> Cut:
        """Return the cut that the quick plan's weights make."""
        base = base_weights(self._problem)
        weights = {class_: weight / PRICE_UNIT for class_, weight in enumerate(base)}
        pricings = self._pool.pricings.items()
        return Cut(weights, {number: pricing.at_most(weights) for number, pricing in pricings})

    def _pack(self, counts: Counts, goals: Goals) -> bool:
        """Pack the pods on these nodes, or learn why they cannot be. Return False if neither is known."""
        program = PatternProgram(self._pool, goals, self._remaining, counts)
        nodes = PRICING_NODES
        while (result := program.converge()) is not None:
            if result.objective <= TOLERANCE:
                return self._pack_whole(counts, goals)
            duals = program.duals(result)
            bounds, better = program.price(duals, program.types, nodes)
            cut = cut_of(duals, bounds)
            if cut.violation(counts) > CUT_LEAST:
                others = [number for number in self._pool.pricings if number not in bounds]
                bounds |= program.price(duals, others)[0]
                self._cuts.append(cut_of(duals, bounds))
                return True
            if not better:
                # The bounds are too rough to tell.
                nodes *= 10
                if nodes > MAX_PRICING_NODES:
                    return False
        return False

    def _pack_whole(self, counts: Counts, goals: Goals) -> bool:
        """Pack exactly what can be packed in parts."""
        for _ in range(PACKINGS):
            program = PatternProgram(self._pool, goals, self._remaining, counts)
            solution = program.choose(self._remaining() * CHOICE_SHARE)
            # A dive makes patterns for the next choice.
            for found in (solution, None if self._reached(solution, counts) else program.dive()):
                if self._reached(found, counts):
                    self._consider(found)
                    return True
        try:
            solution = packed(self._pool, counts, self._remaining())
        except NoSolution:
            self._excluded.append(counts)
            return True
        self._consider(solution)
        return self._reached(solution, counts)

    def _reached(self, solution: Solution | None, counts: Counts) -> bool:
        if solution is None:
            return False
        served: Counter[int] = sum((fill.counts for fill in solution.fills), Counter())
        return all(served[class_] >= count for class_, count in counts.pods.items())

    def _consider(self, solution: Solution | None) -> None:
        if solution is not None and solution.rank < self.best.rank:
            self.best = solution
            for fill in solution.fills:
                self._pool.add(fill)


def _served(position: int) -> Callable[[Solution], int]:
    return lambda solution: -solution.served[position]


def _trivial_bound(problem: Problem, goals: Goals) -> int:
    if goals.level is not None:
        return -problem.servable_pods_of(goals.level)
    return 0


def _rounded(problem: Problem, goals: Goals, cost: float) -> int:
    """Return the least whole value that a cost of this at least can mean."""
    if abs(cost) == float("inf"):
        return -(10**15)
    if goals.level is not None or goals.count_only:
        return ceil(cost - 1e-5)
    # Less than half a step is for the number of nodes.
    return ceil(cost - 0.5 - 1e-5) * price_step(problem)
