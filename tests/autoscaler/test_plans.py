"""Plans against brute force and an audit that knows nothing of fenka's code."""

import math
from typing import Any

import msgspec
from hypothesis import assume, given, settings

from fenka.autoscaler.inputs import decode_case
from fenka.autoscaler.solver.solve import improve
from fenka.core.errors import InvalidCase
from fenka.core.nodes.case import with_nodes
from fenka.core.nodes.plan import Solver, make_plan
from tests.autoscaler.audit import audit, best, key_of
from tests.autoscaler.cases import JSON, cases

EXAMPLES = settings(deadline=None, max_examples=40)


def planned(case: JSON, solver: Solver | None = improve) -> JSON:
    """Return the plan of a case as JSON, made without a time limit."""
    plan = make_plan(decode_case(msgspec.json.encode(case)), lambda: math.inf, solver)
    document: JSON = msgspec.json.decode(msgspec.json.encode(plan))
    return document


def understood(case: JSON) -> JSON:
    """Return the plan. A case that contradicts itself is no example."""
    try:
        return planned(case)
    except InvalidCase:
        assume(False)
        raise


@EXAMPLES
@given(cases())
def test_plan_is_the_best_when_the_case_is_tiny(case: JSON) -> None:
    """As many as brute force serves, at its price, with its number of nodes."""
    plan = understood(case)
    try:
        expected = best(case)
    except AssertionError:
        return
    audit(case, plan)
    assert plan["optimal"]
    assert key_of(case, plan) == expected


@EXAMPLES
@given(cases(most_groups=4, most_nodes=3, most=8))
def test_plan_passes_the_audit_whatever_the_case(case: JSON) -> None:
    """Without the solver too, which may only make plans better."""
    plan = understood(case)
    quick = planned(case, None)
    audit(case, plan)
    audit(case, quick)
    assert key_of(case, plan) <= key_of(case, quick)
    if plan["optimal"] and key_of(case, plan)[0] == key_of(case, quick)[0]:
        assert quick["bound"] <= plan["cost"] + 1e-9
    again: dict[str, Any] = planned(case)
    assert again == plan


@EXAMPLES
@given(cases())
def test_what_if_answers_as_the_plan_when_it_has_the_plans_nodes(case: JSON) -> None:
    """It serves as many with these nodes, places them rightly, and has all of them."""
    plan = understood(case)
    added = {each["group"]: each["count"] for each in plan["nodes"]}
    asked: JSON = msgspec.json.decode(
        msgspec.json.encode(with_nodes(decode_case(msgspec.json.encode(case)), added))
    )
    answer = planned(asked)
    audit(asked, answer)
    assert {each["group"]: each["count"] for each in answer["nodes"]} == added
    assert key_of(case, answer)[0] == key_of(case, plan)[0]


def test_plan_has_the_fewest_nodes_when_they_cost_nothing() -> None:
    """4 + 3 + 3 and 5 + 4 fill two cards of 10; every other way wants three."""
    sizes = {3: 2, 4: 2, 5: 1}
    case: JSON = {
        "format": "fenka.plan/1",
        "groups": [
            {
                "name": "own",
                "price": 0,
                "cpu_milli": 1000,
                "memory_mib": 1000,
                "cards": [{"memory_mib": 10}],
            }
        ],
        "requests": [
            {"name": f"r{size}", "count": count, "memory": {"mib": size}}
            for size, count in sizes.items()
        ],
    }
    plan = planned(case)
    assert (plan["nodes"], plan["optimal"]) == ([{"group": "own", "count": 2}], True)
