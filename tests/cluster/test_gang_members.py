"""Which pods a gang consists of, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.gang_placement import GangMembers
from fenka.cluster.objects import Pod, SchedulingGate
from fenka.cluster.pod_groups import MINIMUM_LABEL, NAME_LABELS, GangPods, PodGang
from fenka.cluster.state import ClusterState
from fenka.dialects import gpu_manager
from fenka.dialects.base import NVIDIA_GPU, InvalidRecord
from tests.builders import T4_MIB, a_node, a_pod, gang_labels

GANG = PodGang("default", "g", 3)


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
    return GangMembers(state, lambda: GangPods(pods), dict)


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
    assert members.by_gang().keys() == {GANG, PodGang("team", "g", 3)}


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
    assert GangMembers(state, GangPods, dict).requests_cards(pod) is expected


def test_member_is_invalid_when_two_of_its_containers_request_cards() -> None:
    """A member has one placement; gpushare's containers share it, gpu-manager's do not."""
    members = among(node="n")
    assert members.part(a_pod("p", 2, 2)).request.cards == 1
    pod = a_pod("p", 0, 0)
    for container in pod.spec.containers:
        container.resources.limits = {gpu_manager.CORE: "10", gpu_manager.MEMORY: "4"}
    with pytest.raises(InvalidRecord, match="requests cards in 2 containers"):
        members.part(pod)


def launcher(name: str, minimum: str = "3") -> Pod:
    """Return a pod of the gang g that requests no card. minimum: its label."""
    return a_pod(name, 0, uid=name, labels={NAME_LABELS[0]: "g", MINIMUM_LABEL: minimum})


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (member("a"), GANG),
        # kube-scheduler places a launcher by itself
        (launcher("a"), None),
        # a single pod
        (a_pod("a", 4), None),
        # neither a gang nor a card: whatever its label says
        (launcher("a", "many"), None),
    ],
)
def test_pod_is_in_a_gang_only_when_it_names_one_and_requests_cards(
    pod: Pod, expected: PodGang | None
) -> None:
    """Both are needed for a reservation."""
    members = among(pod, node="n")
    assert members.gang(pod) == expected
    assert members.gang_or_none(pod) == expected


@pytest.mark.parametrize("minimum", ["", "0", "-1", "three", "10001", "9" * 63, "²"])
def test_gang_is_unknown_when_its_size_cannot_be_read(minimum: str) -> None:
    """Its owner wrote the label: the pod alone is rejected, with a sentence."""
    pod = a_pod("a", 4, uid="a", labels={NAME_LABELS[0]: "g", MINIMUM_LABEL: minimum})
    members = among(pod, member("b"), node="n")
    with pytest.raises(InvalidRecord, match="set it to the number of pods that start together"):
        members.gang(pod)
    assert members.gang_or_none(pod) is None
    assert not members.all_exist([pod, member("b")])


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (["a", "b"], False),
        (["a", "b", "c"], True),
        (["a", "b", "c", "d"], True),
    ],
)
def test_gang_can_start_when_enough_of_its_pods_exist(present: list[str], expected: bool) -> None:
    """It needs three; the queue asks with those that are pending, which may be fewer."""
    pods = [member(name) for name in present]
    assert among(*pods, node="n").all_exist(pods[:1]) is expected


def test_single_pod_can_start_when_it_is_alone() -> None:
    """It waits for nobody."""
    single = a_pod("p", 4)
    assert among(single, node="n").all_exist([single])


def test_members_are_named_only_when_they_exist() -> None:
    """A reservation may have members that are gone."""
    members = among(member("b"), member("a"))
    assert members.names(["b", "gone", "a"]) == ["a", "b"]
    assert members.exist(["a", "b"])
    assert members.exist([])
    assert not members.exist(["a", "gone"])


def test_size_is_the_newest_pods_when_labels_differ() -> None:
    """A launcher's label counts for nothing, nor does one that cannot be read."""
    old, new = member("a"), member("b")
    new.metadata.labels = gang_labels("g", 2)
    broken = member("c")
    broken.metadata.labels = {NAME_LABELS[0]: "g", MINIMUM_LABEL: "some"}
    pods = [old, new, broken, launcher("l", "7")]
    assert among(*pods, node="n").by_gang() == {PodGang("default", "g", 2): pods}


def test_gang_is_left_out_when_none_of_its_sizes_can_be_read() -> None:
    """It must not hide the others."""
    broken = member("c", namespace="team")
    broken.metadata.labels = {NAME_LABELS[0]: "g", MINIMUM_LABEL: "some"}
    assert among(broken, member("a"), node="n").by_gang().keys() == {GANG}


@given(
    phases=st.lists(
        st.tuples(
            st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=6,
    ),
    minimum=st.integers(1, 7),
)
def test_missing_members_are_those_that_neither_run_nor_have_succeeded(
    phases: list[tuple[str, bool, bool]], minimum: int
) -> None:
    """Of all combinations of phase, node and deletion; given pods count like those that are looked up."""
    pods = []
    for number, (phase, placed, ending) in enumerate(phases):
        pod = member(f"m{number}", phase=phase, node="n" if placed else "")
        pods.append(deleted(pod) if ending else pod)
    gang, members = PodGang("default", "g", minimum), among(*pods, node="n")
    status = members.status(gang)
    assert status == members.status(gang, pods)
    succeeded = sum(phase == "Succeeded" for phase, _, _ in phases)
    alive = [
        placed
        for phase, placed, ending in phases
        if phase not in {"Succeeded", "Failed"} and not ending
    ]
    assert status.present == succeeded + len(alive)
    assert status.missing == minimum - succeeded - sum(alive)
