"""The rows that each program of a plan shares: counts of nodes, pods served, gangs, limits, priorities."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import gcd

from fenka.autoscaler.solver.model import INFINITY, Model
from fenka.core.planning.case import whole_price
from fenka.core.planning.problem import Problem
from fenka.core.planning.solution import Solution


@dataclass(slots=True)
class Goals:
    """What is settled already, and what is optimised next.

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
            number: model.column(costs.get(number, 0.0), each.least, each.most, integer=True)
            for number, each in enumerate(problem.types)
            if each.most
        }
        self.pods: dict[int, int] = {}
        full = {level: problem.servable_pods_of(level) for level in problem.levels}
        in_gangs = {each for gang in problem.gangs for option in gang.options for each in option}
        for each in sorted(problem.servable):
            level = problem.level_of(each)
            low = 0.0
            demand = float(problem.classes[each].demand)
            if each not in in_gangs and goals.served.get(level) == full[level]:
                low = demand
            cost = -1.0 if goals.level == level else 0.0
            self.pods[each] = model.column(cost, low, demand, integer=True)
        self._gangs(model)
        self._limits(model, goals)
        for level, least in goals.served.items():
            of_level = [
                (column, 1.0)
                for each, column in self.pods.items()
                if problem.level_of(each) == level
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
        values |= {column: float(served[each]) for each, column in self.pods.items()}
        values |= {
            column: float(all(served[each] for each in option))
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
                for each in option:
                    demand = float(self._problem.classes[each].demand)
                    model.row(0.0, 0.0, [(self.pods[each], 1.0), (serves, -demand)])
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
