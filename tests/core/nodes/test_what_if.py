"""Cases whose plans have exactly the nodes that are asked about."""

import pytest

from fenka.core.errors import InvalidCase
from fenka.core.nodes.case import BuyLimits, with_nodes
from fenka.core.nodes.plan import NewNodes, NodePlan, make_plan
from tests.core.nodes.builders import case, group, held, node, request


def planned(**added: int) -> NodePlan:
    """Return the plan of seven pods of 4 units: a T4 of 14 is full, one is empty, and these nodes come."""
    asked = case(
        request(count=7),
        groups=(group("t4", size=3, max=3, stock=0), group("a100", price=20)),
        nodes=(node("gpu", held(14000)), node("own", held(), group="t4")),
        limits=BuyLimits(nodes=0),
    )
    return make_plan(with_nodes(asked, added), lambda: 1.0)


@pytest.mark.parametrize(
    ("added", "group_name", "count", "served", "cost"),
    [
        # 3 pods fit the node there, as many each new one; max, stock and limits are set aside.
        ({"t4": 1}, "t4", 1, 6, 4.0),
        ({"t4": 2}, "t4", 2, 7, 8.0),
        # A node that nobody needs is there all the same.
        ({"t4": 5}, "t4", 5, 7, 20.0),
        # Like a node there, but empty, and of its group.
        ({"gpu": 1}, "gpu", 1, 6, 0.0),
        ({"own": 1}, "t4", 1, 6, 0.0),
    ],
)
def test_plan_has_exactly_these_nodes(
    added: dict[str, int], group_name: str, count: int, served: int, cost: float
) -> None:
    """Whatever else would be bought."""
    plan = planned(**added)
    assert plan.nodes == (NewNodes(group_name, count),)
    assert (len(plan.placements), plan.cost) == (served, cost)


def test_reason_says_that_there_are_no_more_nodes() -> None:
    """Not that the group is at its max."""
    (left,) = planned(t4=1).unserved
    assert (left.count, left.why) == (1, "0/1 groups help: 1 fixed at 1 node")


def test_copy_of_a_node_has_another_hostname() -> None:
    """A pod that wants one machine is not served by a machine like it."""
    labels = {"kubernetes.io/hostname": "gpu", "disk": "ssd"}
    there = node("gpu", held(), labels=labels)
    for selector, served in [({"disk": "ssd"}, 6), (labels, 3)]:
        asked = case(request(count=6, selector=selector), nodes=(there,))
        assert len(make_plan(with_nodes(asked, {"gpu": 1}), lambda: 1.0).placements) == served


@pytest.mark.parametrize(
    ("added", "sentence"),
    [
        ({"x": 1}, "no group and no node is called 'x': name one of t4, a100, gpu, own"),
        ({"t4": 1, "own": 1}, "own is of group t4, which is named too: name it once"),
    ],
)
def test_unknown_or_repeated_name_is_refused(added: dict[str, int], sentence: str) -> None:
    """In one sentence."""
    with pytest.raises(InvalidCase) as caught:
        planned(**added)
    assert str(caught.value) == sentence
