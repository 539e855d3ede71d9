"""Solutions: which nodes have which pods, as numbers of the problem."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fenka.core.nodes.problem import NodeRoom, Problem

Item = tuple[int, tuple[int, ...]]
"""A pod: its class and the cards that it has."""


class Fill(NamedTuple):
    """The pods of one node. type: the number of the node's type."""

    type: int
    items: tuple[Item, ...]

    @property
    def counts(self) -> Counter[int]:
        """Return the number of pods by class."""
        return Counter(number for number, _ in self.items)


@dataclass(frozen=True, slots=True)
class Solution:
    """One fill for each node that is bought, and for each node there that receives pods.

    Attributes:
        fills: in no particular order.
        served: the number of pods by priority, the highest first.
        price: the sum of what is bought, in ten-thousandths.
        bought: the number of nodes.
    """

    fills: tuple[Fill, ...]
    served: tuple[int, ...]
    price: int
    bought: int

    @property
    def rank(self) -> tuple[tuple[int, ...], int, int]:
        """Return what sorts solutions: the smallest is the best."""
        return tuple(-number for number in self.served), self.price, self.bought

    def copies(self) -> Counter[int]:
        """Return the number of fills by type."""
        return Counter(fill.type for fill in self.fills)


def solution_of(problem: Problem, fills: Sequence[Fill]) -> Solution:
    """Return the solution that these fills make. Each type has as many as its `least` at least."""
    kept = _trimmed(problem, [fill for fill in fills if fill.items])
    used = Counter(fill.type for fill in kept)
    for number in problem.offers:
        missing = problem.types[number].least - used[number]
        kept += [Fill(number, ())] * missing
    served: Counter[int] = Counter()
    for fill in kept:
        for number, _ in fill.items:
            served[problem.level_of(number)] += 1
    bought = [fill.type for fill in kept if problem.types[fill.type].group is not None]
    price = sum(problem.types[number].price for number in bought)
    return Solution(
        tuple(kept), tuple(served[level] for level in problem.levels), price, len(bought)
    )


def _trimmed(problem: Problem, fills: Sequence[Fill]) -> list[Fill]:
    """Return the fills without pods beyond the demand, and without incomplete gangs."""
    left = [class_.demand for class_ in problem.classes]
    kept: list[Fill] = []
    for fill in fills:
        items = []
        for item in fill.items:
            if left[item[0]] > 0:
                left[item[0]] -= 1
                items.append(item)
        kept.append(Fill(fill.type, tuple(items)))
    dropped = incomplete(problem, left)
    if dropped:
        kept = [
            Fill(fill.type, tuple(item for item in fill.items if item[0] not in dropped))
            for fill in kept
        ]
    return [fill for fill in kept if fill.items]


def incomplete(problem: Problem, left: Sequence[int]) -> set[int]:
    """Return the classes of gangs' options that have pods left over; also of a second complete option."""
    dropped: set[int] = set()
    for gang in problem.gangs:
        complete = [option for option in gang.options if not any(left[class_] for class_ in option)]
        for option in gang.options:
            if option not in complete[:1]:
                dropped.update(option)
    return dropped


def fill_room(
    problem: Problem, fill_type: int, room: NodeRoom, order: Sequence[int], left: list[int]
) -> list[Item]:
    """Place as many pods as fit, in this order of classes. Takes them from `left`."""
    needs = problem.needs(fill_type)
    items: list[Item] = []
    free = room.most_mib()
    for number in order:
        count = left[number]
        need = needs[number]
        # Most pods of a large problem are too large for most nodes: that is seen without a call.
        if count <= 0 or need is None or need.least_mib > free:
            continue
        while count:
            cards = room.take(need)
            if cards is None:
                break
            items.append((number, cards))
            count -= 1
        if count < left[number]:
            left[number] = count
            free = room.most_mib()
    return items


def topped_up(problem: Problem, solution: Solution) -> Solution:
    """Return the solution with more pods in what its nodes have free, the highest priority first."""
    left = [class_.demand for class_ in problem.classes]
    for fill in solution.fills:
        for number, _ in fill.items:
            left[number] -= 1
    order = [class_ for class_ in problem.servable - problem.in_gangs if left[class_]]
    order.sort(key=lambda class_: (-problem.level_of(class_), class_))
    used = solution.copies()
    unused = [
        Fill(number, ())
        for number, type_ in enumerate(problem.types)
        for _ in range(type_.most - used[number] if type_.group is None else 0)
    ]
    fills = []
    for fill in [*solution.fills, *unused] if order else solution.fills:
        room, needs = problem.types[fill.type].room(), problem.needs(fill.type)
        for number, cards in fill.items:
            need = needs[number]
            assert need is not None
            room.put(need, cards)
        more = fill_room(problem, fill.type, room, order, left)
        fills.append(Fill(fill.type, (*fill.items, *more)))
    return solution_of(problem, fills)


def refill(problem: Problem, fill_type: int, counts: Mapping[int, int]) -> Fill | None:
    """Return these pods on an empty node of the type, None if this order does not fit them."""
    left = [0] * len(problem.classes)
    needs = problem.needs(fill_type)
    sized = []
    for number, count in counts.items():
        need = needs[number]
        if need is None:
            return None
        left[number] = count
        sized.append((-need.whole, -need.cards, -need.share, number))
    order = [number for *_, number in sorted(sized)]
    items = fill_room(problem, fill_type, problem.types[fill_type].room(), order, left)
    return None if any(left) else Fill(fill_type, tuple(items))
