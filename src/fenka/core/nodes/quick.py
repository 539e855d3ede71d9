"""The quick plan: some sixty greedy plans, with weights that learn from each other; the cheapest stands.

A class weighs its pod's cost. That is first the price of a node by how many of it alone a node holds, then a
share of the price of the node that it went to. Nodes there are filled first. New nodes are filled by weight
and size, and the one with the most weight for its price is bought, again and again.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from fenka.core.nodes.case import whole_price
from fenka.core.nodes.problem import Need, NodeRoom, Problem
from fenka.core.nodes.solution import (
    Fill,
    Item,
    Solution,
    fill_room,
    incomplete,
    refill,
    solution_of,
)

PASSES = 60
LEARNING = 0.3
NOISE = 0.2
MOST_HELD = 100
GOLDEN = 0.618033988749895
"""Multiples of it, modulo one, are spread evenly: they stand for chance, and are the same each time."""


def quick_plan(
    problem: Problem, enough: Callable[[], bool], collect: Callable[[Fill], None]
) -> Solution:
    """Return the cheapest of the greedy plans.

    Args:
        problem: what to plan.
        enough: whether no further plan should be made; the first is always made.
        collect: receives each new node's content.
    """
    base = base_weights(problem)
    weights, best = list(base), solution_of(problem, ())
    free = best
    for number in range(PASSES):
        solution = _plan(problem, weights, number)
        for fill in solution.fills:
            collect(fill)
        if not number or solution.rank < best.rank:
            best = solution
        all_served = sum(best.served) == problem.servable_pods
        if (all_served and best.rank[1:] == free.rank[1:]) or enough():
            break
        weights = _learned(problem, weights, base, solution, number)
    return best


def base_weights(problem: Problem) -> list[float]:
    """Return for each class the least price by the number of its pods that an empty node holds."""
    weights = [0.0] * len(problem.classes)
    held: dict[tuple[int, int], int] = {}
    for number in problem.offers:
        offer, needs = problem.types[number], problem.needs(number)
        for class_ in problem.servable if offer.most else ():
            key = offer.shape, class_
            if key not in held:
                held[key] = _held(offer.room(), needs[class_])
            price = max(offer.price, 1) / held[key] if held[key] else 0.0
            if price and (not weights[class_] or price < weights[class_]):
                weights[class_] = price
    # A pod that only fits nodes there weighs something too.
    return [weight or 1.0 for weight in weights]


def _held(room: NodeRoom, need: Need | None) -> int:
    """Return how many of these pods fit; more than some number is no better estimate."""
    held = 0
    while need is not None and held < MOST_HELD and room.take(need) is not None:
        held += 1
    return held


def _learned(
    problem: Problem, weights: list[float], base: list[float], solution: Solution, number: int
) -> list[float]:
    """Return the weights for the next plan, by what this one paid."""
    learned = list(weights)
    for fill in solution.fills:
        price = problem.types[fill.type].price
        total = sum(base[class_] for class_, _ in fill.items)
        for count in fill.counts if price else ():
            learned[count] = (1 - LEARNING) * learned[count] + LEARNING * base[
                count
            ] * price / total
    noise = (((number + 1) * (class_ + 7) * GOLDEN) % 1.0 for class_ in range(len(learned)))
    return [
        max(weight, 1e-9) * (1 - NOISE / 2 + NOISE * draw)
        for weight, draw in zip(learned, noise, strict=True)
    ]


def _plan(problem: Problem, weights: list[float], number: int) -> Solution:
    """Return a plan of all classes together or, where not all can be served, the better one by priority."""
    classes = problem.servable.difference(*_other_options(problem, weights, number))
    best: Solution | None = None
    for _ in range(len(problem.gangs) + 1):
        plans = [_Greedy(problem, weights, [classes])]
        if sum(plans[0].left[class_] for class_ in classes):
            levels = [
                frozenset(class_ for class_ in classes if problem.level_of(class_) == level)
                for level in problem.levels
            ]
            plans.append(_Greedy(problem, weights, levels))
            if problem.case.limits.nodes is not None:
                plans.append(_Greedy(problem, [1.0] * len(weights), levels, by_node=True))
        solutions = [(solution_of(problem, plan.result()), plan.left) for plan in plans]
        solution, left = min(solutions, key=lambda pair: pair[0].rank)
        if best is None or solution.rank < best.rank:
            best = solution
        dropped = classes & incomplete(problem, left)
        if not dropped:
            break
        # The gang of the lowest priority gives way to the others.
        last = min(problem.level_of(class_) for class_ in dropped)
        classes -= {class_ for class_ in dropped if problem.level_of(class_) == last}
    assert best is not None
    return best


def _other_options(
    problem: Problem, weights: list[float], number: int
) -> Iterator[tuple[int, ...]]:
    """Yield the classes of zones that gangs do not use in this plan."""

    def price(option: tuple[int, ...]) -> float:
        return sum(weights[class_] * problem.classes[class_].demand for class_ in option)

    for position, gang in enumerate(problem.gangs):
        options = sorted(problem.servable_options(gang), key=price)
        # The cheapest in two plans of three, then the others by turns.
        turn = number // 3 + position if number % 3 == 2 else 0
        chosen = options[turn % len(options)] if options else None
        yield from (option for option in gang.options if option != chosen)


class _Greedy:
    """One greedy plan. left: the pods that it does not serve."""

    def __init__(
        self,
        problem: Problem,
        weights: list[float],
        levels: Sequence[frozenset[int]],
        *,
        by_node: bool = False,
    ) -> None:
        """by_node: prefer the most weight by node, where the number of nodes is what is short."""
        self._by_node = by_node
        self._problem, self._weights = problem, weights
        self.left = [class_.demand for class_ in problem.classes]
        self._orders: dict[int, list[int]] = {}
        self._budget = Budget(problem)
        self._open: list[tuple[int, NodeRoom, list[Item]]] = []
        self._by_price = sorted(problem.offers, key=lambda type_: problem.types[type_].price)
        self._refilled: dict[tuple[int, Fill], Fill | None] = {}
        self._open_nodes()
        for classes in levels:
            self._orders.clear()
            for number, room, items in self._open:
                order = self._order(number, classes)
                items.extend(fill_room(problem, number, room, order, self.left))
            if any(self.left[class_] for class_ in classes):
                self._buy(classes)

    def result(self) -> list[Fill]:
        """Return the nodes' contents, each new one on the cheapest offer that holds it."""
        fills: list[Fill] = []
        kept: Counter[int] = Counter()
        for number, _, items in self._open:
            fill = Fill(number, tuple(items))
            kept[number] += 1
            if items and kept[number] > self._problem.types[number].least:
                fill = self._cheaper(fill)
            fills.append(fill)
        return fills

    def _open_nodes(self) -> None:
        types = self._problem.types
        # The fullest nodes first, so that large rooms stay; then those that are bought in any case.
        order = sorted(
            range(len(types)),
            key=lambda type_: (
                types[type_].price,
                sum(max(room.free_mib, 0) for room in types[type_].rooms),
            ),
        )
        for number in order:
            for _ in range(types[number].least):
                self._open.append((number, types[number].room(), []))
                if types[number].group is not None:
                    self._budget.buy(number)

    def _order(self, number: int, classes: frozenset[int]) -> list[int]:
        """Return the classes by weight for what they take of the node."""
        shape = self._problem.types[number].shape
        if shape not in self._orders:
            needs, weights = self._problem.needs(number), self._weights
            scored = []
            for class_ in classes:
                need = needs[class_]
                if need is not None:
                    scored.append((-weights[class_] / max(need.share, 1e-9), class_))
            self._orders[shape] = [class_ for _, class_ in sorted(scored)]
        return self._orders[shape]

    def _buy(self, classes: frozenset[int]) -> None:
        """Buy the node with the most weight for its price, until that serves nobody more."""
        heap: list[tuple[float, int, int, list[Item], NodeRoom]] = []
        for number in self._problem.offers:
            if self._budget.allows(number):
                heap.append((-float("inf"), -1, number, [], self._problem.types[number].room()))
        heapify(heap)
        bought = 0
        while heap:
            _, seen, number, items, room = heappop(heap)
            if not self._budget.allows(number):
                continue
            if seen != bought:
                # Fewer pods are left since: it may be less now.
                left, room = list(self.left), self._problem.types[number].room()
                items = fill_room(self._problem, number, room, self._order(number, classes), left)
                if items:
                    gain = sum(self._weights[class_] for class_, _ in items)
                    price = 1 if self._by_node else max(self._problem.types[number].price, 1)
                    heappush(heap, (-gain / price, bought, number, items, room))
                continue
            counts = Counter(class_ for class_, _ in items)
            # As many as pods are left for: other offers have not become better since.
            copies = min(self.left[class_] // count for class_, count in counts.items())
            for _ in range(copies):
                if self._budget.allows(number):
                    self._open.append((number, room.copy(), list(items)))
                    self._budget.buy(number)
                    for class_, count in counts.items():
                        self.left[class_] -= count
            bought += 1
            heappush(heap, (-float("inf"), -1, number, [], room))

    def _cheaper(self, fill: Fill) -> Fill:
        for number in self._by_price:
            if self._problem.types[number].price >= self._problem.types[fill.type].price:
                break
            if self._budget.allows(number, instead=fill.type):
                key = number, fill
                if key not in self._refilled:
                    self._refilled[key] = refill(self._problem, number, fill.counts)
                other = self._refilled[key]
                if other is not None:
                    self._budget.buy(number, instead=fill.type)
                    return other
        return fill


class Budget:
    """The limits of what may still be bought."""

    def __init__(self, problem: Problem) -> None:
        limits = problem.case.limits
        self._types = problem.types
        self._left = [type_.most if type_.group is not None else 0 for type_ in problem.types]
        self._nodes = limits.nodes
        self._price = None if limits.price is None else whole_price(limits.price)
        self._cards = dict(limits.cards)

    def allows(self, number: int, instead: int | None = None) -> bool:
        """Return whether one more may be bought. instead: a type of which one is given back for it."""
        if self._left[number] <= 0:
            return False
        offer = self._types[number]
        back = None if instead is None else self._types[instead]
        if self._nodes is not None and self._nodes < (back is None):
            return False
        price = offer.price - (back.price if back else 0)
        if self._price is not None and price > self._price:
            return False
        return all(
            count - (back.cards.get(model, 0) if back else 0) <= self._cards[model]
            for model, count in offer.cards.items()
            if model in self._cards
        )

    def buy(self, number: int, instead: int | None = None) -> None:
        """Count one more. instead: a type of which one is given back for it."""
        self._count(number, 1)
        if instead is not None:
            self._count(instead, -1)

    def _count(self, number: int, copies: int) -> None:
        offer = self._types[number]
        self._left[number] -= copies
        if self._nodes is not None:
            self._nodes -= copies
        if self._price is not None:
            self._price -= copies * offer.price
        for model, count in offer.cards.items():
            if model in self._cards:
                self._cards[model] -= copies * count
