"""What changes of pods and nodes change in the cluster's state."""

from typing import Any

import msgspec
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


def with_limit(pod: Pod, seconds: int = 60) -> Pod:
    """Return the pod with a time limit."""
    pod.spec.active_deadline_seconds = seconds
    return pod


def ending(pod: Pod) -> Pod:
    """Return the pod, which is being deleted."""
    pod.metadata.deletion_timestamp = LATER
    return pod


STARTED = {"status": {"startTime": LATER}}
ENDS = [
    (version(), ending(version())),
    (with_limit(version()), with_limit(version(**STARTED))),
    (version(), with_limit(version())),
    (with_limit(version()), with_limit(version(), 30)),
]
"""Two versions of a pod that may end at different times."""


@pytest.mark.parametrize(("before", "after"), ENDS)
def test_version_of_the_state_changes_when_the_end_of_a_pod_may_change(
    before: Pod, after: Pod
) -> None:
    """The queue computes from it when cards become free."""
    state = ClusterState([a_node("n", T4_MIB)], [before])
    number = state.version
    state.set_pod(after)
    assert state.version != number


def test_version_of_the_state_stays_when_a_pod_without_time_limit_starts() -> None:
    """When it ends is not known before nor afterwards."""
    state = ClusterState([a_node("n", T4_MIB)], [version()])
    number = state.version
    state.set_pod(version(**STARTED))
    assert state.version == number


def assumed(pod: Pod) -> ClusterState:
    """Return a state in which this pod is assumed to have 4 units of card 0."""
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], [version()])
    allocation = state.allocation("p")
    assert allocation is not None
    state.forget_pod("p")
    pod.spec.node_name = ""
    state.assume(pod, allocation.placements)
    return state


def test_version_of_the_state_stays_when_a_pod_is_bound_as_assumed() -> None:
    """No verdict depends on who knows of the placement."""
    state, bound, changed = assumed(version(annotations={})), version(), set[str]()
    number, before = state.version, state.allocation("p")
    state.watch(changed)
    state.set_pod(bound)
    after = state.allocation("p")
    assert (state.version, state.is_assumed("p"), changed) == (number, False, set())
    assert before is not None
    assert after is not None
    assert (after.pod, after.placements, after.error) == (bound, before.placements, None)


def test_pod_holds_what_was_assumed_when_its_record_names_another_card() -> None:
    """Its owner has changed the record since; or another program has bound it, which is an error."""
    for annotations, error in ((on_card(1, 4), False), ({}, True)):
        state = assumed(version())
        before = state.allocation("p")
        state.set_pod(version(annotations=annotations))
        after = state.allocation("p")
        assert before is not None
        assert after is not None
        assert after.placements == before.placements
        assert (after.error is not None) is error


@pytest.mark.parametrize(("before", "after"), ENDS)
def test_version_of_the_state_changes_when_a_pod_is_bound_with_another_end(
    before: Pod, after: Pod
) -> None:
    """As assumed, but for the time."""
    state = assumed(msgspec.structs.replace(before, spec=msgspec.structs.replace(before.spec)))
    number = state.version
    state.set_pod(after)
    assert state.version != number
