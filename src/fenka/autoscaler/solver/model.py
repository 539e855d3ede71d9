"""Programs that HiGHS minimises, the rows that all programs of a plan share, and the program of counts."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import gcd

import numpy as np
from highspy import Highs, HighsModelStatus, HighsSolution, HighsVarType

from fenka.core.nodes.case import whole_price
from fenka.core.nodes.problem import Problem
from fenka.core.nodes.solution import Solution

Entries = Iterable[tuple[int, float]]
"""Coefficients by row or column."""

INFINITY = float("inf")

SECONDS_LEAST = 0.001

MAX_NODES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ModelResult:
    """The result of a solved program.

    Attributes:
        values: of all columns.
        duals: of all rows; only of linear programs.
        objective: of the values.
        bound: nothing is smaller.
        proven: whether nothing better exists.
    """

    values: list[float]
    duals: list[float]
    objective: float
    bound: float
    proven: bool


class Model:
    """A program that grows. It minimises unless `maximise`."""

    def __init__(self, *, maximise: bool = False) -> None:
        self._highs = Highs()  # type: ignore[no-untyped-call]
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        self._highs.setOptionValue("mip_rel_gap", 0.0)
        self._sign = -1.0 if maximise else 1.0
        self._integers: list[int] = []
        self.columns = self.rows = 0

    def column(
        self,
        cost: float = 0.0,
        low: float = 0.0,
        high: float = INFINITY,
        entries: Entries = (),
        *,
        integer: bool = False,
    ) -> int:
        """Add a column, with its coefficients in rows that exist. Return its number."""
        rows, values = _arrays(entries)
        self._highs.addCol(self._sign * cost, low, high, len(rows), rows, values)
        if integer:
            self._integers.append(self.columns)
        self.columns += 1
        return self.columns - 1

    def row(self, low: float, high: float, entries: Entries = ()) -> int:
        """Add a row, with its coefficients in columns that exist. Return its number."""
        columns, values = _arrays(entries)
        self._highs.addRow(low, high, len(columns), columns, values)
        self.rows += 1
        return self.rows - 1

    def set_costs(self, costs: Mapping[int, float]) -> None:
        """Change the costs of these columns."""
        columns = np.fromiter(costs.keys(), np.int32, len(costs))
        values = np.fromiter(costs.values(), np.float64, len(costs))
        self._highs.changeColsCost(len(costs), columns, self._sign * values)

    def set_bounds(self, column: int, low: float, high: float) -> None:
        """Change the bounds of a column."""
        self._highs.changeColBounds(column, low, high)

    def solve_linear(self, seconds: float) -> ModelResult | None:
        """Return the optimum of the linear program; None if there is none, or no time to find it."""
        self._highs.setOptionValue("time_limit", _absolute(self._highs, seconds))
        self._highs.run()
        if self._highs.getModelStatus() != HighsModelStatus.kOptimal:
            return None
        solution = self._highs.getSolution()
        objective = self._sign * self._highs.getInfo().objective_function_value
        duals = [self._sign * dual for dual in solution.row_dual]
        return ModelResult(list(solution.col_value), duals, objective, objective, True)

    def solve_integer(
        self, seconds: float, start: Mapping[int, float] | None = None, nodes: int = MAX_NODES
    ) -> ModelResult | None:
        """Return the best solution with whole numbers; None if none was found.

        A program that is proven to have no solution raises NoSolution.

        Args:
            seconds: after this the best so far stands.
            start: values of a known solution; columns that it does not name are 0.
            nodes: of the search tree, after which the best so far stands too. Unlike time this is the
                same on a busy machine.
        """
        highs, integers = self._highs, np.array(self._integers, np.int32)
        kinds = np.full(len(integers), HighsVarType.kInteger)
        highs.changeColsIntegrality(len(integers), integers, kinds)
        if start is not None:
            known = HighsSolution()
            known.col_value = [start.get(column, 0.0) for column in range(self.columns)]
            highs.setSolution(known)
        highs.setOptionValue("time_limit", _absolute(highs, seconds))
        highs.setOptionValue("mip_max_nodes", nodes)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        continuous = np.full(len(integers), HighsVarType.kContinuous)
        values = list(highs.getSolution().col_value)
        highs.changeColsIntegrality(len(integers), integers, continuous)
        if status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
            raise NoSolution
        bound = self._sign * info.mip_dual_bound
        if info.primal_solution_status != 2 or not values:
            return None
        return ModelResult(
            values,
            [],
            self._sign * info.objective_function_value,
            bound,
            status == HighsModelStatus.kOptimal,
        )


class NoSolution(Exception):
    """The program has no solution."""


def _absolute(highs: Highs, seconds: float) -> float:
    """Return the time limit as HiGHS counts it: from the model's first run."""
    return float(highs.getRunTime()) + max(seconds, SECONDS_LEAST)


def _arrays(entries: Entries) -> tuple[np.ndarray, np.ndarray]:
    numbers, values = [], []
    for number, value in entries:
        if value:
            numbers.append(number)
            values.append(value)
    return np.array(numbers, np.int32), np.array(values, np.float64)


@dataclass(slots=True)
class Goals:
    """The goals that are settled already, and the next one to optimise.

    Attributes:
        served: the least number of pods by priority.
        price: the highest price, None for any.
        level: the priority whose pods are counted next; None for nodes.
        count_only: whether the number of nodes is what counts, not their price.
    """

    served: dict[int, int] = field(default_factory=dict)
    price: int | None = None
    level: int | None = None
    count_only: bool = False


class ServiceColumns:
    """The columns for nodes and pods in a model.

    Attributes:
        nodes: how many nodes, by type.
        pods: how many pods are served, by class.
    """

    def __init__(self, model: Model, problem: Problem, goals: Goals) -> None:
        self._problem = problem
        costs = costs_of(problem, goals)
        self.nodes = {
            number: model.column(costs.get(number, 0.0), type_.least, type_.most, integer=True)
            for number, type_ in enumerate(problem.types)
            if type_.most
        }
        self.pods: dict[int, int] = {}
        full = {level: problem.servable_pods_of(level) for level in problem.levels}
        in_gangs = problem.in_gangs
        for class_ in sorted(problem.servable):
            level = problem.level_of(class_)
            low = 0.0
            demand = float(problem.classes[class_].demand)
            if class_ not in in_gangs and goals.served.get(level) == full[level]:
                low = demand
            cost = -1.0 if goals.level == level else 0.0
            self.pods[class_] = model.column(cost, low, demand, integer=True)
        self._gangs(model)
        self._limits(model, goals)
        for level, least in goals.served.items():
            of_level = [
                (column, 1.0)
                for class_, column in self.pods.items()
                if problem.level_of(class_) == level
            ]
            model.row(least, INFINITY, of_level)

    def start(self, known: Solution) -> dict[int, float]:
        """Return the values of these columns for a solution."""
        copies = known.copies()
        values = {
            column: float(max(copies[number], self._problem.types[number].least))
            for number, column in self.nodes.items()
        }
        served: Counter[int] = sum((fill.counts for fill in known.fills), Counter())
        values |= {column: float(served[class_]) for class_, column in self.pods.items()}
        values |= {
            column: float(all(served[class_] for class_ in option))
            for option, column in self._options.items()
        }
        return values

    def _gangs(self, model: Model) -> None:
        self._options: dict[tuple[int, ...], int] = {}
        for gang in self._problem.gangs:
            whole = []
            for option in self._problem.servable_options(gang):
                serves = model.column(0.0, 0.0, 1.0, integer=True)
                self._options[option] = serves
                whole.append((serves, 1.0))
                for class_ in option:
                    demand = float(self._problem.classes[class_].demand)
                    model.row(0.0, 0.0, [(self.pods[class_], 1.0), (serves, -demand)])
            model.row(-INFINITY, 1.0, whole)

    def _limits(self, model: Model, goals: Goals) -> None:
        limits, types = self._problem.case.limits, self._problem.types
        bought = [
            (number, column)
            for number, column in self.nodes.items()
            if types[number].group is not None
        ]
        prices = [(column, float(types[number].price)) for number, column in bought]
        scale = price_step(self._problem)
        prices = [(column, price / scale) for column, price in prices]
        if limits.nodes is not None:
            model.row(-INFINITY, limits.nodes, [(column, 1.0) for _, column in bought])
        if limits.price is not None:
            model.row(-INFINITY, whole_price(limits.price) // scale, prices)
        if goals.price is not None:
            model.row(-INFINITY, goals.price // scale, prices)
        for name, most in limits.cards.items():
            cards = [(column, float(types[number].cards.get(name, 0))) for number, column in bought]
            model.row(-INFINITY, most, cards)


def price_step(problem: Problem) -> int:
    """Return what all prices are multiples of, at least 1."""
    return reduce(gcd, (problem.types[number].price for number in problem.offers), 0) or 1


def costs_of(problem: Problem, goals: Goals) -> Mapping[int, float]:
    """Return the cost of a node by type.

    Prices count in multiples of their step. All nodes together add less than half a step, so that of equal
    prices fewer nodes are better.
    """
    if goals.level is not None:
        return {}
    if goals.count_only:
        return dict.fromkeys(problem.offers, 1.0)
    step, types = price_step(problem), problem.types
    many = problem.servable_pods + sum(types[number].least for number in problem.offers) + 2
    return {number: types[number].price / step + 0.5 / many for number in problem.offers}


@dataclass(frozen=True, slots=True)
class Counts:
    """Nodes by type, and pods to be served by class."""

    nodes: Mapping[int, int]
    pods: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """The dual values of the pods served are at most what the nodes can hold of them.

    It holds for any dual values, if no node of a type can hold more than its bound.

    Attributes:
        dual_values: by class.
        bounds: by type.
    """

    dual_values: Mapping[int, float]
    bounds: Mapping[int, float]

    def violation(self, counts: Counts) -> float:
        """Return by how much the pods' dual values exceed what the nodes can hold, by the largest of them."""
        dual_value = sum(
            value * counts.pods.get(class_, 0) for class_, value in self.dual_values.items()
        )
        held = sum(count * self.bounds.get(number, 0.0) for number, count in counts.nodes.items())
        return (dual_value - held) / max(self.dual_values.values(), default=1.0)


class CutMaster:
    """The program of counts."""

    def __init__(
        self, problem: Problem, goals: Goals, cuts: Iterable[Cut], excluded: Iterable[Counts]
    ) -> None:
        self._model = Model()
        self._problem = problem
        self._service = ServiceColumns(self._model, problem, goals)
        for cut in cuts:
            self._cut(cut)
        for counts in excluded:
            self._exclude(counts)

    def solve(self, seconds: float) -> tuple[Counts | None, float] | None:
        """Return the best counts that no cut forbids and a bound of any plan's cost; None if there are none.

        The counts are None where there was no time to find them.
        """
        try:
            result = self._model.solve_integer(seconds)
        except NoSolution:
            return None
        if result is None:
            return None, -INFINITY
        nodes = {
            number: round(result.values[column]) for number, column in self._service.nodes.items()
        }
        pods = {
            class_: round(result.values[column]) for class_, column in self._service.pods.items()
        }
        return Counts(nodes, pods), result.bound

    def _cut(self, cut: Cut) -> None:
        scale = max(cut.dual_values.values(), default=0.0)
        if scale <= 0:
            return
        holds = [
            (column, cut.bounds[number] / scale) for number, column in self._service.nodes.items()
        ]
        dual_values = [
            (self._service.pods[class_], -value / scale)
            for class_, value in cut.dual_values.items()
        ]
        self._model.row(0.0, INFINITY, [*holds, *dual_values])

    def _exclude(self, counts: Counts) -> None:
        """Forbid these counts, and all with fewer nodes or more pods: they cannot be packed either."""
        choices = []
        for number, column in self._service.nodes.items():
            more = counts.nodes.get(number, 0) + 1
            if more <= self._problem.types[number].most:
                choice = self._model.column(0.0, 0.0, 1.0, integer=True)
                self._model.row(0.0, INFINITY, [(column, 1.0), (choice, -float(more))])
                choices.append((choice, 1.0))
        for class_, column in self._service.pods.items():
            demand, served = self._problem.classes[class_].demand, counts.pods.get(class_, 0)
            if served:
                choice = self._model.column(0.0, 0.0, 1.0, integer=True)
                fewer = float(demand - served + 1)
                self._model.row(-INFINITY, float(demand), [(column, 1.0), (choice, fewer)])
                choices.append((choice, 1.0))
        self._model.row(1.0, INFINITY, choices)
