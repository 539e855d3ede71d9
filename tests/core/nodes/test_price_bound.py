"""Prices below which no plan serves as many, with the arithmetic written out."""

import pytest

from fenka.core.nodes.case import PRICE_UNIT, PlanningCase
from fenka.core.nodes.plan import make_plan
from fenka.core.nodes.price_bound import price_bound
from fenka.core.nodes.problem import Problem
from fenka.core.nodes.quick import quick_plan
from tests.core.nodes.builders import case, group, held, node, request

T4_UNITS = 14
"""A T4 holds 14 units of GiB: 15079 // 1024."""


@pytest.mark.parametrize(
    ("what", "least"),
    [
        # 28 pods of 7 units: two a card, so 14 nodes at 4.0 an hour.
        (case(request(units=7, count=28), groups=(group(),)), 14 * 4.0),
        # Two cards a node for 6.0: 28 / 4 nodes.
        (case(request(units=7, count=28), groups=(group(cards=2, price=6.0),)), 7 * 6.0),
        # Nodes there hold 4 of them.
        (
            case(
                request(units=7, count=28),
                groups=(group(),),
                nodes=(node("a", held()), node("b", held())),
            ),
            12 * 4.0,
        ),
        # 10 pods of 4000 milli: four fill a node's 16000, so two and a half nodes.
        (case(request(units=1, count=10, cpu_milli=4000), groups=(group(),)), 2.5 * 4.0),
        # Nodes for nothing.
        (case(request(units=7, count=28), groups=(group(price=0.0),)), 0.0),
        # Nobody to serve.
        (case(groups=(group(),)), 0.0),
    ],
)
def test_bound_is_the_price_of_the_scarcest_resource(what: PlanningCase, least: float) -> None:
    """Rounding takes less than a thousandth of it."""
    problem = Problem(what)
    served = quick_plan(problem, lambda: True, lambda _: None).served
    assert price_bound(problem, served) / PRICE_UNIT == pytest.approx(least, rel=1e-3)


def test_bound_counts_the_lightest_pods_when_not_all_are_served() -> None:
    """One node for 4.0, which holds the small pod and half the large one, at most."""
    what = case(
        request("large", units=T4_UNITS),
        request("small", units=7),
        groups=(group(max=1),),
    )
    assert price_bound(Problem(what), (1,)) / PRICE_UNIT == pytest.approx(4.0 / 1.5, rel=1e-3)


def test_plan_has_a_bound_when_no_time_is_left() -> None:
    """It needs no search."""
    what = case(request(units=7, count=28), groups=(group(),))
    plan = make_plan(what, lambda: 0.0)
    assert 0.99 * plan.cost <= plan.bound <= plan.cost


def test_pods_without_cards_use_nodes_whose_cards_are_closed() -> None:
    """Closed cards have no free memory, of which these pods need none."""
    what = case(request(units=0, cards=0), nodes=(node("a", held(closed=True)),))
    assert [pod.node for pod in make_plan(what, lambda: 0.0).placements] == ["a"]
