"""What one node of a type can hold at most, by the worth of pods: guesses, bounds, the exact answer."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fenka.autoscaler.solver.model import INFINITY, Model
from fenka.core.planning.price_bound import SLACK, ResourceSizes, totals_of
from fenka.core.planning.problem import Problem
from fenka.core.planning.room import Need
from fenka.core.planning.solution import Fill, Item, fill_room

Worths = Mapping[int, float]
"""By class; others are worth nothing."""


class Pricing:
    """The contents of one node of a type."""

    def __init__(self, problem: Problem, number: int, classes: Sequence[int]) -> None:
        """classes: those that may go there."""
        self._problem, self.number = problem, number
        self._type = problem.types[number]
        needs = problem.needs(number)
        self._needs: dict[int, Need] = {}
        for each in classes:
            need = needs[each]
            if need is not None and self._type.room().take(need) is not None:
                self._needs[each] = need
        self.classes = tuple(self._needs)
        self._model: _NodeModel | None = None
        self._totals = totals_of(self._type)
        self._sizes = ResourceSizes(problem, number, self.classes)
        parts = self._sizes.rows / np.maximum(np.array(self._totals)[:, None], 1.0)
        self._shares = dict(zip(self.classes, parts.sum(axis=0).tolist(), strict=True))

    def worth(self, fill: Fill, worths: Worths) -> float:
        """Return what a content is worth."""
        return sum(worths.get(each, 0.0) for each, _ in fill.items)

    def guesses(self, worths: Worths, demand: Sequence[int]) -> list[Fill]:
        """Return contents that are worth much, greedily, by several measures of size.

        Args:
            worths: by class.
            demand: the most pods of each class.
        """
        fills = []
        wanted = [each for each in self.classes if worths.get(each, 0.0) > 0]
        for size in ("share", "bottleneck", "worth"):
            order = sorted(wanted, key=lambda each: -worths[each] / self._size(each, size))
            left = [0] * len(self._problem.classes)
            for each in order:
                left[each] = demand[each]
            items = fill_room(self._problem, self.number, self._type.room(), order, left)
            fills.append(Fill(self.number, tuple(items)))
        return fills

    def at_most(self, worths: Worths) -> float:
        """Return a bound of any content's worth: by each resource alone, the least of all."""
        weights = np.zeros(len(self._problem.classes))
        weights[list(worths)] = list(worths.values())
        return self._sizes.at_most(weights, self._totals)

    def exact(self, worths: Worths, seconds: float, nodes: int) -> tuple[Fill | None, float]:
        """Return the best content that is found, None for none, and a bound of any content's worth.

        Args:
            worths: by class.
            seconds: the time.
            nodes: of the search tree; after these the best so far is returned.
        """
        bound = self.at_most(worths)
        if not any(worths.get(each, 0.0) > 0 for each in self.classes):
            return None, 0.0
        if self._model is None:
            self._model = _NodeModel(self._needs, self._problem, self.number)
        fill, proven = self._model.best(worths, seconds, nodes)
        return fill, min(bound, proven * (1 + SLACK) + SLACK)

    def columns(self, model: Model) -> "NodeColumns":
        """Add one node of the type to a model."""
        return NodeColumns(model, self._problem, self.number, self._needs)

    def _size(self, each: int, measure: str) -> float:
        if measure == "worth":
            return 1.0
        if measure == "share":
            return max(self._needs[each].share, 1e-9)
        return max(float(self._shares[each]), 1e-9)


class _NodeModel:
    """A node as an integer program: pods by class, and slices by class and card."""

    def __init__(self, needs: Mapping[int, Need], problem: Problem, number: int) -> None:
        self.model = Model(maximise=True)
        self._number, self._needs = number, needs
        self._node = NodeColumns(self.model, problem, number, needs)

    def best(self, worths: Worths, seconds: float, nodes: int) -> tuple[Fill | None, float]:
        """Return what `Pricing.exact` does."""
        self.model.set_costs(
            {column: max(worths.get(each, 0.0), 0.0) for each, column in self._node.pods.items()}
        )
        result = self.model.solve_integer(seconds, nodes=nodes)
        if result is None:
            return None, INFINITY
        return Fill(self._number, self._node.items(result.values)), result.bound


class NodeColumns:
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
            each: model.column(high=problem.classes[each].demand, integer=True) for each in needs
        }
        self._slices: dict[tuple[int, int], int] = {}
        for dimension, total in enumerate(node_type.host):
            uses = [
                (self.pods[each], float(amount))
                for each, need in needs.items()
                for of, amount in need.host
                if of == dimension
            ]
            if uses:
                model.row(-INFINITY, float(max(total, 0)), uses)
        for each, need in needs.items():
            if need.cards:
                self._spread(model, each, need, problem, number)
        for card, room in enumerate(node_type.rooms):
            on = [(each, column) for (each, it), column in self._slices.items() if it == card]
            memory = [(column, float(needs[each].mib[card] or 0)) for each, column in on]
            compute = [(column, float(needs[each].compute)) for each, column in on]
            model.row(-INFINITY, float(max(room.free_mib, 0)), memory)
            model.row(-INFINITY, float(max(room.free_compute, 0)), compute)

    def items(self, values: Sequence[float]) -> tuple[Item, ...]:
        """Return the pods with their cards."""
        items: list[Item] = []
        for each, need in self._needs.items():
            count = round(values[self.pods[each]])
            slices = Counter(
                {
                    card: round(values[column])
                    for (of, card), column in self._slices.items()
                    if of == each
                }
            )
            for _ in range(count):
                # The cards with the most slices left first: so each pod has different ones.
                cards = sorted(slices, key=lambda it: (-slices[it], it))[: need.cards]
                slices.subtract(cards)
                items.append((each, tuple(sorted(cards))))
        return tuple(items)

    def _spread(self, model: Model, each: int, need: Need, problem: Problem, number: int) -> None:
        """Add a column for each card: how many of the class's pods have a slice of it."""
        columns = []
        for card, room in enumerate(problem.types[number].rooms):
            mib = need.mib[card]
            fits = mib is not None and mib <= room.free_mib and need.compute <= room.free_compute
            if not fits or (need.whole and not room.idle):
                continue
            column = model.column(high=problem.classes[each].demand, integer=True)
            self._slices[each, card] = column
            columns.append(column)
            # A pod's slices are on different cards.
            if need.cards > 1:
                model.row(-INFINITY, 0.0, [(column, 1.0), (self.pods[each], -1.0)])
        slices = [(column, 1.0) for column in columns]
        model.row(0.0, 0.0, [*slices, (self.pods[each], -float(need.cards))])
