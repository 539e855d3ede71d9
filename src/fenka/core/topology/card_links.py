"""Which cards of a node belong together, by their distances.

`evaluate` and `gangs` import this module when they need it. numpy starts threads, and a command with
threads cannot enter a lease.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, permutations
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from fenka.core.inventory import UNKNOWN, Distance

_Matrix = npt.NDArray[np.integer[Any]]

MAX_SETS = 20_000
"""All sets of 8 of 16 cards are 12,870. Of more sets, only those around each card are compared."""


def cost_of(distances: bytes, positions: Sequence[int]) -> int:
    """Return the cost of a set of cards: fewer pairs without NVLink first, then less distance in all.

    distances: of the cards at all positions, a row for each.
    """
    matrix = _weights(distances)
    return int(matrix[np.ix_(positions, positions)].sum()) // 2


def unknown_cost(count: int) -> int:
    """Return the cost of so many cards whose distances are not known."""
    return comb(count, 2) * int(_WEIGHTS[UNKNOWN])


@lru_cache(16384)
def choose(
    distances: bytes, positions: tuple[int, ...], count: int, *, linked: bool = False
) -> tuple[int, ...] | None:
    """Return the cards that belong together most; None if there is no such set.

    It is the set of the least `cost_of`. Of equal ones it is that which leaves the best connected rest,
    and of these the first in the order of the positions.

    Args:
        distances: of all cards, a row for each.
        positions: the cards that may be chosen, the preferred first.
        count: how many to choose.
        linked: whether each pair of them must have NVLink.
    """
    if count > len(positions):
        return None
    weights = _weights(distances)[np.ix_(positions, positions)]
    sets = _sets(weights, count)
    inside = _sums(weights, sets)
    costs = (inside << _COST_BITS) + _sums(weights, ~sets)
    if linked:
        # A pair without NVLink alone costs more than all pairs with one.
        costs = costs[allowed := inside < _WITHOUT_NVLINK]
        sets = sets[allowed]
    if not costs.size:
        return None
    chosen = sets[int(costs.argmin())]
    return tuple(position for position, taken in zip(positions, chosen, strict=True) if taken)


@lru_cache(16384)
def least_cost(distances: bytes, positions: tuple[int, ...], count: int) -> int:
    """Return the cost of the cards that belong together most. At least as many can be chosen."""
    chosen = choose(distances, positions, count)
    assert chosen is not None, "there are enough"
    return cost_of(distances, chosen)


def most_linked(distances: bytes, positions: tuple[int, ...], count: int) -> int:
    """Return how many of the cards, fewer than `count`, NVLink connects at most; 0 if no two."""
    return next(
        (
            fewer
            for fewer in range(min(count - 1, len(positions)), 1, -1)
            if choose(distances, positions, fewer, linked=True) is not None
        ),
        0,
    )


MAX_RING = 8
"""The shortest ring of as many cards is found by trying all 5,040. Of more, the next is the nearest."""


@lru_cache(1024)
def ring(distances: bytes, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the cards in the order of a ring of the least cost, from the first on.

    Of equal rings it is that which has the closest cards first, so that ranks which are split into pairs or
    fours from the start are connected best.

    Args:
        distances: of all cards, a row for each.
        positions: the cards of the ring.
    """
    weights = _weights(distances)
    first, *others = positions
    if len(positions) > MAX_RING:
        order, left = [first], others
        while left:
            order.append(min(left, key=lambda card: weights[order[-1], card]))
            left = [card for card in left if card != order[-1]]
        return tuple(order)
    orders = np.array([(first, *rest) for rest in permutations(others)], np.int64)
    steps = weights[orders, np.roll(orders, -1, axis=1)]
    # The last key of lexsort is the first to sort by.
    best = np.lexsort((*steps.T[::-1], steps.sum(axis=1)))[0]
    return tuple(orders[best].tolist())


_WITHOUT_NVLINK, _COST_BITS = 1 << 14, 26
_WEIGHTS = np.array(
    [0, *(level + _WITHOUT_NVLINK * (level > Distance.NVLINK) for level in Distance if level)],
    np.int64,
)
"""By distance. Pairs without NVLink come first: 62 cards have 1,891 pairs, whose distances add up to less."""


@lru_cache(1024)
def _weights(distances: bytes) -> _Matrix:
    size = int(len(distances) ** 0.5)
    weights: _Matrix = _WEIGHTS[np.frombuffer(distances, np.uint8).reshape(size, size)]
    return weights


def _sums(weights: _Matrix, sets: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the weights of all pairs of each set."""
    members = sets.astype(np.int64)
    sums: npt.NDArray[np.int64] = ((members @ weights) * members).sum(axis=1) // 2
    return sums


def _sets(weights: _Matrix, count: int) -> npt.NDArray[np.bool_]:
    """Return sets of so many cards, in the order of the cards; a row of flags for each."""
    size = len(weights)
    if comb(size, count) <= MAX_SETS:
        return _all_sets(size, count)
    sets = np.zeros((size, size), np.bool_)
    for start in range(size):
        # The next card is the one that is nearest to all that are chosen.
        chosen = [start]
        while len(chosen) < count:
            costs = weights[chosen].sum(axis=0)
            costs[chosen] = np.iinfo(np.int64).max
            chosen.append(int(costs.argmin()))
        sets[start, chosen] = True
    return sets


@lru_cache(64)
def _all_sets(size: int, count: int) -> npt.NDArray[np.bool_]:
    sets = np.zeros((comb(size, count), size), np.bool_)
    for row, chosen in zip(sets, combinations(range(size), count), strict=True):
        row[list(chosen)] = True
    return sets
