"""Which nodes a pod may go to. The rules one by one are in test_explain.py, as users see them."""

from typing import Any

import msgspec
import pytest

from fenka.cluster.eligibility import ineligibility_reasons
from fenka.cluster.objects import Node, Pod

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
