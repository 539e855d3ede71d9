"""Rows below the queue: pods that wait for something else, with what."""

from collections.abc import Iterator
from typing import Any

import pytest

from fenka.cluster.objects import Pod, SchedulingGroup
from fenka.cluster.pod_groups import (
    MINIMUM_LABEL,
    GangPolicy,
    PodGroup,
    PodGroupSpec,
    SchedulingPolicy,
)
from fenka.cluster.queue_snapshot import QueueSnapshot, SchedulerOptions
from fenka.cluster.state import ClusterSnapshot
from fenka.core.queue import Fairness
from fenka.views.cluster_queue import cluster_queue
from fenka.views.unqueued_rows import PODS_A_STEP, SETTLED_S, unqueued_steps
from fenka.views.workloads import QueueRow
from tests.builders import T4_MIB, a_node, gang_labels, on_card
from tests.fakes.queue import START, make, pending

PLAIN = SchedulerOptions(fairness=Fairness(penalty_per_request_s=0))
NODE = a_node("n", T4_MIB, T4_MIB)


def rows(*pods: Pod, now: float = 100, refused: dict[str, str] | None = None) -> list[QueueRow]:
    """Return the queue of these pods, `now` seconds after START."""
    return cluster_queue(ClusterSnapshot.of([NODE], pods), PLAIN, START + now, refused or {})


@pytest.mark.parametrize(
    ("pod", "why"),
    [
        (
            pending("p", 4, labels=gang_labels("g", 2)),
            "gang g is incomplete: 1 of its 2 pods exist",
        ),
        (
            pending("p", 4, labels={**gang_labels("g", 2), MINIMUM_LABEL: "abc"}),
            "set it to the number of pods that start together",
        ),
        (make("p", 4, spec={"schedulingGates": [{"name": "x/y"}]}), "their owner must remove: x/y"),
        (pending("p", 99), "no node could hold pod p"),
        (make("p", 4), "kube-scheduler has not tried it yet"),
    ],
)
def test_pod_stands_below_the_queue_when_it_waits_for_something_else(pod: Pod, why: str) -> None:
    """The queue was empty, and said that a new request starts at once."""
    first, below = rows(pending("q", 14), pod)
    assert (first.name, first.position) == ("q", 1)
    assert below.position == 0
    assert why in below.why


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ({"default/g": 2}, "gang g is incomplete: 1 of its 2 pods exist"),
        ({}, "its PodGroup g does not exist"),
        ({"default/g": 1}, ""),
        (None, ""),
    ],
)
def test_pod_group_is_named_when_it_lacks_pods(groups: dict[str, int] | None, why: str) -> None:
    """Its size is in an object; where that may not be read, the gang counts as complete."""
    pod = pending("p", 4)
    pod.spec.scheduling_group = SchedulingGroup(pod_group_name="g")
    known = None if groups is None else {key: pod_group(size) for key, size in groups.items()}
    snapshot = ClusterSnapshot.of([NODE], [pod], groups=known)
    (row,) = cluster_queue(snapshot, PLAIN, START + 100)
    assert row.position == (0 if why else 1)
    assert why in row.why


def pod_group(size: int) -> PodGroup:
    """Return a PodGroup of this size."""
    gang = GangPolicy(min_count=size)
    return PodGroup(spec=PodGroupSpec(scheduling_policy=SchedulingPolicy(gang=gang)))


def test_refused_pod_stands_below_and_holds_no_card_when_its_event_says_so() -> None:
    """The next pod has the card."""
    first, below = rows(
        pending("p", 14, 0), pending("q", 14, 1), refused={"p": "refused its binding 2 times"}
    )
    assert (first.name, first.reserved) == ("q", ["n/0"])
    assert (below.name, below.why) == ("p", "refused its binding 2 times")


def test_gang_is_one_row_when_a_member_stops_it() -> None:
    """Its requests are summed."""
    labels: dict[str, Any] = {"labels": gang_labels("g", 2)}
    (row,) = rows(pending("g-0", 4, **labels), pending("g-1", 99, **labels))
    assert (row.position, row.name) == (0, "g")
    assert row.asks.startswith("2 pods: 103 ")
    assert "no node could hold pod g-1" in row.why


def test_pod_is_not_shown_when_it_was_just_created() -> None:
    """kube-scheduler needs a moment."""
    assert rows(make("p", 4), now=SETTLED_S - 1) == []


def test_pod_is_not_shown_when_it_runs_or_asks_for_no_card() -> None:
    """Nothing of fenka's keeps it."""
    assert rows(make("p", 4, node="n", annotations=on_card(0, 4)), make("q", 0)) == []


def test_rows_come_in_steps_when_many_pods_wait() -> None:
    """Tenants choose how many wait, and all of them were read in one step of the leader's event loop."""
    pods = [make(f"p{number}", 4) for number in range(10 * PODS_A_STEP)]
    snapshot = ClusterSnapshot.of([NODE], pods)
    read = 0

    def counted() -> Iterator[Pod]:
        nonlocal read
        for pod in pods:
            read += 1
            yield pod

    largest = before = 0
    asked = list[Pod]()

    def has_nodes(pod: Pod) -> bool:
        asked.append(pod)
        return True

    steps = unqueued_steps(
        counted(), QueueSnapshot(), snapshot.state, has_nodes, {}, START + 100, 3
    )
    shown = 0
    for step in steps:
        largest, before = max(largest, read + len(asked) - before), read + len(asked)
        shown += step is not None
    assert (read, shown, len(asked)) == (len(pods), 3, 3)
    assert largest <= PODS_A_STEP


def test_members_are_asked_in_steps_when_a_gang_is_large() -> None:
    """Each is a question about all nodes."""
    pods = [pending(f"g-{number}", 4, labels=gang_labels("g", 50)) for number in range(50)]
    state = ClusterSnapshot.of([NODE], pods).state
    steps = list(unqueued_steps(pods, QueueSnapshot(), state, lambda _: True, {}, START + 100))
    assert len(steps) > len(pods)
    assert [step.name for step in steps if step is not None] == ["g"]
