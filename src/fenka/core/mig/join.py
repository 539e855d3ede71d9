"""Joins the options of several cards by dynamic programming over what is served.

A state says how much of every demand is served. Of equal states the cheapest is kept, which is exact.
If more than `width` states remain after a card, the most promising ones are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fenka.core.mig.bound import Bound
from fenka.core.mig.geometry import Geometry
from fenka.core.mig.options import MOVE, Counts, Demands, Ints, Options

PAIRS = 1_000_000
"""Pairs of a state and an option that are joined at once, which bounds the memory that is used."""
WORK, EXACT_WORK = 56_000_000, 160_000_000
"""Pairs of a state and an option that are joined for all cards together; the second one for a few cards."""
EXACT_CARDS = 4
"""So many cards are a few: plans for them are worth waiting for."""
DISCOUNT = 0.85
"""The share of free capacity that a state is expected to use, where too many states have to be compared."""


@dataclass(frozen=True, slots=True)
class Result:
    """The best combination.

    Attributes:
        value: of the requests that are served.
        cost: moves, conversions, flexibility and idle instances; see options.py.
        rows: the option of each card.
    """

    value: int
    cost: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class _Stage:
    """States after a card: what is served, the cost, and how each was reached."""

    served: Counts
    costs: Ints
    parents: Ints
    rows: Ints

    def keep(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> "_Stage":
        return _Stage(self.served[rows], self.costs[rows], self.parents[rows], self.rows[rows])


class Join:
    """Finds the best combination of options.

    Args:
        demands: the columns.
        cards: the options of every card. Cards of one model follow each other.
        geometries: the model of every card.
        bound: limits what cards can serve.
    """

    def __init__(
        self,
        demands: Demands,
        cards: Sequence[Options],
        geometries: Sequence[Geometry],
        bound: Bound,
    ) -> None:
        self._demands, self._cards = demands, cards
        self._geometries, self._bound = geometries, bound
        self._caps = np.array(demands.caps, dtype=np.int16)
        self._first_job = len(demands.values)
        self._low = np.zeros(len(self._caps), dtype=np.int16)
        self._low[self._first_job : -1] = -demands.case.moves
        self._low[-1] = -demands.case.conversions
        self._work = (WORK if len(cards) > EXACT_CARDS else EXACT_WORK) // max(1, len(cards))
        # Less than a move more than is allowed; smaller costs never add up to a move.
        self._too_expensive = demands.case.moves * MOVE + MOVE // 2
        radices = self._caps.astype(np.int64) - self._low + 1
        self._weights = np.cumprod(np.concatenate([[1], radices[:-1]]))
        cheapest = [int(each.costs.min()) for each in cards]
        self._cost_after = [sum(cheapest[number + 1 :]) for number in range(len(cards))]

    def best(self, width: int, known: Result | None = None) -> Result | None:
        """Return the best combination, keeping at most `width` states after each card.

        None if all states that were kept move a job that then has no instance.

        known: a combination that was found before. States that cannot lead to a better one are dropped.
        """
        shape = (1, len(self._caps))
        nothing = np.zeros(1, dtype=np.int64)
        stage = _Stage(np.zeros(shape, dtype=np.int16), nothing, nothing, nothing)
        stages: list[_Stage] = []
        for number, options in enumerate(self._cards):
            if number:
                stage = self._prune(
                    stage, number - 1, min(width, self._work // len(options.costs)), known
                )
                stages[-1] = stage
            last = number + 1 == len(self._cards)
            stage = self._add(stage, options, self._best_row if last else self._cheapest)
            geometry = self._geometries[number]
            if not last and geometry not in self._geometries[number + 1 :]:
                stage = self._cheapest(self._settle(stage, geometry))
            stages.append(stage)
        stage = stage if known is None else self._prune(stage, len(self._cards) - 1, 1, known)
        return self._result(stages) if len(stage.costs) else known

    def _result(self, stages: list[_Stage]) -> Result:
        rows: list[int] = []
        row = 0
        for stage in reversed(stages):
            rows.append(int(stage.rows[row]))
            row = int(stage.parents[row])
        last = stages[-1]
        value, cost = int(self._demands.value(last.served)[0]), int(last.costs[0])
        return Result(value, cost, tuple(reversed(rows)))

    def _add(self, stage: _Stage, options: Options, reduce: Callable[[_Stage], _Stage]) -> _Stage:
        """Return every state with every option of the next card, reduced to those that matter."""
        count = len(options.costs)
        step = max(1, PAIRS // count)
        parts: list[_Stage] = []
        for begin in range(0, len(stage.costs), step):
            end = min(begin + step, len(stage.costs))
            served = stage.served[begin:end, None, :] + options.gains[None]
            served = np.minimum(served, self._caps).reshape(-1, len(self._caps))
            costs = (stage.costs[begin:end, None] + options.costs[None]).ravel()
            parents = np.repeat(np.arange(begin, end), count)
            rows = np.tile(np.arange(count), end - begin)
            allowed = (served >= self._low).all(axis=1) & (costs < self._too_expensive)
            parts.append(reduce(_Stage(served, costs, parents, rows).keep(allowed)))
            if len(parts) > 1 and sum(len(part.costs) for part in parts) > PAIRS:
                parts = [reduce(_joined(parts))]
        if not parts:
            return stage
        return reduce(_joined(parts)) if len(parts) > 1 else parts[0]

    def _best_row(self, stage: _Stage) -> _Stage:
        """Return only the best of the states after the last card."""
        stage = self._settle(stage, self._geometries[-1])
        order = np.lexsort((stage.costs, -self._demands.value(stage.served)))
        return stage.keep(order[:1])

    def _cheapest(self, stage: _Stage) -> _Stage:
        """Return the cheapest of each group of equal states."""
        # The weights may overflow with many demands; then they hash, and wrap around.
        keys = np.zeros(len(stage.costs), dtype=np.int64)
        for column, weight in enumerate(self._weights):
            keys += stage.served[:, column] * weight
        order = np.lexsort((stage.costs, keys))
        sorted_keys = keys[order]
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = sorted_keys[1:] != sorted_keys[:-1]
        return stage.keep(order[first])

    def _settle(self, stage: _Stage, geometry: Geometry) -> _Stage:
        """Give jobs of one model their instances, then let the others serve requests of any model."""
        columns = [
            column
            for column, (model, _) in enumerate(self._demands.jobs, self._first_job)
            if model == geometry
        ]
        if not columns:
            return stage
        housed = np.flatnonzero((stage.served[:, columns] >= 0).all(axis=1))
        served = self._demands.for_requests(stage.served)
        served[:, columns] = 0
        after = _Stage(served, stage.costs, stage.parents, stage.rows)
        return after.keep(housed)

    def _prune(self, stage: _Stage, number: int, width: int, known: Result | None) -> _Stage:
        if known is not None:
            bound = self._bound.value(stage.served, number)
            costs = stage.costs + self._cost_after[number]
            equal = (bound < known.value + 0.5) & (costs >= known.cost)
            hopeless = np.where(bound < known.value - 0.5, True, equal)
            stage = stage.keep(np.flatnonzero(~hopeless))
        if len(stage.costs) > width:
            bound = self._bound.value(stage.served, number, DISCOUNT)
            stage = stage.keep(np.lexsort((stage.costs, -bound))[:width])
        return stage


def _joined(parts: list[_Stage]) -> _Stage:
    return _Stage(
        np.concatenate([part.served for part in parts]),
        np.concatenate([part.costs for part in parts]),
        np.concatenate([part.parents for part in parts]),
        np.concatenate([part.rows for part in parts]),
    )
