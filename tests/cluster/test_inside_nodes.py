"""Nodes whose label keeps them for slices inside MIG instances: filter, ranking, queue, `why` and records."""

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fenka.cluster.explain import explain_nodes
from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterSnapshot
from fenka.dialects import gpushare, nodes, pod_records
from fenka.dialects.mig_records import INSIDE, INSTANCE
from tests.builders import T4_MIB, Json, node_json
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import make, pending
from tests.mig_builders import inside_pod, mig_node_json


def divided(name: str, *models: str, inside: str = "mig", **given: Any) -> Json:
    """A node with the label."""
    labels = {INSIDE: inside, **given.pop("labels", {})}
    return mig_node_json(name, *models or ("A100",), labels=labels, **given)


def cluster(*nodes: Json) -> ExtenderHarness:
    """By default a T4 and a labelled A100."""
    return ExtenderHarness(nodes or (divided("a"), node_json("t", T4_MIB)))


def devices(there: ExtenderHarness, pod: Pod, node: str) -> list[str]:
    """Return the cards or instances where a pod goes on a node, or the reason why it does not."""
    placements = there.evaluator.placements(pod, node)
    if isinstance(placements, Infeasible):
        return [placements.sentence]
    return [piece.uuid for it in placements for piece in it.slices]


def record(there: ExtenderHarness, pod: Pod, node: str) -> dict[str, str]:
    """Bring a pod as it is after its binding; return its annotations."""
    placements = there.extender.placements(pod, node)
    shared, dialect = there.state.shared_node(node), pod.demand().dialect
    assert not isinstance(placements, Infeasible)
    assert shared is not None
    assert dialect is not None
    written = pod_records.encode(dialect, pod.request, shared, placements, 0)
    metadata = msgspec.structs.replace(
        pod.metadata, annotations={**pod.metadata.annotations, **written}
    )
    spec = msgspec.structs.replace(pod.spec, node_name=node)
    there.set(msgspec.structs.replace(pod, metadata=metadata, spec=spec))
    allocation = there.state.allocation(pod.metadata.uid)
    assert allocation is not None
    assert allocation.placements == placements
    assert allocation.error is None
    return dict(metadata.annotations)


@pytest.mark.parametrize(
    ("label", "units", "profile"),
    [
        ("mig", 4, "3g.20gb"),
        ("mig", 30, "7g.40gb"),  # Larger than half a card.
        ("1g.5gb", 4, "1g.5gb"),
    ],
)
def test_slice_is_inside_an_instance_where_the_node_says_so(
    label: str, units: int, profile: str
) -> None:
    """And its record says it as if its owner had asked for that: node and screens need to know no more."""
    there = cluster(divided("a", inside=label))
    pod = make("p", units)
    (device,) = devices(there, pod, "a")
    assert device.endswith(f"/{profile}")
    written = record(there, pod, "a")
    assert written[INSIDE] == "mig"
    assert INSTANCE in written


def test_slices_of_a_namespace_are_together() -> None:
    """As with the annotation, and beside pods that have it."""
    there = cluster(divided("a"))
    record(there, make("p", 4), "a")
    found = devices(there, make("q", 4), "a")
    assert found == devices(there, inside_pod("r", 4), "a") == devices(there, make("p", 4), "a")


def test_cards_come_before_instances() -> None:
    """The A100 is first by name. It is used when the T4 is full."""
    there = cluster()
    assert there.extender.prioritize(make("p", 10), ["a", "t"]) == [("a", 0), ("t", 10)]
    assert there.start(make("p", 10)) == "t/0"
    assert there.filter(make("q", 10)) == ["a"]
    assert there.start(make("q", 10)) == "a/0"


@pytest.mark.parametrize("most", [1, 2])
def test_filter_returns_the_best_nodes(most: int) -> None:
    """Also where both kinds fit."""
    there = cluster(divided("a"), node_json("t", T4_MIB), node_json("u", T4_MIB))
    there.holds("h", 0, 4, node="u")
    extender = there.extender_with(there.queue, most)
    assert extender.filter(make("p", 4), there.names).fitting == ["u", "t"][:most]


def test_annotation_of_a_pod_decides_before_the_label() -> None:
    """It asks for 3g.20gb on a node whose slices are in any instance."""
    there = cluster(divided("a"))
    assert devices(there, inside_pod("p", 4, "3g.20gb"), "a") == ["GPU-a-0/4/3g.20gb"]


KEEPS = (
    "its label fenka.io/inside=mig keeps it for slices of one card, inside MIG instances, of pods outside of "
    "gangs"
)


@pytest.mark.parametrize(
    ("label", "labels", "reason"),
    [
        ("mig", {gpushare.COUNT: "2"}, KEEPS),
        ("half", {}, "its label fenka.io/inside: 'half' is no MIG profile: names are like 1g.5gb"),
        ("5g.5gb", {}, "no card has a profile 5g.5gb"),
    ],
)
def test_node_says_why_it_does_not_admit_a_pod(
    label: str, labels: dict[str, str], reason: str
) -> None:
    """Slices of two cards, and labels that are no profile."""
    there = cluster(divided("a", "A100", "A100", inside=label))
    pod = make("p", 4, labels=labels)
    (why,) = devices(there, pod, "a")
    assert why.startswith(reason), why
    assert there.ask(pod)["a"].startswith(reason)
    assert (there.evaluator.explain(pod) or "").startswith(reason)


def test_label_without_divided_cards_is_named() -> None:
    """Nothing else is said of how to correct it."""
    there = cluster(divided("a", labels={nodes.MIG_LABEL: "off"}))
    (why,) = devices(there, make("p", 4), "a")
    assert why == (
        "its owner has no card divided into MIG instances: label fenka.io/mig=on-demand does that"
    )


def test_gang_stays_off_the_node() -> None:
    """No gang is in instances."""
    there = cluster()
    first, second = there.gang("g", 2, 4)
    assert there.filter(first) == ["t"]
    assert there.filter(second) == ["t"]


def test_whole_card_and_instance_are_as_without_the_label() -> None:
    """The label is about slices."""
    there = cluster(divided("a", "A100", "T4", labels={nodes.WHOLE_LABEL: "true"}))
    unlabelled = mig_node_json("a", "A100", "T4", labels={nodes.WHOLE_LABEL: "true"})
    before = ExtenderHarness([unlabelled])
    whole = msgspec.convert(
        {
            "metadata": {"name": "w", "namespace": "default", "uid": "w"},
            "spec": {
                "containers": [
                    {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
                ]
            },
        },
        Pod,
    )
    assert devices(there, whole, "a") == devices(before, whole, "a") == ["GPU-a-1"]


def test_tenants_are_apart() -> None:
    """Slices of two namespaces are in two instances; the third finds none, and why names their holders."""
    there = cluster(divided("a"))
    uuids = []
    for namespace in ("x", "y"):
        pod = make(namespace, 4, namespace=namespace)
        record(there, pod, "a")
        allocation = there.state.allocation(namespace)
        assert allocation is not None
        uuids += [piece.uuid for piece in allocation.slices]
    assert len(set(uuids)) == 2
    third = make("z", 4, namespace="z")
    snapshot = ClusterSnapshot.of(msgspec.convert([divided("a")], list[Node]), there.pods.values())
    (verdict,) = explain_nodes(third, snapshot).nodes
    (reason,) = verdict.reasons
    assert there.ask(third) == {"a": f"{reason}; position 1 of 1 in the queue"}
    assert "is held by x/x" in reason
    assert reason.endswith("instances with room hold slices of other namespaces")
    assert explain_nodes(third, snapshot).hints[0].startswith("it starts when")


def test_pending_pods_are_served_on_both_kinds_of_nodes_in_their_order() -> None:
    """The T4 has room for one of them, the A100 for two in two halves, the last one waits."""
    there = cluster()
    pods = [pending(f"p{number}", 14, number) for number in range(4)]
    there.set(*pods)
    entries = there.queue.refreshed().entries()
    assert [[it.node for it in entry.placements] for entry in entries] == [["t"], ["a"], ["a"], []]
    assert entries[3].why
    assert there.queue.position(pods[3]) == "; position 4 of 4 in the queue"
    assert [there.filter(pod) for pod in reversed(pods)] == [[], ["a"], ["a"], ["t"]]
    explanation = there.evaluator.explain(make("large", 99))
    assert explanation is not None
    assert explanation.startswith(
        "no GPU fits: 1 of 1 has too little memory; the largest card has 14 units"
    )
    assert explanation.count("; ") == 2


def test_label_that_is_removed_changes_later_pods_only() -> None:
    """What is inside stays there, and its record can be read."""
    there = cluster(divided("a", "A100", "T4"))
    record(there, make("p", 4), "a")
    before = there.state.allocation("p")
    unlabelled = msgspec.convert(mig_node_json("a", "A100", "T4"), Node)
    there.state.set_node(unlabelled)
    assert there.state.allocation("p") == before
    assert devices(there, make("q", 4), "a") == ["GPU-a-1"]


NODES = st.lists(
    st.tuples(
        st.sampled_from([("A100",), ("A30",), ("T4",), ("A100", "T4"), ("A30", "A30")]),
        st.sampled_from(["", "mig", "mig", "1g.5gb", "3g.20gb", "no"]),
    ),
    min_size=1,
    max_size=4,
)
PODS = st.lists(
    st.fixed_dictionaries(
        {
            "units": st.integers(1, 21),
            "cards": st.sampled_from([1, 1, 1, 2]),
            "namespace": st.sampled_from("xy"),
            "priority": st.sampled_from([None, 5]),
        }
    ),
    min_size=1,
    max_size=6,
)


def drawn(nodes: list[tuple[tuple[str, ...], str]]) -> ExtenderHarness:
    """Return nodes of any models and labels."""
    made = []
    for number, (models, inside) in enumerate(nodes):
        labels = {INSIDE: inside} if inside else {}
        made.append(mig_node_json(f"n{number}", *models, labels=labels))
    return ExtenderHarness(made)


def drawn_pod(number: int, given: Json) -> Pod:
    """Return a pending pod."""
    labels = {gpushare.COUNT: str(given["cards"])} if given["cards"] > 1 else {}
    names = {"namespace": given["namespace"], "priority": given["priority"]}
    return pending(f"p{number}", given["units"], number, labels=labels, **names)


WAITING = [
    {"units": units, "cards": 1, "namespace": "x", "priority": None} for units in (1, 1, 21, 1)
]
"""The third is pending on the first node, so the fourth fits the second node alone."""


@settings(max_examples=60)
@given(NODES, PODS)
@example([(("A100",), "mig"), (("A100",), "3g.20gb")], WAITING)
def test_columns_decide_as_the_definition_and_the_queue_as_filter(
    nodes: list[tuple[tuple[str, ...], str]], wanted: list[Json]
) -> None:
    """Pods are placed one after the other; the harness compares each answer with the definition's."""
    there = drawn(nodes)
    for number, each in enumerate(wanted):
        pod = drawn_pod(number, each)
        there.set(pod)
        entries = there.queue.refreshed().entries()
        fitting = there.extender.filter(pod, there.names).fitting
        there.extender.prioritize(pod, there.names)
        # What is reserved for others fits by the explanation, which knows no queue.
        assert there.evaluator.explain(pod) is None or not fitting
        mine = [entry for entry in entries if entry.pending.id == pod.metadata.uid]
        placed = {it.node for entry in mine for it in entry.placements}
        assert placed <= set(fitting)
        if mine and len(entries) == 1:
            assert bool(placed) == bool(fitting)
        if fitting:
            ranked = there.evaluator.ranked(pod, there.names, there.queue.constraints(pod))
            assert set(ranked) == set(fitting)
            record(there, pod, ranked[0])
    for pod in there.pods.values():
        allocation = there.state.allocation(pod.metadata.uid)
        assert allocation is None or allocation.error is None
