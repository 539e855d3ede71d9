"""Which PodDisruptionBudgets protect a pod, by the selectors of policy/v1."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.pod_preemption import PodDisruptionBudget, budgets_for
from fenka.core.preemption import DisruptionBudget
from tests.builders import Json, a_pod


def budget(name: str, selector: Json | None, allowed: int = 1, **meta: Any) -> PodDisruptionBudget:
    """Return a budget of the namespace default with this selector."""
    metadata = {"name": name, "namespace": "default", **meta}
    status = {"disruptionsAllowed": allowed}
    return msgspec.convert(
        {"metadata": metadata, "spec": {"selector": selector}, "status": status},
        PodDisruptionBudget,
    )


def expression(operator: str, *values: str) -> Json:
    """Return a selector of one requirement on the label app."""
    return {"matchExpressions": [{"key": "app", "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        # policy/v1: no selector selects nothing, an empty one the whole namespace
        (None, False),
        ({}, True),
        ({"matchLabels": {"app": "a"}}, True),
        ({"matchLabels": {"app": "b"}}, False),
        # all labels must match
        ({"matchLabels": {"app": "a", "tier": "web"}}, True),
        ({"matchLabels": {"app": "a", "tier": "db"}}, False),
        ({"matchLabels": {"absent": ""}}, False),
        (expression("In", "b", "a"), True),
        (expression("NotIn", "a"), False),
        (expression("Exists"), True),
        (expression("DoesNotExist"), False),
        # labels and expressions together
        ({"matchLabels": {"tier": "web"}, **expression("In", "b")}, False),
    ],
)
def test_budget_protects_a_pod_when_its_selector_matches(
    selector: Json | None, selected: bool
) -> None:
    """The pod has app=a and tier=web."""
    pod = a_pod("p", 1, labels={"app": "a", "tier": "web"})
    expected = frozenset({DisruptionBudget("default/x", 1)}) if selected else frozenset()
    assert budgets_for(pod, [budget("x", selector)]) == expected


def test_budget_does_not_protect_a_pod_of_another_namespace() -> None:
    """Selectors are those of the budget's own namespace."""
    other = budget("x", {}, namespace="team")
    assert budgets_for(a_pod("p", 1), [other]) == frozenset()


def test_pod_has_all_budgets_that_select_it_when_they_overlap() -> None:
    """Each counts its own disruptions; none may be allowed."""
    budgets = [budget("none", {}, 0), budget("two", {"matchLabels": {"app": "a"}}, 2)]
    assert budgets_for(a_pod("p", 1, labels={"app": "a"}), budgets) == {
        DisruptionBudget("default/none", 0),
        DisruptionBudget("default/two", 2),
    }


def test_budget_allows_nothing_when_it_has_no_status_yet() -> None:
    """The disruption controller has not counted its pods."""
    metadata = {"name": "x", "namespace": "default"}
    new = msgspec.convert(
        {"metadata": metadata, "spec": {"selector": {}}, "status": {}}, PodDisruptionBudget
    )
    assert budgets_for(a_pod("p", 1), [new]) == {DisruptionBudget("default/x", 0)}


VALUES = st.sampled_from(["a", "b", ""])
LABELS = st.dictionaries(st.sampled_from(["app", "tier"]), VALUES)
OPERATORS = st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"])


@given(
    labels=LABELS,
    wanted=LABELS,
    requirements=st.lists(st.tuples(OPERATORS, st.lists(VALUES, max_size=2)), max_size=3),
)
def test_selector_selects_exactly_when_each_of_its_requirements_does(
    labels: dict[str, str], wanted: dict[str, str], requirements: list[tuple[str, list[str]]]
) -> None:
    """A selector is the conjunction of its parts, each by itself."""
    pod = a_pod("p", 1, labels=labels)
    expressions = [
        {"key": "app", "operator": operator, "values": values} for operator, values in requirements
    ]
    parts: list[Json] = [
        *({"matchLabels": {key: value}} for key, value in wanted.items()),
        *({"matchExpressions": [each]} for each in expressions),
    ]
    whole = {"matchLabels": wanted, "matchExpressions": expressions}
    selects = [bool(budgets_for(pod, [budget("x", part)])) for part in parts]
    assert bool(budgets_for(pod, [budget("x", whole)])) == all(selects)
