"""A linear or integer program that is minimised by HiGHS: columns and rows by number."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from highspy import Highs, HighsModelStatus, HighsSolution, HighsVarType

Entries = Iterable[tuple[int, float]]
"""Coefficients by row or column."""

INFINITY = float("inf")

SECONDS_LEAST = 0.001

MAX_NODES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Result:
    """What solving gave.

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

    def set_row_bounds(self, row: int, low: float, high: float) -> None:
        """Change the bounds of a row."""
        self._highs.changeRowBounds(row, low, high)

    def solve_linear(self, seconds: float) -> Result | None:
        """Return the optimum of the linear program; None if there is none, or no time to find it."""
        self._highs.setOptionValue("time_limit", _absolute(self._highs, seconds))
        self._highs.run()
        if self._highs.getModelStatus() != HighsModelStatus.kOptimal:
            return None
        solution = self._highs.getSolution()
        objective = self._sign * self._highs.getInfo().objective_function_value
        duals = [self._sign * dual for dual in solution.row_dual]
        return Result(list(solution.col_value), duals, objective, objective, True)

    def solve_integer(
        self, seconds: float, start: Mapping[int, float] | None = None, nodes: int = MAX_NODES
    ) -> Result | None:
        """Return the best solution with whole numbers; None if none was found.

        A program that is proven to have no solution raises Infeasible.

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
            raise Infeasible
        bound = self._sign * info.mip_dual_bound
        if info.primal_solution_status != 2 or not values:
            return None
        return Result(
            values,
            [],
            self._sign * info.objective_function_value,
            bound,
            status == HighsModelStatus.kOptimal,
        )


class Infeasible(Exception):
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
