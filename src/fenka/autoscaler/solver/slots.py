"""Packs pods on a given number of nodes exactly: one integer program of all nodes and cards."""

from fenka.autoscaler.solver.cuts import Counts
from fenka.autoscaler.solver.model import INFINITY, Model
from fenka.autoscaler.solver.patterns import PatternPool
from fenka.autoscaler.solver.pricing import NodeColumns
from fenka.core.planning.solution import Fill, Solution, solution_of

MAX_COLUMNS = 20_000
"""A larger program would not be solved in time."""


def packed(pool: PatternPool, counts: Counts, seconds: float) -> Solution | None:
    """Return a solution with these counts, None if it is not known whether there is one.

    Raises:
        Infeasible: if there is certainly none.
    """
    problem, model = pool.problem, Model()
    nodes: list[tuple[int, NodeColumns]] = []
    for number, count in counts.nodes.items():
        pricing = pool.pricings[number]
        for _ in range(count if pricing.classes else 0):
            nodes.append((number, pricing.columns(model)))
            if model.columns > MAX_COLUMNS:
                return None
    for each, count in counts.pods.items():
        if count:
            pods = [(of.pods[each], 1.0) for _, of in nodes if each in of.pods]
            model.row(float(count), INFINITY, pods)
    result = model.solve_integer(seconds)
    if result is None:
        return None
    return solution_of(
        problem, [Fill(number, columns.items(result.values)) for number, columns in nodes]
    )
