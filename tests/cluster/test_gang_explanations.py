"""Why a gang does not start: the member that stops it, and the pods that must end."""

from typing import Any

import pytest

from fenka.cluster.explain import PodExplanation, explain
from fenka.cluster.objects import OwnerReference, Pod, PodStatus
from fenka.cluster.state import ClusterSnapshot
from tests.builders import T4_MIB, a_node, gang_labels, on_card
from tests.fakes.queue import make, pending

NODE = a_node("n", T4_MIB, T4_MIB)


def member(name: str, units: int, size: int = 2, **rest: Any) -> Pod:
    """Return a member of the gang g for which kube-scheduler has found no node."""
    return pending(name, units, labels=gang_labels("g", size), **rest)


def holder(name: str, card: int, units: int) -> Pod:
    """Return a pod that runs."""
    return make(name, units, node="n", annotations=on_card(card, units), phase="Running")


def explained(*pods: Pod) -> PodExplanation:
    """Return the explanation of the first pod."""
    return explain(pods[0], ClusterSnapshot.of([NODE], pods), [])


def test_gang_is_explained_when_a_member_does_not_exist() -> None:
    """The pod has room by itself, and kube-scheduler's log would say nothing."""
    explanation = explained(member("g-0", 4))
    assert "1 of 2 pods exist" in explanation.notes[0]
    assert explanation.hints == ["gang g starts when 1 more of its pods exist"]


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("StatefulSet", "podManagementPolicy: Parallel"), ("Job", "kubectl describe job train")],
)
def test_owner_of_the_missing_member_is_named_when_it_has_one(kind: str, advice: str) -> None:
    """An ordered StatefulSet never makes the second pod."""
    pod = member("g-0", 4)
    owner = OwnerReference(kind=kind, name="train", uid="u", controller=True)
    pod.metadata.owner_references = (owner,)
    assert advice in explained(pod).hints[1]


def test_impossible_member_is_named_when_the_asked_one_has_room() -> None:
    """99 units are more than any card has."""
    explanation = explained(member("g-0", 4), member("g-1", 99))
    assert len(explanation.hints) == 1
    assert explanation.hints[0].startswith("default/g-1 stops all of gang g: it can never start")


def test_pod_that_must_end_is_named_when_one_is_enough() -> None:
    """Each member fits beside it, both do not."""
    explanation = explained(member("g-0", 12), member("g-1", 12), holder("h", 0, 4))
    assert explanation.hints == ["all 2 pods of gang g start when default/h ends"]


def test_pods_that_must_end_are_named_when_no_single_one_is_enough() -> None:
    """The smallest pod need not end."""
    explanation = explained(
        member("g-0", 12),
        member("g-1", 12),
        holder("a", 0, 6),
        holder("b", 1, 7),
        holder("c", 1, 1),
    )
    assert explanation.hints == ["all 2 pods of gang g start when default/b, default/a end"]


def test_gated_member_is_named_when_it_stops_the_gang() -> None:
    """The gate is another program's."""
    gated = make("g-1", 4, labels=gang_labels("g", 2), spec={"schedulingGates": [{"name": "x/y"}]})
    explanation = explained(member("g-0", 4), gated)
    assert "g-1 stop all of gang g" in explanation.hints[0]
    assert "x/y" in explanation.hints[0]


def test_room_is_stated_for_the_gang_when_all_fit() -> None:
    """kube-scheduler has the reason then."""
    explanation = explained(member("g-0", 4), member("g-1", 4))
    assert explanation.hints[0].startswith("there is room for all 2 pods of gang g")


def test_pod_is_explained_by_itself_when_its_gang_has_started() -> None:
    """It is placed like a single pod."""
    placed = [
        make(f"g-{n}", 7, node="n", annotations=on_card(n, 7), labels=gang_labels("g", 2))
        for n in range(2)
    ]
    explanation = explained(member("g-2", 10), *placed)
    assert not any("gang" in note for note in explanation.notes)
    assert explanation.hints[0].startswith("it starts when default/g-0 ends")


def test_holder_is_named_as_not_started_when_its_image_never_comes() -> None:
    """Whoever waits for it looks there, not at the queue."""
    stuck = holder("h", 0, 4)
    stuck.status = PodStatus(phase="Pending", start_time="2026-01-01T00:00:00Z")
    (hint,) = explained(member("g-0", 12), member("g-1", 12), stuck).hints
    assert "default/h ends; default/h has not started since 2026-01-01T00:00:00Z" in hint


def test_cluster_is_as_before_when_a_gang_was_explained() -> None:
    """The ends are tried on a copy."""
    snapshot = ClusterSnapshot.of([NODE], [member("g-0", 12), member("g-1", 12), holder("h", 0, 4)])
    version = snapshot.state.version
    explain(snapshot.pods[0], snapshot, [])
    assert len(snapshot.state.allocations("n")) == 1
    assert snapshot.state.version == version
