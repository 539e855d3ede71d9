"""Measure plans: their price against the optimum or a bound, their time, and what other algorithms buy.

The openb trace is read from the folder in FENKA_OPENB, and left out where that is not set: its node list,
its list of pods, and `default.42.arrivals.csv.gz`, the names of pods in the order of their arrival.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.autoscaler import day, loop
from bench.autoscaler.baselines import BASELINES, World, served
from bench.autoscaler.workloads import drawn, large, openb
from fenka.autoscaler.solver.solve import improve
from fenka.core.nodes.case import PlanningCase
from fenka.core.nodes.plan import NodePlan, Solver, make_plan

SEEDS = 12
LARGER_SEEDS = 6
LONG_S = 40.0
"""Seconds for the optimum, or at least a good bound."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A plan, with the seconds of the clock and of the processor."""

    plan: NodePlan
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Yardstick:
    """A row of the table.

    Attributes:
        name: of the workload.
        cases: those of which the mean is taken.
        limit_s: the time limit.
        goal: for the mean of price by bound; None for a goal in `price` or in seconds.
        worst: for the largest.
        price: the highest price, None for none.
        seconds: the most seconds of the clock, None for none.
        unit_mib: the unit in which the baselines count.
    """

    name: str
    cases: tuple[PlanningCase, ...]
    limit_s: float = 2.0
    goal: float | None = None
    worst: float | None = None
    price: float | None = None
    seconds: float | None = None
    unit_mib: int = 1024


def timed(case: PlanningCase, limit_s: float, solver: Solver | None = improve) -> Timed:
    """Plan with a time limit."""
    begin, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(case, lambda: begin + limit_s - time.perf_counter(), solver)
    return Timed(plan, time.perf_counter() - begin, time.process_time() - cpu)


def yardsticks() -> Iterable[Yardstick]:
    """Yield the workloads."""
    of_30 = tuple(drawn(seed, 30) for seed in range(1, SEEDS + 1))
    yield Yardstick("drawn 30", of_30, goal=1.01, worst=1.03)
    of_100 = tuple(drawn(seed, 100) for seed in range(1, LARGER_SEEDS + 1))
    yield Yardstick("drawn 100", of_100, goal=1.02)
    folder = os.environ.get("FENKA_OPENB")
    if folder:
        yield Yardstick("openb 300", (openb(Path(folder)),), limit_s=10, price=1979, unit_mib=1)
    yield Yardstick("1,000 pods, 50 offers, 500 nodes", (large(),), limit_s=1.8, seconds=2.0)


def measure(of: Yardstick) -> tuple[list[Timed], list[float], bool]:
    """Return the plans, the best bound that is known of each, and whether the goals are met."""
    plans = [timed(case, of.limit_s) for case in of.cases]
    bounds = [each.plan.bound for each in plans]
    if of.goal is not None:
        for number, (case, each) in enumerate(zip(of.cases, plans, strict=True)):
            if not each.plan.optimal:
                bounds[number] = max(bounds[number], timed(case, LONG_S).plan.bound)
    ratios = _ratios(plans, bounds)
    met = of.goal is None or statistics.mean(ratios) <= of.goal
    met &= of.worst is None or max(ratios) <= of.worst
    met &= of.price is None or plans[0].plan.cost <= of.price
    met &= of.seconds is None or max(each.wall_s for each in plans) <= of.seconds
    return plans, bounds, met and not any(each.plan.unserved for each in plans)


def _ratios(plans: Sequence[Timed], bounds: Sequence[float]) -> list[float]:
    return [
        each.plan.cost / bound if bound else 1.0 for each, bound in zip(plans, bounds, strict=True)
    ]


def baseline_rows(of: Yardstick, plans: Sequence[Timed]) -> Iterable[str]:
    """Yield a row for each baseline: price by ours, and pods served."""
    pods = sum(len(case.requests) for case in of.cases)
    for name, (buy, exact) in BASELINES.items():
        ratios, placed, cpu = [], 0, time.process_time()
        for case, ours in zip(of.cases, plans, strict=True):
            bought = buy(World(case, exact=exact, unit_mib=of.unit_mib))
            ratios.append(bought.price(case) / ours.plan.cost)
            placed += served(case, bought)
        spent = (time.process_time() - cpu) / len(of.cases)
        yield (
            f"| {of.name} | {name} | {statistics.mean(ratios):.2f} | {placed / pods:.0%} "
            f"| {spent:.2f} |"
        )


def main(show: Callable[[str], None] = print) -> int:
    """Print both tables; return 1 if a goal is missed."""
    show(
        "| workload | price | by bound: mean | worst | proven best | CPU s | clock s | goals |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    missed = False
    rows: list[str] = []
    for of in yardsticks():
        plans, bounds, met = measure(of)
        ratios = _ratios(plans, bounds)
        missed |= not met
        to_bound = f"{statistics.mean(ratios):.4f} | {max(ratios):.4f}" if all(bounds) else "- | -"
        show(
            f"| {of.name} | {statistics.mean(it.plan.cost for it in plans):.1f} | {to_bound} "
            f"| {sum(it.plan.optimal for it in plans)}/{len(plans)} "
            f"| {statistics.mean(it.cpu_s for it in plans):.2f} "
            f"| {max(it.wall_s for it in plans):.2f} | {'met' if met else 'missed'} |"
        )
        if not any(case.nodes for case in of.cases):
            rows += baseline_rows(of, plans)
    show("\n| workload | algorithm | price by ours | pods served | CPU s |\n|---|---|---|---|---|")
    for row in rows:
        show(row)
    show("")
    missed |= day.main(()) != 0
    show("")
    missed |= loop.main() != 0
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
