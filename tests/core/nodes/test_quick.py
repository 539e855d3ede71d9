"""The quick plan: what it finds without a solver."""

import pytest

from fenka.core.nodes.case import BuyLimits, Gang, PlanningCase
from fenka.core.nodes.plan import NodePlan, make_plan
from fenka.core.nodes.problem import Problem
from fenka.core.nodes.solution import Fill, solution_of, topped_up
from tests.core.nodes.builders import case, group, held, node, request


def planned(what: PlanningCase) -> NodePlan:
    """Return the quick plan."""
    return make_plan(what, lambda: 1.0)


def nodes(plan: NodePlan) -> dict[str, int]:
    """Return the number of new nodes by group."""
    return {each.group: each.count for each in plan.nodes}


def test_plan_buys_for_cards_and_not_for_sums_when_memory_is_in_pieces() -> None:
    """Two nodes have 8 units free each; 10 units in sum are no place for a pod of 10."""
    there = tuple(node(f"gpu-{it}", held(6462)) for it in range(2))
    plan = planned(case(request(units=10), groups=(group(),), nodes=there))
    assert nodes(plan) == {"t4": 1}


def test_plan_buys_nothing_when_nodes_there_are_enough() -> None:
    """And says that nothing is cheaper."""
    plan = planned(case(request(), groups=(group(),), nodes=(node("gpu", held()),)))
    assert (plan.nodes, plan.cost, plan.optimal) == ((), 0.0, True)
    assert [pod.node for pod in plan.placements] == ["gpu"]


def test_plan_buys_nothing_when_compute_is_free_on_a_card_with_too_much_memory_held() -> None:
    """The scheduler takes the card, too: a request of compute alone needs none of its memory."""
    there = (node("gpu", held(20000)),)
    plan = planned(case(request(units=0, compute=40), groups=(group(),), nodes=there))
    assert ([pod.node for pod in plan.placements], plan.nodes) == (["gpu"], ())


def test_plan_buys_five_pods_of_ten_units_two_nodes_of_four_cards() -> None:
    """A card holds one of them."""
    plan = planned(case(request(units=10, count=5), groups=(group(cards=4),)))
    assert nodes(plan) == {"t4": 2}


def test_plan_buys_what_min_wants_when_nothing_is_pending() -> None:
    """It counts as any other cost."""
    plan = planned(case(groups=(group(min=3, size=1),)))
    assert (nodes(plan), plan.cost, plan.optimal) == ({"t4": 2}, 8.0, True)


def test_plan_places_on_what_min_wants_before_it_buys_more() -> None:
    """The dearer group's node comes in any case."""
    groups = (group("dear", 9.0, min=1), group("cheap", 1.0))
    plan = planned(case(request(), groups=groups))
    assert nodes(plan) == {"dear": 1}


def test_plan_serves_the_higher_priority_when_limits_do_not_allow_all() -> None:
    """Although two of the lower one would fit in its place."""
    requests = request("low", 7, count=2), request("high", 14, priority=1)
    plan = planned(case(*requests, groups=(group(),), limits=BuyLimits(nodes=1)))
    assert [pod.request for pod in plan.placements] == ["high"]


@pytest.mark.parametrize(("most", "served"), [(2, 2), (1, 0)])
def test_plan_serves_all_of_a_gang_or_none(most: int, served: int) -> None:
    """Half of it is nothing, and buys nothing."""
    plan = planned(case(request(units=14, count=2, gang="g"), groups=(group(max=most),)))
    assert len(plan.placements) == served
    assert nodes(plan) == ({"t4": 2} if served else {})


def test_plan_keeps_a_gang_in_one_zone_when_it_wants_that() -> None:
    """The cheaper zone has only one node left."""
    groups = group("a", 1.0, zone="a", max=1), group("b", 4.0, zone="b")
    what = request(units=14, count=2, gang="g")
    same = planned(case(what, groups=groups, gangs={"g": Gang(zone="same")}))
    assert (nodes(same), len(same.placements)) == ({"b": 2}, 2)
    assert nodes(planned(case(what, groups=groups))) == {"a": 1, "b": 1}


def test_plan_keeps_a_gang_in_one_rack_when_its_rule_names_the_labels() -> None:
    """The node there is in rack r1 of zone a, and the cheapest group too; that of zone b has another r1.

    A group without the label is of no rack. So both members are in a, one of them on the node there.
    """
    there = node("gpu", held(), zone="a", labels={"rack": "r1"})
    groups = (
        group("a", 3.0, zone="a", labels={"rack": "r1"}, max=1),
        group("b", 1.0, zone="b", labels={"rack": "r1"}, max=1),
        group("c", 0.5, zone="a"),
    )
    what = request(units=14, count=2, gang="g")
    rule = Gang(same=("topology.kubernetes.io/zone", "rack"))
    plan = planned(case(what, nodes=(there,), groups=groups, gangs={"g": rule}))
    assert [pod.node for pod in plan.placements] == ["gpu", "new:a:0"]
    # Of the racks alone, b is in the same.
    plan = planned(case(what, nodes=(there,), groups=groups, gangs={"g": Gang(same=("rack",))}))
    assert nodes(plan) == {"b": 1}
    # Nobody has this label.
    plan = planned(case(what, nodes=(there,), groups=groups, gangs={"g": Gang(same=("row",))}))
    assert not plan.placements
    assert sum(left.count for left in plan.unserved) == 2


def test_plan_takes_the_cheapest_offer_that_holds_a_nodes_pods() -> None:
    """Four cards are cheaper by card, but one pod needs one."""
    plan = planned(case(request(), groups=(group("four", 8.0, cards=4), group("one", 3.0))))
    assert nodes(plan) == {"one": 1}


def test_plan_is_the_same_when_it_is_made_again() -> None:
    """Chance is spread evenly instead of drawn."""
    requests = tuple(request(f"r{it}", 1 + it * 5 % 11) for it in range(20))
    what = case(*requests, groups=(group("four", 14.0, cards=4), group("one", 4.0)))
    assert planned(what) == planned(what)


def test_plan_counts_nodes_instead_of_money_when_nodes_are_short() -> None:
    """One node may come: the dear one serves both."""
    groups = group("one", 1.0), group("two", 9.0, cards=2)
    plan = planned(case(request(units=14, count=2), groups=groups, limits=BuyLimits(nodes=1)))
    assert nodes(plan) == {"two": 1}
    assert len(plan.placements) == 2


def test_solution_is_topped_up_with_pods_that_have_room() -> None:
    """First on the new node and then on the one there; the higher priority first, gangs never."""
    requests = (
        request("a", 6, count=2),
        request("b", 5, priority=1),
        request("c", 2, gang="g", priority=2),
    )
    problem = Problem(case(*requests, groups=(group(),), nodes=(node("gpu", held(9000)),)))
    (new,) = problem.offers
    thin = solution_of(problem, [Fill(new, ((0, (0,)),))])
    full = topped_up(problem, thin)
    assert (thin.served, full.served) == ((0, 0, 1), (0, 1, 1))
    assert (full.price, full.bought) == (thin.price, 1)
