"""Programs over patterns: contents of one node, made as the duals ask for them, each chosen several times.

The dual values of pods say what one node of a type can hold at most: guesses, bounds, the exact answer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fenka.autoscaler.solver.model import (
    INFINITY,
    Counts,
    Cut,
    Goals,
    Model,
    ModelResult,
    NoSolution,
    ServiceColumns,
)
from fenka.core.nodes.plan import Remaining
from fenka.core.nodes.price_bound import SLACK, ResourceSizes, totals_of
from fenka.core.nodes.problem import Need, Problem
from fenka.core.nodes.solution import Fill, Item, Solution, fill_room, solution_of

DualValues = Mapping[int, float]
"""By class; those of other classes are 0."""


class Pricing:
    """The contents of one node of a type."""

    def __init__(self, problem: Problem, number: int, classes: Sequence[int]) -> None:
        """classes: those that may go there."""
        self._problem, self.number = problem, number
        self._type = problem.types[number]
        needs = problem.needs(number)
        self._needs: dict[int, Need] = {}
        for class_ in classes:
            need = needs[class_]
            if need is not None and self._type.room().take(need) is not None:
                self._needs[class_] = need
        self.classes = tuple(self._needs)
        self._model: _NodeModel | None = None
        self._totals = totals_of(self._type)
        self._sizes = ResourceSizes(problem, number, self.classes)
        parts = self._sizes.rows / np.maximum(np.array(self._totals)[:, None], 1.0)
        self._shares = dict(zip(self.classes, parts.sum(axis=0).tolist(), strict=True))

    def dual_value(self, fill: Fill, dual_values: DualValues) -> float:
        """Return the sum of the dual values of a content's pods."""
        return sum(dual_values.get(class_, 0.0) for class_, _ in fill.items)

    def guesses(self, dual_values: DualValues, demand: Sequence[int]) -> list[Fill]:
        """Return contents of large dual value, greedily, by several measures of size.

        Args:
            dual_values: by class.
            demand: the most pods of each class.
        """
        fills = []
        wanted = [class_ for class_ in self.classes if dual_values.get(class_, 0.0) > 0]
        for size in ("share", "bottleneck", "dual_value"):
            order = sorted(
                wanted, key=lambda class_: -dual_values[class_] / self._size(class_, size)
            )
            left = [0] * len(self._problem.classes)
            for class_ in order:
                left[class_] = demand[class_]
            items = fill_room(self._problem, self.number, self._type.room(), order, left)
            fills.append(Fill(self.number, tuple(items)))
        return fills

    def at_most(self, dual_values: DualValues) -> float:
        """Return a bound of any content's dual value: by each resource alone, the least of all."""
        weights = np.zeros(len(self._problem.classes))
        weights[list(dual_values)] = list(dual_values.values())
        return self._sizes.at_most(weights, self._totals)

    def exact(
        self, dual_values: DualValues, seconds: float, nodes: int
    ) -> tuple[Fill | None, float]:
        """Return the best content that is found, None for none, and a bound of any content's dual value.

        Args:
            dual_values: by class.
            seconds: the time.
            nodes: of the search tree; after these the best so far is returned.
        """
        bound = self.at_most(dual_values)
        if not any(dual_values.get(class_, 0.0) > 0 for class_ in self.classes):
            return None, 0.0
        if self._model is None:
            self._model = _NodeModel(self._needs, self._problem, self.number)
        fill, proven = self._model.best(dual_values, seconds, nodes)
        return fill, min(bound, proven * (1 + SLACK) + SLACK)

    def columns(self, model: Model) -> "NodeVariables":
        """Add one node of the type to a model."""
        return NodeVariables(model, self._problem, self.number, self._needs)

    def _size(self, class_: int, measure: str) -> float:
        if measure == "dual_value":
            return 1.0
        if measure == "share":
            return max(self._needs[class_].share, 1e-9)
        return max(float(self._shares[class_]), 1e-9)


class _NodeModel:
    """A node as an integer program: pods by class, and slices by class and card."""

    def __init__(self, needs: Mapping[int, Need], problem: Problem, number: int) -> None:
        self.model = Model(maximise=True)
        self._number, self._needs = number, needs
        self._node = NodeVariables(self.model, problem, number, needs)

    def best(
        self, dual_values: DualValues, seconds: float, nodes: int
    ) -> tuple[Fill | None, float]:
        """Return what `Pricing.exact` does."""
        self.model.set_costs(
            {
                column: max(dual_values.get(class_, 0.0), 0.0)
                for class_, column in self._node.pods.items()
            }
        )
        result = self.model.solve_integer(seconds, nodes=nodes)
        if result is None:
            return None, INFINITY
        return Fill(self._number, self._node.items(result.values)), result.bound


class NodeVariables:
    """The columns and rows of one node in a model.

    Attributes:
        pods: the column of each class: how many pods the node holds.
    """

    def __init__(
        self, model: Model, problem: Problem, number: int, needs: Mapping[int, Need]
    ) -> None:
        node_type = problem.types[number]
        self._needs = needs
        self.pods = {
            class_: model.column(high=problem.classes[class_].demand, integer=True)
            for class_ in needs
        }
        self._slices: dict[tuple[int, int], int] = {}
        for dimension, total in enumerate(node_type.host):
            uses = [
                (self.pods[class_], float(amount))
                for class_, need in needs.items()
                for of, amount in need.host
                if of == dimension
            ]
            if uses:
                model.row(-INFINITY, float(max(total, 0)), uses)
        for class_, need in needs.items():
            if need.cards:
                self._spread(model, class_, need, problem, number)
        for card, room in enumerate(node_type.rooms):
            on = [
                (class_, column)
                for (class_, sliced), column in self._slices.items()
                if sliced == card
            ]
            memory = [(column, float(needs[class_].mib[card] or 0)) for class_, column in on]
            compute = [(column, float(needs[class_].compute)) for class_, column in on]
            model.row(-INFINITY, float(max(room.free_mib, 0)), memory)
            model.row(-INFINITY, float(max(room.free_compute, 0)), compute)

    def items(self, values: Sequence[float]) -> tuple[Item, ...]:
        """Return the pods with their cards."""
        items: list[Item] = []
        for class_, need in self._needs.items():
            count = round(values[self.pods[class_]])
            slices = Counter(
                {
                    card: round(values[column])
                    for (of, card), column in self._slices.items()
                    if of == class_
                }
            )
            for _ in range(count):
                # The cards with the most slices left first: so each pod has different ones.
                cards = sorted(slices, key=lambda card: (-slices[card], card))[: need.cards]
                slices.subtract(cards)
                items.append((class_, tuple(sorted(cards))))
        return tuple(items)

    def _spread(self, model: Model, class_: int, need: Need, problem: Problem, number: int) -> None:
        """Add a column for each card: how many of the class's pods have a slice of it."""
        columns = []
        for card, room in enumerate(problem.types[number].rooms):
            mib = need.mib[card]
            fits = mib is not None and mib <= room.free_mib and need.compute <= room.free_compute
            if not fits or (need.whole and not room.idle):
                continue
            column = model.column(high=problem.classes[class_].demand, integer=True)
            self._slices[class_, card] = column
            columns.append(column)
            # A pod's slices are on different cards.
            if need.cards > 1:
                model.row(-INFINITY, 0.0, [(column, 1.0), (self.pods[class_], -1.0)])
        slices = [(column, 1.0) for column in columns]
        model.row(0.0, 0.0, [*slices, (self.pods[class_], -float(need.cards))])


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
            for number, type_ in enumerate(problem.types)
            if type_.most
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
    """The dual values of a linear program's optimum: of pods by class, of nodes by type."""

    dual_values: DualValues
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
            class_: self._model.row(0.0, INFINITY, [(column, -1.0)])
            for class_, column in self._service.pods.items()
        }
        self._types = {
            number: self._model.row(-INFINITY, 0.0, [(column, -1.0)])
            for number, column in self._service.nodes.items()
        }
        self.counts = counts
        if counts is not None:
            self._fix(counts)
        self._patterns: list[tuple[int, Fill]] = []
        self._demand = [class_.demand for class_ in self._problem.classes]
        for fill in pool.fills if fills is None else fills:
            self._add(fill)

    @property
    def types(self) -> list[int]:
        """Return the types of which the program may have nodes."""
        counts = self.counts
        return [type_ for type_ in self._types if counts is None or counts.nodes.get(type_)]

    def converge(self) -> ModelResult | None:
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
                for fill in self._pool.pricings[number].guesses(duals.dual_values, self._demand)
                if self._improves(fill, duals) and self._learn(fill)
            ]
            if self._remaining() <= 0:
                return None
            if not new:
                return result
        return None

    def bounds(self, duals: Duals) -> dict[int, float]:
        """Return a rough bound by type of what a node holds."""
        return {
            number: pricing.at_most(duals.dual_values)
            for number, pricing in self._pool.pricings.items()
        }

    def price(
        self, duals: Duals, types: Sequence[int], nodes: int = PRICING_NODES
    ) -> tuple[dict[int, float], bool]:
        """Return a bound by type of what a node holds, and whether better patterns were found.

        Args:
            duals: of the linear program.
            types: those to look at.
            nodes: of the search tree of each.
        """
        bounds: dict[int, float] = {}
        better = False
        for number in types:
            pricing = self._pool.pricings[number]
            bounds[number] = pricing.at_most(duals.dual_values)
            if bounds[number] <= duals.nodes[number] + TOLERANCE or self._remaining() <= 0:
                continue
            fill, bounds[number] = pricing.exact(duals.dual_values, self._remaining(), nodes)
            if fill is not None and self._improves(fill, duals):
                better |= self._learn(fill)
        return bounds, better

    def duals(self, result: ModelResult) -> Duals:
        """Return the duals of a solved linear program."""
        dual_values = {class_: max(result.duals[row], 0.0) for class_, row in self._covers.items()}
        nodes = {number: max(-result.duals[row], 0.0) for number, row in self._types.items()}
        return Duals(dual_values, nodes)

    def cheapest(self, duals: Duals, count: int) -> list[Fill]:
        """Return the patterns that are closest to being used, at most this number of them."""

        def loss(fill: Fill) -> float:
            return duals.nodes[fill.type] - self._pool.pricings[fill.type].dual_value(
                fill, duals.dual_values
            )

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
        except NoSolution:
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
                for class_, pods in fills[column].counts.items():
                    self._demand[class_] = max(self._demand[class_] - count * pods, 0)
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
        for class_, column in self._service.pods.items():
            value = float(counts.pods.get(class_, 0))
            self._model.set_bounds(column, value, value)
            missing = [(self._covers[class_], 1.0)]
            self._model.column(1.0, 0.0, value, missing, integer=True)
        self._model.set_costs(dict.fromkeys(self._service.pods.values(), 0.0))

    def _improves(self, fill: Fill, duals: Duals) -> bool:
        dual_value = self._pool.pricings[fill.type].dual_value(fill, duals.dual_values)
        return dual_value > duals.nodes[fill.type] + TOLERANCE

    def _learn(self, fill: Fill) -> bool:
        if not self._pool.add(fill):
            return False
        self._add(fill)
        return True

    def _add(self, fill: Fill) -> None:
        if self.counts is not None and not self.counts.nodes.get(fill.type):
            return
        entries = [(self._types[fill.type], 1.0)]
        entries += [(self._covers[class_], float(pods)) for class_, pods in fill.counts.items()]
        column = self._model.column(0.0, 0.0, INFINITY, entries, integer=True)
        self._patterns.append((column, fill))

    def _start(self, known: Solution) -> dict[int, float]:
        """Return values of columns for a solution whose patterns are known."""
        values = self._service.start(known)
        columns = {
            (fill.type, frozenset(fill.counts.items())): column for column, fill in self._patterns
        }
        for fill in known.fills:
            column = columns.get((fill.type, frozenset(fill.counts.items())))
            if column is not None:
                values[column] = values.get(column, 0.0) + 1.0
        return values


def cut_of(duals: Duals, bounds: Mapping[int, float]) -> Cut:
    """Return the cut that these dual values and bounds make."""
    values = {class_: value for class_, value in duals.dual_values.items() if value > 0}
    return Cut(values, dict(bounds))
