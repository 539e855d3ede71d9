"""Which pods a gang consists of, as tables."""

import pytest

from fenka.cluster.gang_members import GangMembers
from fenka.cluster.objects import Pod, SchedulingGate
from fenka.cluster.pod_groups import Gang
from fenka.cluster.state import ClusterState
from fenka.dialects import gpu_manager
from fenka.dialects.base import NVIDIA_GPU, InvalidRecord
from tests.builders import T4_MIB, a_node, a_pod, gang_labels

GANG = Gang("default", "g", 3)


def member(name: str, units: int = 4, at: int = 0, **given: object) -> Pod:
    """Return a pod of the gang g, which needs three. at: the second of its creation."""
    pod = a_pod(name, units, uid=name, labels=gang_labels("g", 3), **given)
    pod.metadata.creation_timestamp = f"2026-01-01T00:00:{at:02}Z"
    return pod


def deleted(pod: Pod) -> Pod:
    """Return the pod, about to go."""
    pod.metadata.deletion_timestamp = "2026-01-01T00:01:00Z"
    return pod


def among(*pods: Pod, node: str = "") -> GangMembers:
    """Return the members of gangs among these pods. node: a node that shares cards."""
    state = ClusterState([a_node(node, T4_MIB)] if node else [])
    return GangMembers(state, lambda: {it.metadata.uid: it for it in pods}, dict)


@pytest.mark.parametrize(
    ("pods", "present", "missing"),
    [
        ([], 0, 3),
        # pods without a node exist, and still need one
        ([member("a"), member("b")], 2, 3),
        ([member("a"), member("b", node="n"), member("c")], 3, 2),
        # who has succeeded is not missed
        ([member("a"), member("b", node="n", phase="Succeeded")], 2, 2),
        # who has failed, or is about to go, is
        ([member("a", node="n"), member("b", node="n", phase="Failed")], 1, 2),
        ([member("a", node="n"), deleted(member("b", node="n"))], 1, 2),
        # a launcher without a card counts as soon as it exists
        ([member("a"), member("launcher", 0)], 2, 2),
        # more than the gang needs
        ([member(name, node="n") for name in "abcd"], 4, -1),
    ],
)
def test_status_counts_pods_when_they_exist_or_have_succeeded(
    pods: list[Pod], present: int, missing: int
) -> None:
    """The gang needs three pods with a node."""
    status = among(*pods, node="n").status(GANG)
    assert (status.present, status.missing) == (present, missing)


def test_members_are_in_order_of_age_when_they_are_alive() -> None:
    """Of equal age by name."""
    status = among(member("c", at=1), member("b", at=2), member("a", at=2)).status(GANG)
    assert [it.metadata.name for it in status.alive] == ["c", "a", "b"]


def test_members_are_those_of_the_namespace_when_names_are_equal() -> None:
    """Another namespace has its own gang of that name."""
    other = member("b", namespace="team")
    members = among(member("a"), other)
    assert [it.metadata.name for it in members.of("default/g")] == ["a"]
    assert members.by_gang().keys() == {GANG, Gang("team", "g", 3)}


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (member("p"), True),
        (member("p", node="n"), False),
        (member("p", phase="Failed"), False),
        (deleted(member("p")), False),
        (member("p", 0), False),
    ],
)
def test_pod_is_placeable_when_it_is_open_and_requests_cards(pod: Pod, expected: bool) -> None:
    """Kube-scheduler asks about such pods alone."""
    assert among(pod, node="n").is_placeable(pod) is expected


def test_pod_is_not_placeable_when_it_has_a_gate() -> None:
    """Also with fenka's own."""
    pod = member("p")
    pod.spec.scheduling_gates = (SchedulingGate(name="any"),)
    assert not among(pod, node="n").is_placeable(pod)


@pytest.mark.parametrize(
    ("node", "label", "expected"),
    [
        # no node shares its cards, or none gives whole ones
        ("", {}, False),
        ("n", {}, False),
        ("n", {"gpushare": "true", "fenka.io/whole-cards": "true"}, True),
    ],
)
def test_whole_cards_are_placed_only_when_a_sharing_node_gives_them(
    node: str, label: dict[str, str], expected: bool
) -> None:
    """Otherwise they are kube-scheduler's alone."""
    pod = member("p", 0)
    pod.spec.containers[0].resources.limits = {NVIDIA_GPU: "1"}
    state = ClusterState([a_node(node, T4_MIB, labels=label)] if node else [])
    assert GangMembers(state, dict, dict).requests_cards(pod) is expected


def test_member_is_invalid_when_two_of_its_containers_request_cards() -> None:
    """A member has one placement; gpushare's containers share it, gpu-manager's do not."""
    members = among(node="n")
    assert members.part(a_pod("p", 2, 2)).request.cards == 1
    pod = a_pod("p", 0, 0)
    for container in pod.spec.containers:
        container.resources.limits = {gpu_manager.CORE: "10", gpu_manager.MEMORY: "4"}
    with pytest.raises(InvalidRecord, match="requests cards in 2 containers"):
        members.part(pod)
