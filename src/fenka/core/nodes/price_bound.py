"""Bounds by each resource alone: what nodes hold at most, and the least price of serving a number of pods.

They need neither a solver nor much time, so that every plan says how far it may be from the best.
"""

from collections.abc import Iterator, Sequence
from math import ceil

import numpy as np

from fenka.core.nodes.problem import Need, NodeType, Problem

SLACK = 1e-7
"""The relative amount by which an upper bound is raised, so that rounding never makes it wrong."""


class ResourceSizes:
    """The amounts that one pod of each class takes of each resource of a node, for nodes of one shape.

    Attributes:
        classes: the classes that may go there.
        rows: sizes by resource and class: the host's dimensions, cards' memory in MiB and compute in percent.
    """

    def __init__(self, problem: Problem, number: int, classes: Sequence[int]) -> None:
        """number: a type of the shape. classes: those to look at."""
        needs = problem.needs(number)
        pairs = [(position, need) for position in classes if (need := needs[position]) is not None]
        self.classes = np.array([position for position, _ in pairs], np.intp)
        dimensions = len(problem.types[number].host)
        self.rows = np.array([_sizes(need, dimensions) for _, need in pairs], float)
        self.rows = self.rows.reshape(len(pairs), dimensions + 2).T
        self._demand = np.array([problem.classes[class_].demand for class_ in self.classes], float)

    def at_most(self, weights: np.ndarray, totals: Sequence[float]) -> float:
        """Return a bound of the weight of all pods that fit into these totals.

        Args:
            weights: of a pod by class of the problem; classes without a positive weight are left out.
            totals: the amount of each resource.
        """
        weights = weights[self.classes]
        kept = weights > 0
        weights, demand = weights[kept], self._demand[kept]
        best = float(weights @ demand)
        for sizes, total in zip(self.rows[:, kept], totals, strict=True):
            if sizes.any():
                best = min(best, _fractional(weights, demand, sizes, total))
        return best * (1 + SLACK) + SLACK


def totals_of(node_type: NodeType) -> list[float]:
    """Return the amount of each resource that such a node has free, in the order of `ResourceSizes.rows`."""
    rooms = [room for room in node_type.rooms if room.free_mib >= 0]
    host = [float(max(amount, 0)) for amount in node_type.host]
    memory = sum(room.free_mib for room in rooms)
    return [*host, float(memory), float(sum(max(room.free_compute, 0) for room in rooms))]


def price_bound(problem: Problem, served: Sequence[int]) -> int:
    """Return a price in ten-thousandths below which no plan serves at least these numbers of pods.

    Any weights of pods give a bound: the weight that nodes there cannot hold has to be bought, at the least
    price of a unit of weight. The best of several weights counts.

    Args:
        problem: what is planned.
        served: the numbers of pods by priority, the highest first.
    """
    shapes = {type_.shape: number for number, type_ in enumerate(problem.types) if type_.most}
    sizes = {
        shape: ResourceSizes(problem, number, sorted(problem.servable))
        for shape, number in shapes.items()
    }
    there: dict[int, np.ndarray] = {}
    for node_type in problem.types:
        if node_type.group is None and node_type.most:
            totals = node_type.most * np.array(totals_of(node_type))
            there[node_type.shape] = there.get(node_type.shape, 0.0) + totals
    offers = [problem.types[number] for number in problem.offers if problem.types[number].most]
    best = 0.0
    for weights in _weights(problem, list(sizes.values())):
        rest = _least_weight(problem, weights, served)
        rest -= sum(sizes[shape].at_most(weights, list(totals)) for shape, totals in there.items())
        rates = [
            offer.price / sizes[offer.shape].at_most(weights, totals_of(offer)) for offer in offers
        ]
        best = max(best, rest * min(rates, default=0.0))
    return ceil(best * (1 - SLACK) - SLACK)


def _weights(problem: Problem, shapes: Sequence[ResourceSizes]) -> Iterator[np.ndarray]:
    """Yield weights by class: the least price of a pod by itself, then the least size of each resource."""
    count = len(problem.classes)
    prices = np.full(count, np.inf)
    for number in problem.offers:
        offer = problem.types[number]
        if offer.most:
            of_shape = ResourceSizes(problem, number, sorted(problem.servable))
            shares = of_shape.rows / np.maximum(np.array(totals_of(offer))[:, None], 1.0)
            by_class = offer.price * shares.max(axis=0, initial=0.0)
            prices[of_shape.classes] = np.minimum(prices[of_shape.classes], by_class)
    yield np.where(np.isfinite(prices), prices, 0.0)
    for row in range(len(shapes[0].rows) if shapes else 0):
        least = np.full(count, np.inf)
        for of_shape in shapes:
            least[of_shape.classes] = np.minimum(least[of_shape.classes], of_shape.rows[row])
        yield np.where(np.isfinite(least), least, 0.0)


def _least_weight(problem: Problem, weights: np.ndarray, served: Sequence[int]) -> float:
    """Return the least weight of the given number of pods of each priority."""
    total = 0.0
    for level, count in zip(problem.levels, served, strict=True):
        left = count
        members = (class_ for class_ in problem.servable if problem.level_of(class_) == level)
        for position in sorted(members, key=lambda class_: float(weights[class_])):
            taken = min(left, problem.classes[position].demand)
            total += taken * float(weights[position])
            left -= taken
    return total


def _sizes(need: Need, dimensions: int) -> list[float]:
    host = dict(need.host)
    amounts = [host.get(dimension, 0) for dimension in range(dimensions)]
    return [
        float(amount)
        for amount in (*amounts, need.cards * need.least_mib, need.cards * need.compute)
    ]


def _fractional(weights: np.ndarray, demand: np.ndarray, sizes: np.ndarray, total: float) -> float:
    """Return the weight of a knapsack of one resource into which pods may be put in parts."""
    order = np.argsort(sizes / weights, kind="stable")
    used = np.cumsum((sizes * demand)[order])
    whole = int(np.searchsorted(used, total, side="right"))
    weight = float((weights * demand)[order[:whole]].sum())
    if whole < len(order):
        part = total - (used[whole - 1] if whole else 0.0)
        weight += float(weights[order[whole]]) * part / float(sizes[order[whole]])
    return weight
