"""Which nodes a pod may go to, by tables of Kubernetes' rules. test_explain.py has the sentences."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.node_admission import ineligibility_reasons, matches
from fenka.cluster.objects import (
    Node,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    Pod,
    PodSpec,
    SelectorRequirement,
)
from fenka.core.inventory import Taint, Toleration, tolerates

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


OWN = "node.kubernetes.io"


@pytest.mark.parametrize(
    ("spec", "ready", "taints", "expected"),
    [
        # the node controller repeats a condition as a taint: one reason for both
        ({"unschedulable": True}, "True", [(f"{OWN}/unschedulable", "")], ["cordoned"]),
        ({}, "False", [(f"{OWN}/not-ready", "")], ["not ready"]),
        # without a condition its taint is the only reason
        (
            {},
            "True",
            [(f"{OWN}/disk-pressure", "")],
            [f"taint {OWN}/disk-pressure:NoSchedule is not tolerated"],
        ),
        # people's own taints are further reasons
        (
            {"unschedulable": True},
            "True",
            [("team", "a"), ("spare", "")],
            [
                "cordoned",
                "taint team=a:NoSchedule is not tolerated",
                "taint spare:NoSchedule is not tolerated",
            ],
        ),
        ({"unschedulable": True}, "Unknown", [], ["cordoned", "not ready"]),
    ],
)
def test_reasons_are_each_given_once_when_taints_repeat_conditions(
    spec: dict[str, Any], ready: str, taints: list[tuple[str, str]], expected: list[str]
) -> None:
    """By what people see with kubectl."""
    listed = [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in taints]
    assert (
        ineligibility_reasons(Pod(), a_tainted_node({**spec, "taints": listed}, ready)) == expected
    )


def a_tainted_node(spec: dict[str, Any], ready: str) -> Node:
    """Return a node with this condition."""
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    return msgspec.convert({"metadata": {"name": "a"}, "spec": spec, "status": status}, Node)


@pytest.mark.parametrize(
    ("ready", "tolerated", "expected"),
    [
        ("False", "not-ready", []),
        ("False", "unreachable", ["not ready"]),
        ("Unknown", "unreachable", []),
        ("Unknown", "not-ready", ["not ready"]),
        ("True", "unschedulable", []),
    ],
)
def test_unready_node_is_tolerated_when_the_key_is_that_of_its_condition(
    ready: str, tolerated: str, expected: list[str]
) -> None:
    """Kubernetes taints a node that reports a failure and one that is silent by different keys."""
    tolerations = [{"key": f"{OWN}/{tolerated}", "operator": "Exists"}]
    pod = msgspec.convert({"spec": {"tolerations": tolerations}}, Pod)
    assert ineligibility_reasons(pod, a_tainted_node({}, ready)) == expected


EFFECTS = st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"])
KEYS = st.sampled_from(["x", "y", f"{OWN}/unschedulable"])
TAINTS = st.builds(Taint, key=KEYS, value=st.sampled_from(["", "1"]), effect=EFFECTS)
TOLERATIONS = st.builds(
    Toleration,
    key=st.one_of(st.just(""), KEYS),
    operator=st.sampled_from(["Exists", "Equal"]),
    value=st.sampled_from(["", "1"]),
    effect=st.one_of(st.just(""), EFFECTS),
)


@given(
    taints=st.lists(TAINTS, max_size=4),
    tolerations=st.lists(TOLERATIONS, max_size=4),
    cordoned=st.booleans(),
)
def test_node_is_eligible_exactly_when_every_strict_taint_is_tolerated(
    taints: list[Taint], tolerations: list[Toleration], cordoned: bool
) -> None:
    """A cordon counts as its taint, whether or not the node controller has added that yet."""
    node = Node(
        metadata=ObjectMeta(name="a"),
        spec=msgspec.convert({"unschedulable": cordoned, "taints": taints}, NodeSpec),
        status=msgspec.convert({"conditions": [{"type": "Ready", "status": "True"}]}, NodeStatus),
    )
    pod = Pod(spec=msgspec.convert({"tolerations": tolerations}, PodSpec))
    cordon = [Taint(key=f"{OWN}/unschedulable", effect="NoSchedule")] if cordoned else []
    strict = [taint for taint in (*taints, *cordon) if taint.effect != "PreferNoSchedule"]
    tolerated = all(any(tolerates(each, taint) for each in tolerations) for taint in strict)
    assert (not ineligibility_reasons(pod, node)) == tolerated


WORDS = st.one_of(
    st.sampled_from(["", "-", "+", "0", "-0", "9" * 19, "1" * 20, "٣", "1e3", " 1", "1\n"]),
    st.text(max_size=4),
    st.integers(-(10**20), 10**20).map(str),
)


@given(
    operator=st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Other"]),
    values=st.lists(WORDS, max_size=2),
    present=st.none() | WORDS,
)
def test_requirements_contradict_each_other_when_operators_are_opposites(
    operator: str, values: list[str], present: str | None
) -> None:
    """Any text is answered, and never by an operator together with its opposite."""
    labels = {} if present is None else {"gen": present}

    def matching(name: str) -> bool:
        return matches(SelectorRequirement(key="gen", operator=name, values=tuple(values)), labels)

    assert matching("In") != matching("NotIn")
    assert matching("Exists") != matching("DoesNotExist")
    assert not (matching("Gt") and matching("Lt"))
    assert matching(operator) in (True, False)
