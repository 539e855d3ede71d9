"""The solver's parts: what a node holds at most, cuts, exclusions, exact packing."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.autoscaler.solver.model import INFINITY, Counts, Cut, CutMaster, Goals, Model, NoSolution
from fenka.autoscaler.solver.patterns import PatternPool, PatternProgram, Pricing, cut_of
from fenka.autoscaler.solver.solve import packed
from fenka.core.nodes.case import PlanningCase
from fenka.core.nodes.problem import Problem
from fenka.core.nodes.quick import quick_plan
from fenka.core.nodes.solution import refill
from tests.core.nodes.builders import case, group, request


def forever() -> float:
    """Return the seconds that are left: as many as needed."""
    return math.inf


def pool_of(what: PlanningCase) -> PatternPool:
    """Return the patterns of the first quick plan."""
    problem = Problem(what)
    return PatternPool(problem, quick_plan(problem, lambda: True, lambda _: None).fills)


def test_model_reports_optimum_duals_and_infeasibility() -> None:
    """Two halves of a knapsack, in parts and whole."""
    model = Model(maximise=True)
    columns = [model.column(cost, 0, 1, integer=True) for cost in (3.0, 2.0)]
    model.row(-INFINITY, 3.0, [(column, 2.0) for column in columns])
    linear, whole = model.solve_linear(9.0), model.solve_integer(9.0)
    assert linear is not None
    assert whole is not None
    assert (linear.objective, linear.duals, whole.objective, whole.bound) == (4.0, [1.0], 3.0, 3.0)
    model.row(2.0, INFINITY, [(columns[0], 1.0)])
    with pytest.raises(NoSolution):
        model.solve_integer(9.0)


SIZES = st.lists(
    st.tuples(st.integers(1, 14), st.integers(1, 2), st.integers(0, 60), st.floats(0.1, 5)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 3), st.integers(1000, 6000))
def test_exact_content_is_worth_most_of_all_that_fit(
    sizes: list[tuple[int, int, int, float]], cards: int, cpu: int
) -> None:
    """Among all numbers of pods, each tried; guesses have a smaller dual value, bounds a larger one."""
    requests = [
        request(f"r{number}", units, cards=of, compute=compute, cpu_milli=900 + number, count=2)
        for number, (units, of, compute, _) in enumerate(sizes)
    ]
    problem = Problem(case(*requests, groups=(group(cards=cards, cpu_milli=cpu),)))
    dual_values = {number: dual_value for number, (*_, dual_value) in enumerate(sizes)}
    pricing = Pricing(problem, 0, range(len(requests)))
    fill, bound = pricing.exact(dual_values, 60.0, 10**6)
    most = 0.0
    for counts in product(range(3), repeat=len(requests)):
        wanted = {number: count for number, count in enumerate(counts) if count}
        if refill(problem, 0, wanted) is not None:
            most = max(most, sum(dual_values[number] * count for number, count in wanted.items()))
    best = 0.0 if fill is None else pricing.dual_value(fill, dual_values)
    # `refill` tries one order only, so it may miss what the program finds; never the reverse.
    assert best >= most - 1e-6
    assert best - 1e-6 <= bound <= pricing.at_most(dual_values)
    demand = [each.demand for each in problem.classes]
    assert all(
        pricing.dual_value(it, dual_values) <= best + 1e-6
        for it in pricing.guesses(dual_values, demand)
    )


def test_cut_forbids_nodes_that_cannot_hold_what_is_wanted() -> None:
    """Three pods of 10 units want three cards, by the duals of two."""
    pool = pool_of(case(request(units=10, count=3), groups=(group(),)))
    counts = Counts({0: 2}, {0: 3})
    program = PatternProgram(pool, Goals(), forever, counts)
    result = program.converge()
    assert result is not None
    assert result.objective == pytest.approx(1.0)
    duals = program.duals(result)
    cut = cut_of(duals, program.price(duals, [0])[0])
    assert cut.violation(counts) > 0.5
    assert cut.violation(Counts({0: 3}, {0: 3})) < 1e-5
    answer = CutMaster(pool.problem, Goals(served={0: 3}), [cut], []).solve(9.0)
    assert answer is not None
    assert answer[0] == Counts({0: 3}, {0: 3})
    assert answer[1] == pytest.approx(3.3)  # a step of 4.0 each, and a tenth for each node


def test_exclusion_forbids_counts_and_all_that_hold_less() -> None:
    """Of two groups one more node of any is wanted then."""
    pool = pool_of(case(request(units=10), groups=(group("a"), group("b", 9.0, cards=2))))
    goals = Goals(served={0: 1})
    excluded = [Counts({0: 1, 1: 0}, {0: 1})]
    answer = CutMaster(pool.problem, goals, [], excluded).solve(9.0)
    assert answer is not None
    counts, _ = answer
    assert counts is not None
    assert counts.nodes == {0: 2, 1: 0}


def test_master_says_that_nothing_is_left_when_all_is_excluded() -> None:
    """The group may have one node, and that is not enough."""
    pool = pool_of(case(request(units=10), groups=(group(max=1),)))
    excluded = [Counts({0: 1}, {0: 1})]
    assert CutMaster(pool.problem, Goals(served={0: 1}), [Cut({}, {})], excluded).solve(9.0) is None


def test_packing_is_exact_when_pods_fit_in_parts_only() -> None:
    """Two cards of 14 units hold 28, but not four pods of 7 and 9 units."""
    what = case(request("a", 9, count=2), request("b", 5), request("c", 5), groups=(group(),))
    pool = pool_of(what)
    solution = packed(pool, Counts({0: 2}, {0: 2, 1: 2}), 9.0)
    assert solution is not None
    assert (solution.served, solution.bought) == ((4,), 2)
    tight = pool_of(case(request("a", 9, count=2), request("b", 6, count=2), groups=(group(),)))
    with pytest.raises(NoSolution):
        packed(tight, Counts({0: 2}, {0: 2, 1: 2}), 9.0)


def test_dive_serves_all_when_it_ends() -> None:
    """At a price that the linear program bounds."""
    requests = [request(f"r{it}", 2 + it * 5 % 9) for it in range(12)]
    pool = pool_of(case(*requests, groups=(group(cards=2, price=7.0), group("one"))))
    goals = Goals(served={0: 12})
    solution = PatternProgram(pool, goals, forever).dive()
    assert solution is not None
    assert solution.served == (12,)
