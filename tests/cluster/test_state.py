"""What changes of pods and nodes change in the cluster's state."""

from typing import Any

import pytest

from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterState
from tests.builders import T4_MIB, a_node, a_pod, on_card

LATER = "2026-11-22T08:00:00Z"


def version(**given: Any) -> Pod:
    """Return a version of a pod that has 4 units of a card."""
    annotations = given.pop("annotations", on_card(0, 4))
    return a_pod("p", 4, uid="p", node="n", phase="Running", annotations=annotations, **given)


def test_version_of_the_state_stays_when_only_the_status_of_a_pod_changes() -> None:
    """Most events are such: no verdict and no position in the queue is computed again."""
    state = ClusterState([a_node("n", T4_MIB)], [version()])
    before, placements = state.version, state.allocation("p")
    later = version(status={"conditions": [{"type": "Ready", "status": "True"}]})
    state.set_pod(later)
    assert state.version == before
    after = state.allocation("p")
    assert placements is not None
    assert after is not None
    assert after.pod is later
    assert after.placements == placements.placements


def test_shared_node_is_the_same_object_when_only_the_status_of_its_node_changes() -> None:
    """Whoever has evaluated it sees at once that nothing has changed."""
    state = ClusterState([a_node("n", T4_MIB)])
    before, changed = state.shared_node("n"), a_node("n", T4_MIB)
    changed.metadata.resource_version = "2"
    state.set_node(changed)
    assert state.shared_node("n") is before


def test_allocation_follows_when_a_bound_pod_is_recorded_on_another_card() -> None:
    """Its owner may have changed the record."""
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], [version()])
    state.set_pod(version(annotations=on_card(1, 4)))
    allocation = state.allocation("p")
    assert allocation is not None
    assert [piece.card for piece in allocation.slices] == [1]


@pytest.mark.parametrize("status", [{}, {"startTime": LATER}])
def test_version_of_the_state_changes_when_the_end_of_a_pod_may_change(status: Any) -> None:
    """The queue computes from it when cards become free."""
    state = ClusterState([a_node("n", T4_MIB)], [version()])
    before, later = state.version, version(status=status)
    if not status:
        later.metadata.deletion_timestamp = LATER
    state.set_pod(later)
    assert state.version != before
