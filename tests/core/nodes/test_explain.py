"""Sentences about requests that are left out."""

import pytest

from fenka.core.inventory import Taint
from fenka.core.nodes.case import BuyLimits, CaseRequest, PlanningCase
from fenka.core.nodes.plan import make_plan
from tests.core.nodes.builders import case, group, request

TAINTED = (Taint(key="k", value="v", effect="NoSchedule"),)
FULL = BuyLimits(nodes=0)

SENTENCES: list[tuple[PlanningCase, str]] = [
    (case(request()), "no group may grow: there is none"),
    (
        case(
            request(units=15),
            groups=(group("a"), group("b", cards=2), group("c", size=10, max=10)),
        ),
        "0/3 groups help: 3 cards too small (14 units, 15 wanted)",
    ),
    (case(request(), groups=(group(size=10, max=10),)), "0/1 groups help: 1 at its max of 10"),
    (
        case(request(), groups=(group(stock=0),)),
        "0/1 groups help: 1 out of stock (0 left before this plan)",
    ),
    (
        case(request(), groups=(group("a", size=1, max=1), group("b", cards=0))),
        "0/2 groups help: 1 at its max of 1, 1 without cards",
    ),
    (
        case(request(), groups=(group(),), limits=FULL),
        "0/1 groups help: 1 beyond the limit of 0 new nodes",
    ),
    (
        case(request(), groups=(group(),), limits=BuyLimits(price=3.9)),
        "0/1 groups help: 1 beyond the price limit of 3.9 an hour",
    ),
    (
        case(request(), groups=(group(),), limits=BuyLimits(cards={"Tesla T4": 0})),
        "0/1 groups help: 1 beyond the limit of 0 new Tesla T4 cards",
    ),
    (
        case(request(cards=2), groups=(group(),)),
        "0/1 groups help: 1 with too few cards (1, 2 wanted)",
    ),
    (case(request(models=("A",)), groups=(group(),)), "0/1 groups help: 1 of another model"),
    (
        case(request(cpu_milli=20000), groups=(group(),)),
        "0/1 groups help: 1 with too little CPU (16 cores, 20 wanted)",
    ),
    (
        case(request(memory_mib=70000), groups=(group(),)),
        "0/1 groups help: 1 with too little host memory (65536 MiB, 70000 wanted)",
    ),
    (
        case(request(resources={"x/mig": 2}), groups=(group(resources={"x/mig": 1}),)),
        "0/1 groups help: 1 with too few x/mig (1 there, 2 wanted)",
    ),
    (
        case(request(selector={"a": "b"}), groups=(group(),)),
        "0/1 groups help: 1 without label a=b",
    ),
    (
        case(request(), groups=(group(taints=TAINTED),)),
        "0/1 groups help: 1 with taint k=v:NoSchedule, which is not tolerated",
    ),
    (
        case(request(), groups=(group(capacity="spot"),)),
        "0/1 groups help: 1 on spot, and it is not interruptible",
    ),
    (
        case(request(duration_s=9), groups=(group(capacity="spot", protection_s=8),)),
        "0/1 groups help: 1 on spot, protected for less than it runs",
    ),
    (
        case(request(gang="g"), request("s", 15, gang="g"), groups=(group(),)),
        "1/1 groups help: gang g starts whole or not at all",
    ),
]


@pytest.mark.parametrize(("what", "sentence"), SENTENCES)
def test_unserved_says_why_no_group_helps(what: PlanningCase, sentence: str) -> None:
    """One reason for each group, counted."""
    assert make_plan(what, lambda: 1.0).unserved[0].why == sentence


def test_unserved_names_what_the_plan_itself_used_up() -> None:
    """The limit is reached by the nodes that others get."""
    urgent: CaseRequest = request("urgent", 14, priority=1)
    plan = make_plan(
        case(request("r", 14), urgent, groups=(group(),), limits=BuyLimits(nodes=1)), lambda: 1.0
    )
    assert [(pod.request, pod.node) for pod in plan.placements] == [("urgent", "new:t4:0")]
    assert plan.unserved[0].why == "0/1 groups help: 1 beyond the limit of 1 new nodes"
