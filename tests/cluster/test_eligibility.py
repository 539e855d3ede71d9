"""Which nodes a pod may go to, by tables of Kubernetes' rules. test_explain.py has the sentences."""

from typing import Any

import msgspec
import pytest

from fenka.cluster.eligibility import ineligibility_reasons, matches, tolerates
from fenka.cluster.objects import Node, Pod, SelectorRequirement, Taint, Toleration

EXCLUDED = ["the pod's node affinity excludes it"]


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    """A required node affinity."""
    required = {"nodeSelectorTerms": list(terms)}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    """One condition."""
    return {"key": key, "operator": operator, "values": list(values)}


ON_A = {"matchFields": [expression("metadata.name", "In", "a")]}
ON_B = {"matchFields": [expression("metadata.name", "In", "b")]}
ZONED = {"matchExpressions": [expression("zone", "In", "x")]}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, []),
        ({"affinity": None}, []),
        ({"affinity": {"nodeAffinity": None}}, []),
        ({"affinity": affinity(ON_A)}, []),
        ({"affinity": affinity(ON_B)}, EXCLUDED),
        # one term must hold, with all its conditions
        ({"affinity": affinity(ON_B, ZONED)}, []),
        ({"affinity": affinity({**ON_B, **ZONED})}, EXCLUDED),
        # a term without conditions chooses nothing
        ({"affinity": affinity({})}, EXCLUDED),
        ({"nodeSelector": {"zone": "x"}}, []),
        ({"nodeSelector": {"zone": "y"}}, ["the pod wants nodes labelled zone=y"]),
    ],
)
def test_node_is_eligible_when_the_spec_selects_it(
    spec: dict[str, Any], expected: list[str]
) -> None:
    """As kube-scheduler decides."""
    node = msgspec.convert(
        {
            "metadata": {"name": "a", "labels": {"zone": "x"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        },
        Node,
    )
    assert ineligibility_reasons(msgspec.convert({"spec": spec}, Pod), node) == expected


@pytest.mark.parametrize(
    ("state", "tolerations", "expected"),
    [
        ({"ready": "False"}, [], ["not ready"]),
        ({"ready": "Unknown"}, [], ["not ready"]),
        ({"ready": "Unknown"}, [{"operator": "Exists"}], []),
        ({"ready": "False"}, [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}], []),
        ({"unschedulable": True}, [], ["cordoned"]),
        ({"unschedulable": True}, [{"operator": "Exists"}], []),
        ({"unschedulable": True}, [{"key": "x", "operator": "Exists"}], ["cordoned"]),
    ],
)
def test_node_condition_is_no_reason_when_it_is_tolerated(
    state: dict[str, Any], tolerations: list[dict[str, Any]], expected: list[str]
) -> None:
    """As DaemonSets do."""
    ready = {"type": "Ready", "status": state.get("ready", "True")}
    node = msgspec.convert(
        {
            "metadata": {"name": "a"},
            "spec": {"unschedulable": state.get("unschedulable", False)},
            "status": {"conditions": [ready]},
        },
        Node,
    )
    pod = msgspec.convert({"spec": {"tolerations": tolerations}}, Pod)
    assert ineligibility_reasons(pod, node) == expected


@pytest.mark.parametrize(
    ("key", "operator", "value", "effect", "expected"),
    [
        # Equal: key, value and effect are the taint's
        ("for", "Equal", "a", "NoSchedule", True),
        ("for", "Equal", "b", "NoSchedule", False),
        ("for", "Equal", "a", "NoExecute", False),
        ("other", "Equal", "a", "NoSchedule", False),
        # Exists: any value
        ("for", "Exists", "", "NoSchedule", True),
        ("other", "Exists", "", "NoSchedule", False),
        # an empty effect matches all effects with that key
        ("for", "Equal", "a", "", True),
        ("for", "Exists", "", "", True),
        # an empty key with Exists tolerates everything of that effect
        ("", "Exists", "", "", True),
        ("", "Exists", "", "NoSchedule", True),
        ("", "Exists", "", "NoExecute", False),
    ],
)
def test_toleration_covers_the_taint_when_key_value_and_effect_match(
    key: str, operator: str, value: str, effect: str, expected: bool
) -> None:
    """The taint is for=a:NoSchedule."""
    toleration = Toleration(key=key, operator=operator, value=value, effect=effect)
    assert tolerates(toleration, Taint(key="for", value="a", effect="NoSchedule")) is expected


def test_toleration_compares_values_when_it_names_no_operator() -> None:
    """Kubernetes' default is Equal."""
    taint = Taint(key="for", value="a", effect="NoSchedule")
    assert tolerates(msgspec.convert({"key": "for", "value": "a"}, Toleration), taint)
    assert not tolerates(msgspec.convert({"key": "for"}, Toleration), taint)


@pytest.mark.parametrize(
    ("taints", "tolerations", "expected"),
    [
        (["NoSchedule"], [], ["taint for=a:NoSchedule is not tolerated"]),
        (["NoExecute"], [], ["taint for=a:NoExecute is not tolerated"]),
        # a preference excludes nobody
        (["PreferNoSchedule"], [], []),
        # each taint needs a toleration of its own effect
        (["NoSchedule", "NoExecute"], ["NoSchedule"], ["taint for=a:NoExecute is not tolerated"]),
        (["NoSchedule", "NoExecute"], ["NoSchedule", "NoExecute"], []),
    ],
)
def test_pod_is_excluded_when_a_strict_taint_is_not_tolerated(
    taints: list[str], tolerations: list[str], expected: list[str]
) -> None:
    """NoSchedule and NoExecute are strict."""
    node = msgspec.convert(
        {
            "metadata": {"name": "a"},
            "spec": {"taints": [{"key": "for", "value": "a", "effect": it} for it in taints]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        },
        Node,
    )
    tolerated = [{"key": "for", "operator": "Exists", "effect": it} for it in tolerations]
    pod = msgspec.convert({"spec": {"tolerations": tolerated}}, Pod)
    assert ineligibility_reasons(pod, node) == expected


@pytest.mark.parametrize(
    ("operator", "values", "labels", "expected"),
    [
        # a node without the label: NotIn and DoesNotExist alone hold
        ("In", ["8"], {}, False),
        ("NotIn", ["8"], {}, True),
        ("Exists", [], {}, False),
        ("DoesNotExist", [], {}, True),
        ("Gt", ["-1"], {}, False),
        ("Lt", ["1"], {}, False),
        # a label may be empty, and exists all the same
        ("In", [""], {"gen": ""}, True),
        ("Exists", [], {"gen": ""}, True),
        ("NotIn", ["8"], {"gen": ""}, True),
        # whole numbers are compared as such, not as texts
        ("Gt", ["9"], {"gen": "10"}, True),
        ("Lt", ["10"], {"gen": "9"}, True),
        ("Gt", ["-2"], {"gen": "-1"}, True),
        ("Lt", ["+10"], {"gen": "9"}, True),
        ("Gt", ["8"], {"gen": "8"}, False),
        ("Lt", ["8"], {"gen": "8"}, False),
        # what is no whole number matches nothing, on either side
        ("Gt", ["-1"], {"gen": "new"}, False),
        ("Lt", ["1"], {"gen": "new"}, False),
        ("Gt", ["old"], {"gen": "1"}, False),
        ("Lt", ["old"], {"gen": "-1"}, False),
        ("Gt", ["--5"], {"gen": "8"}, False),
        ("Gt", ["1.5"], {"gen": "8"}, False),
        ("Gt", [], {"gen": "8"}, False),
        # an operator of a later Kubernetes is kube-scheduler's matter
        ("Near", ["8"], {"gen": "1"}, True),
    ],
)
def test_requirement_matches_as_in_kubernetes_when_labels_vary(
    operator: str, values: list[str], labels: dict[str, str], expected: bool
) -> None:
    """The plain cases, on a node that has the label, are in test_explain.py."""
    requirement = SelectorRequirement(key="gen", operator=operator, values=tuple(values))
    assert matches(requirement, labels) is expected
