"""Requests of a case are placed in the order of the queue, by a policy."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.autoscaler.inputs import decode_case
from fenka.core.nodes.by_policy import COUNTED, PolicyQueue, place_by_policy
from fenka.core.nodes.case import Gang, PlanningCase, with_nodes
from fenka.core.nodes.plan import NodePlan
from fenka.core.policies.scores import SCORES
from tests.autoscaler.audit import audit
from tests.autoscaler.cases import JSON, cases
from tests.core.nodes.builders import case, group, held, node, request


def placed(asked: PlanningCase, policy: str = "binpack", **at: float) -> NodePlan:
    """Return the plan by a policy. at: when requests were made."""
    return place_by_policy(asked, PolicyQueue(policy, at, now=100.0))


@pytest.mark.parametrize("policy", sorted(SCORES))
def test_every_policy_serves_in_order(policy: str) -> None:
    """10 of 14 units: b came first, so a waits, for which b's rest of 3 units is too little."""
    asked = case(request("a", 4), request("b", 7), nodes=(node("gpu", held(4 * 1077)),))
    plan = placed(asked, policy, a=2.0, b=1.0)
    assert [pod.request for pod in plan.placements] == ["b"]
    assert [(left.request, left.why) for left in plan.unserved] == [
        ("a", "no GPU fits: 1 of 1 has too little memory")
    ]


def test_gangs_start_whole_or_not_at_all() -> None:
    """Three members of 6 units do not fit two cards of 10; on a new node of two cards more they do."""
    members = [request(f"m{n}", 6, gang="g") for n in range(3)]
    full = node("gpu", held(4 * 1077), held(4 * 1077))
    asked = case(*members, nodes=(full,), groups=(group(cards=2),), gangs={"g": Gang()})
    assert placed(with_nodes(asked, {})).placements == ()
    plan = placed(with_nodes(asked, {"t4": 1}))
    assert len(plan.placements) == 3
    assert (plan.nodes[0].count, plan.cost) == (1, 4.0)


def test_gangs_are_in_one_rack_when_their_rule_says_so() -> None:
    """Racks r1 and r2 have a card each, and r3 has two; binpack would take those of r1 and r2."""
    there = [
        node(name, held(), labels={"rack": rack})
        for name, rack in {"a": "r1", "b": "r2", "c": "r3", "d": "r3"}.items()
    ]
    members = [request(f"m{number}", 14, gang="g") for number in range(2)]
    for rule, expected in ((Gang(), ["a", "b"]), (Gang(same=("rack",)), ["c", "d"])):
        plan = placed(case(*members, nodes=tuple(there), gangs={"g": rule}))
        assert [pod.node for pod in plan.placements] == expected
    plan = placed(case(*members, nodes=tuple(there[:2]), gangs={"g": Gang(same=("rack",))}))
    assert plan.unserved[0].why == (
        "no GPU fits: 1 of 1 has too little memory; all must be in one rack, and r1 has the most room: "
        "1 of the gang's 2 would fit together"
    )
    # Zones may be empty, as those of groups without one are.
    zones = [node("a", held()), node("b", held(), zone="x"), node("c", held())]
    plan = placed(case(*members, nodes=tuple(zones), gangs={"g": Gang(zone="same")}))
    assert [pod.node for pod in plan.placements] == ["a", "c"]


def test_counted_resources_and_host_are_respected() -> None:
    """Of two FPGAs the node has one left; its 4 cores serve two pods of 2; a place for pods is gone."""
    fpga = node("gpu", held(), resources={"x/fpga": 1})
    twice = case(request("r", 1, count=2, resources={"x/fpga": 1}), nodes=(fpga,))
    plan = placed(twice)
    assert len(plan.placements) == 1
    assert plan.unserved[0].why == COUNTED
    small = node("gpu", held(), cpu_milli=4000)
    assert (
        len(placed(case(request("r", 1, count=3, cpu_milli=2000), nodes=(small,))).placements) == 2
    )
    hostless = case(request("r", 0, cards=0, cpu_milli=2000, count=3), nodes=(small,))
    assert len(placed(hostless).placements) == 2


@settings(deadline=None, max_examples=60)
@given(drawn=cases(most_nodes=2), policy=st.sampled_from(sorted(SCORES)))
def test_plans_are_possible(drawn: JSON, policy: str) -> None:
    """Whatever the case: an independent check of cards, hosts, rules, gangs and counts finds no fault."""
    fixed = {**drawn, "groups": [{**each, "max": each["min"]} for each in drawn["groups"]]}
    fixed["groups"] = [each for each in fixed["groups"] if each["min"] > each["size"]]
    fixed["limits"] = {}
    asked = decode_case(msgspec.json.encode(fixed))
    plan = placed(asked, policy)
    audit(fixed, msgspec.to_builtins(plan))
    served = len(plan.placements) + sum(left.count for left in plan.unserved)
    assert served == sum(each.count for each in asked.requests)
