"""Programs over patterns: contents of one node, each chosen so many times; made as the duals ask for them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fenka.autoscaler.solver.cuts import Counts, Cut
from fenka.autoscaler.solver.model import INFINITY, Infeasible, Model, Result
from fenka.autoscaler.solver.pricing import Pricing, Worths
from fenka.autoscaler.solver.service import Goals, ServiceColumns
from fenka.core.planning.plan import Remaining
from fenka.core.planning.problem import Problem
from fenka.core.planning.solution import Fill, Solution, solution_of

TOLERANCE = 1e-6

ROUNDS = 400
"""Rounds of new columns at most: a guard, since few problems need a hundred."""

ALMOST = 0.75
"""Patterns that are chosen for this part are fixed together."""

DIVE_STEPS = 25
"""The least steps of a dive, about."""

PRICING_NODES = 50
"""Nodes of the search tree for the best content of one node; after these its bound counts."""

CHOICE_NODES = 2_000
"""Nodes of the search tree for the best choice of patterns."""


class PatternPool:
    """The patterns that are known, by type. Equal contents are kept once."""

    def __init__(self, problem: Problem, fills: Iterable[Fill]) -> None:
        self.problem = problem
        classes = sorted(problem.servable)
        self.pricings = {
            number: Pricing(problem, number, classes)
            for number, each in enumerate(problem.types)
            if each.most
        }
        self._known: set[tuple[int, frozenset[tuple[int, int]]]] = set()
        self.fills: list[Fill] = []
        for fill in fills:
            self.add(fill)

    def add(self, fill: Fill) -> bool:
        """Add a pattern. Return whether it is new."""
        key = fill.type, frozenset(fill.counts.items())
        if key in self._known or not fill.items:
            return False
        self._known.add(key)
        self.fills.append(fill)
        return True


@dataclass(frozen=True, slots=True)
class Duals:
    """What pods are worth in a linear program's optimum, and what a node of each type costs there."""

    worths: Worths
    nodes: Mapping[int, float]


class PatternProgram:
    """Chooses patterns so that the goals are met; with `counts`, so that the fewest pods are missing."""

    def __init__(
        self,
        pool: PatternPool,
        goals: Goals,
        remaining: Remaining,
        counts: Counts | None = None,
        fills: Sequence[Fill] | None = None,
    ) -> None:
        """fills: the only patterns, None for all that the pool knows."""
        self._pool, self._problem, self._remaining = pool, pool.problem, remaining
        self._model = Model()
        self._service = ServiceColumns(self._model, self._problem, goals)
        self._covers = {
            each: self._model.row(0.0, INFINITY, [(column, -1.0)])
            for each, column in self._service.pods.items()
        }
        self._types = {
            number: self._model.row(-INFINITY, 0.0, [(column, -1.0)])
            for number, column in self._service.nodes.items()
        }
        self.counts = counts
        if counts is not None:
            self._fix(counts)
        self._patterns: list[tuple[int, Fill]] = []
        self._demand = [each.demand for each in self._problem.classes]
        for fill in pool.fills if fills is None else fills:
            self._add(fill)

    @property
    def types(self) -> list[int]:
        """Return the types of which the program may have nodes."""
        counts = self.counts
        return [it for it in self._types if counts is None or counts.nodes.get(it)]

    def converge(self) -> Result | None:
        """Solve, and add the patterns that greedy guesses find, until they find none. None: out of time."""
        for _ in range(ROUNDS):
            result = self._model.solve_linear(self._remaining())
            if result is None:
                return None
            duals = self.duals(result)
            new = [
                fill
                for number in self.types
                if self._remaining() > 0
                for fill in self._pool.pricings[number].guesses(duals.worths, self._demand)
                if self._improves(fill, duals) and self._learn(fill)
            ]
            if self._remaining() <= 0:
                return None
            if not new:
                return result
        return None

    def bounds(self, duals: Duals) -> dict[int, float]:
        """Return a rough bound by type of what a node holds."""
        return {it: each.at_most(duals.worths) for it, each in self._pool.pricings.items()}

    def price(
        self, duals: Duals, types: Sequence[int], nodes: int = PRICING_NODES
    ) -> tuple[dict[int, float], bool]:
        """Return a bound by type of what a node holds, and whether better patterns were found.

        Args:
            duals: what pods are worth.
            types: those to look at.
            nodes: of the search tree of each.
        """
        bounds: dict[int, float] = {}
        better = False
        for number in types:
            pricing = self._pool.pricings[number]
            bounds[number] = pricing.at_most(duals.worths)
            if bounds[number] <= duals.nodes[number] + TOLERANCE or self._remaining() <= 0:
                continue
            fill, bounds[number] = pricing.exact(duals.worths, self._remaining(), nodes)
            if fill is not None and self._improves(fill, duals):
                better |= self._learn(fill)
        return bounds, better

    def duals(self, result: Result) -> Duals:
        """Return the duals of a solved linear program."""
        worths = {each: max(result.duals[row], 0.0) for each, row in self._covers.items()}
        nodes = {number: max(-result.duals[row], 0.0) for number, row in self._types.items()}
        return Duals(worths, nodes)

    def cheapest(self, duals: Duals, count: int) -> list[Fill]:
        """Return the patterns that are closest to being used, so many at most."""

        def loss(fill: Fill) -> float:
            return duals.nodes[fill.type] - self._pool.pricings[fill.type].worth(fill, duals.worths)

        return sorted((fill for _, fill in self._patterns), key=loss)[:count]

    def choose(self, seconds: float, known: Solution | None = None) -> Solution | None:
        """Return the best solution of these patterns that is found in time.

        Args:
            seconds: the time.
            known: a solution to begin with.
        """
        start = None if known is None else self._start(known)
        try:
            result = self._model.solve_integer(seconds, start, CHOICE_NODES)
        except Infeasible:
            return None
        if result is None:
            return None
        fills: list[Fill] = []
        for column, fill in self._patterns:
            fills += [fill] * round(result.values[column])
        return solution_of(self._problem, fills)

    def dive(self) -> Solution | None:
        """Return the solution of fixing the largest patterns of the optimum in parts, again and again.

        The program is of no other use afterwards. None: out of time, or a dead end.
        """
        fixed: Counter[int] = Counter()
        while (result := self.converge()) is not None:
            left = {
                column: result.values[column] - fixed[column]
                for column, _ in self._patterns
                if result.values[column] > fixed[column] + TOLERANCE
            }
            if not left:
                break
            fills = dict(self._patterns)
            sure = sum(part >= ALMOST for part in left.values())
            # The largest, more of them at once where there are many.
            order = sorted(left, key=lambda column: -left[column])
            for column in order[: max(sure, len(left) // DIVE_STEPS, 1)]:
                count = max(int(left[column] + TOLERANCE), 1)
                fixed[column] += count
                self._model.set_bounds(column, fixed[column], INFINITY)
                for each, pods in fills[column].counts.items():
                    self._demand[each] = max(self._demand[each] - count * pods, 0)
        else:
            return None
        return solution_of(
            self._problem,
            [fill for column, fill in self._patterns for _ in range(fixed[column])],
        )

    # ---- inside ----

    def _fix(self, counts: Counts) -> None:
        for number, column in self._service.nodes.items():
            value = float(counts.nodes.get(number, 0))
            self._model.set_bounds(column, value, value)
        self._model.set_costs(dict.fromkeys(self._service.nodes.values(), 0.0))
        for each, column in self._service.pods.items():
            value = float(counts.pods.get(each, 0))
            self._model.set_bounds(column, value, value)
            missing = [(self._covers[each], 1.0)]
            self._model.column(1.0, 0.0, value, missing, integer=True)
        self._model.set_costs(dict.fromkeys(self._service.pods.values(), 0.0))

    def _improves(self, fill: Fill, duals: Duals) -> bool:
        worth = self._pool.pricings[fill.type].worth(fill, duals.worths)
        return worth > duals.nodes[fill.type] + TOLERANCE

    def _learn(self, fill: Fill) -> bool:
        if not self._pool.add(fill):
            return False
        self._add(fill)
        return True

    def _add(self, fill: Fill) -> None:
        if self.counts is not None and not self.counts.nodes.get(fill.type):
            return
        entries = [(self._types[fill.type], 1.0)]
        entries += [(self._covers[each], float(it)) for each, it in fill.counts.items()]
        column = self._model.column(0.0, 0.0, INFINITY, entries, integer=True)
        self._patterns.append((column, fill))

    def _start(self, known: Solution) -> dict[int, float]:
        """Return values of columns for a solution whose patterns are known."""
        values = self._service.start(known)
        columns = {(fill.type, frozenset(fill.counts.items())): it for it, fill in self._patterns}
        for fill in known.fills:
            column = columns.get((fill.type, frozenset(fill.counts.items())))
            if column is not None:
                values[column] = values.get(column, 0.0) + 1.0
        return values


def cut_of(duals: Duals, bounds: Mapping[int, float]) -> Cut:
    """Return the cut that these worths and bounds make."""
    return Cut({each: it for each, it in duals.worths.items() if it > 0}, dict(bounds))
