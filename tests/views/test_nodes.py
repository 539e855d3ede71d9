"""Rows of a cluster's nodes, from one reading. The screens are in tests/cli."""

from typing import Any

import msgspec
import pytest

from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterSnapshot
from fenka.dialects import ack, lease_records
from fenka.dialects.base import CORE_MODE, NVIDIA_GPU
from fenka.dialects.lease_records import LeaseReport, Lingering
from fenka.views.node_rows import CardRow, NodeRow, cluster_nodes, compute_by_card, role
from tests.builders import T4_MIB, Json, a_node, a_pod, node, on_card
from tests.core.builders import piece


def row(node: Node, *pods: Pod, unhealthy: frozenset[int] = frozenset()) -> NodeRow:
    """Return the row of the only node."""
    snapshot = ClusterSnapshot.of([node], pods, {node.metadata.name: unhealthy})
    (found,) = cluster_nodes(snapshot)
    return found


def plain(**given: Any) -> Node:
    """Return a node n that shares no cards."""
    return msgspec.convert(node("n", **given), Node)


def with_limits(name: str, limits: Json, **given: Any) -> Pod:
    """Return a pod of node n with these limits."""
    pod = a_pod(name, 0, node="n", uid=name, **given)
    pod.spec.containers[0].resources.limits = limits
    return pod


def test_row_adds_up_cards_and_programs_when_pods_hold_slices() -> None:
    """4 + 3 units of 14 on card 0, 8 of 14 on card 1: 15 of 28."""
    pods = [
        a_pod("a", 4, node="n", annotations=on_card(0, 4)),
        a_pod("b", 3, node="n", annotations=on_card(0, 3)),
        a_pod("c", 8, node="n", annotations=on_card(1, 8)),
    ]
    found = row(a_node("n", T4_MIB, T4_MIB), *pods)
    assert found.cards == [CardRow(7, 14, 0), CardRow(8, 14, 1)]
    assert (found.allocated, found.total, found.count) == (15, 28, 2)
    assert [(it.name, it.allocated) for it in found.programs] == [
        ("a", {0: 4}),
        ("b", {0: 3}),
        ("c", {1: 8}),
    ]
    assert (found.mode, found.shareable, found.whole, found.pending) == ("share", True, 0, 0)


def test_units_are_pending_when_no_record_names_their_card() -> None:
    """They count for the node, and for no card."""
    found = row(a_node("n", T4_MIB), a_pod("p", 4, node="n"))
    assert found.cards == [CardRow(0, 14, 0)]
    assert (found.pending, found.allocated) == (4, 4)


def test_pod_is_shown_when_only_the_node_shows_it() -> None:
    """It was deleted by force and still runs: 2154 MiB are 2 units."""
    report = LeaseReport(lingering={"u": Lingering("team/gone", (piece(0, 2154, name="n"),))})
    found = row(
        a_node("n", T4_MIB, annotations={lease_records.REPORT: lease_records.encode_report(report)})
    )
    (program,) = found.programs
    assert (program.name, program.namespace, program.allocated) == ("gone", "team", {0: 2})


def test_card_is_unhealthy_when_a_daemon_says_so() -> None:
    """What is held of it stays."""
    pod = a_pod("p", 4, node="n", annotations=on_card(1, 4))
    found = row(a_node("n", T4_MIB, T4_MIB), pod, unhealthy=frozenset({1}))
    assert found.cards == [CardRow(0, 14, 0), CardRow(4, 14, 1, healthy=False)]
    assert found.unhealthy == 1


def test_compute_is_shown_when_the_node_offers_it() -> None:
    """A pod's 30 percent are on its card."""
    shared = a_node("n", T4_MIB)
    assert not row(shared).core
    shared.status.allocatable[ack.CORE] = "100"
    limits = {"aliyun.com/gpu-mem": "4", ack.CORE: "30"}
    pod = with_limits("p", limits, annotations=on_card(0, 4))
    found = row(shared, pod)
    assert found.core
    assert (found.cards[0].core, found.programs[0].core) == (30, {0: 30})


@pytest.mark.parametrize(
    ("mode", "reserved", "weight"), [("hard", 30, 0), ("soft", 30, 0), ("weight", 0, 30)]
)
def test_row_has_the_mode_of_a_pods_compute(mode: str, reserved: int, weight: int) -> None:
    """Weights are not counted as allocated."""
    shared = a_node("n", T4_MIB)
    shared.status.allocatable[ack.CORE] = "100"
    limits = {"aliyun.com/gpu-mem": "4", ack.CORE: "30"}
    pod = with_limits("p", limits, annotations={**on_card(0, 4), CORE_MODE: mode})
    found = row(shared, pod)
    (program,) = found.programs
    assert (program.core_mode, program.weight) == (mode, weight)
    assert found.cards[0].core == reserved


@pytest.mark.parametrize(
    ("given", "mode", "exclusive", "unhealthy"),
    [
        ({"resources": {NVIDIA_GPU: 4}}, "exclusive", 4, 0),
        # the kubelet withholds an unhealthy card: 3 of 4
        ({"resources": {NVIDIA_GPU: 3}, "capacity": {NVIDIA_GPU: 4}}, "exclusive", 4, 1),
        (
            {
                "resources": {"aliyun.com/gpu": 2},
                "labels": {"ack.node.gpu.schedule": "topology"},
            },
            "topology",
            2,
            0,
        ),
        ({}, "none", 0, 0),
        ({"resources": {NVIDIA_GPU: "x"}}, "none", 0, 0),
    ],
)
def test_node_has_whole_cards_when_it_does_not_share(
    given: Json, mode: str, exclusive: int, unhealthy: int
) -> None:
    """By the resource of its mode."""
    found = row(plain(**given))
    assert (found.mode, found.exclusive, found.unhealthy) == (mode, exclusive, unhealthy)
    assert (found.shareable, found.cards, found.count) == (False, [], exclusive)


def test_whole_cards_are_counted_when_pods_hold_them() -> None:
    """2 + 1 of 4; a pod that requests none is no program."""
    pods = [with_limits("a", {NVIDIA_GPU: "2"}), with_limits("b", {NVIDIA_GPU: "1"})]
    found = row(plain(resources={NVIDIA_GPU: 4}), *pods, with_limits("c", {"cpu": "1"}))
    assert found.whole == 3
    assert [(it.name, it.whole) for it in found.programs] == [("a", 2), ("b", 1)]


@pytest.mark.parametrize(
    ("ready", "status", "expected"),
    [("True", "ready", True), ("False", "notReady", False), ("Unknown", "notReady", None)],
)
def test_status_is_that_of_the_ready_condition_when_it_is_known(
    ready: str, status: str, expected: bool | None
) -> None:
    """An unknown state is no state."""
    found = row(plain(ready=ready, unschedulable=True))
    assert (found.status, found.ready, found.schedulable) == (status, expected, False)


def test_error_says_why_a_node_takes_nothing_new() -> None:
    """What is held there stays in the row."""
    pod = a_pod("p", 4, node="n", annotations=on_card(0, 4))
    found = row(a_node("n", T4_MIB, labels={"gpushare": "false"}), pod)
    assert found.error == "its label gpushare=false takes it out of sharing"
    assert found.allocated == 4


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, "<none>"),
        ({"node-role.kubernetes.io/master": ""}, "master"),
        ({"kubernetes.io/role": "gpu"}, "gpu"),
        ({"node-role.kubernetes.io/b": "", "node-role.kubernetes.io/a": ""}, "a,b"),
        ({"node-role.kubernetes.io/a": "", "kubernetes.io/role": "a"}, "a"),
        ({"node-role.kubernetes.io/": "x"}, "<none>"),
    ],
)
def test_role_is_as_kubectl_shows_it_when_labels_vary(
    labels: dict[str, str], expected: str
) -> None:
    """Roles are sorted, and each is shown once."""
    assert role(plain(labels=labels)) == expected


def test_compute_is_added_up_when_slices_share_a_card() -> None:
    """A card without compute is left out."""
    assert compute_by_card([(0, 30), (1, 0), (0, 20), (2, 5)]) == {0: 50, 2: 5}
