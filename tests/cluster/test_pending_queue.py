"""Pods as entries of the queue: when they are pending, for how long they run, and what they wait for."""

from typing import Any

import pytest

from fenka.cluster.objects import QUEUE_GATE, Pod
from fenka.cluster.pending_queue import (
    OVERDUE_TTL_S,
    PendingQueue,
    gang_complete_by_label,
    is_open,
    is_unplaced,
)
from fenka.cluster.pod_columns import LiveColumns
from fenka.cluster.pod_groups import MINIMUM_LABEL
from fenka.cluster.queue_snapshot import PendingEntry, QueueSnapshot, time_limit_s
from fenka.cluster.state import ClusterState
from fenka.core.backfill import complete
from fenka.core.queue import Fairness
from fenka.core.request import Placement
from fenka.core.usage import UsageOverlay
from fenka.dialects import ack, gpushare
from fenka.dialects.nodes import MODE_LABEL
from tests.builders import T4_MIB, Json, a_node, gang_labels, on_card
from tests.core.builders import device, piece
from tests.fakes.queue import START, make, pending, stamp

PLAIN = Fairness(penalty_per_request_s=0)
FOREIGN: Json = {"schedulingGates": [{"name": QUEUE_GATE}, {"name": "quota"}]}
OWN: Json = {"schedulingGates": [{"name": QUEUE_GATE}]}


def deleted(pod: Pod, at: float = 0) -> Pod:
    """Return the pod, which the API server removes at this time."""
    pod.metadata.deletion_timestamp = stamp(at)
    return pod


def holder(name: str, units: int = 10, card: int = 0, node: str = "n", **given: Any) -> Pod:
    """Return a pod that has run on this card since START."""
    return make(name, units, node=node, annotations=on_card(card, units), **{"started": 0, **given})


def schedule(cluster: ClusterState, *pods: Pod, now: float = 100, **given: Any) -> QueueSnapshot:
    """Schedule the queue of these pods, `now` seconds after START."""
    return complete(PendingQueue(cluster, "binpack", PLAIN).schedule(pods, START + now, **given))


@pytest.mark.parametrize(
    ("pod", "open_", "unplaced"),
    [
        (make("p", 4), True, False),
        (pending("p", 4), True, True),
        (make("p", 4, spec=OWN), True, True),
        (make("p", 4, spec=FOREIGN), False, True),
        (make("p", 4, node="n"), False, False),
        (make("p", 4, phase="Failed"), False, False),
        (deleted(make("p", 4)), False, False),
    ],
)
def test_pod_is_pending_when_it_is_open_and_has_no_node(
    pod: Pod, open_: bool, unplaced: bool
) -> None:
    """fenka's own gate keeps no pod out of the queue, any other does."""
    assert (is_open(pod), is_unplaced(pod)) == (open_, unplaced)


@pytest.mark.parametrize(
    ("deadline", "grace", "expected"),
    [(None, 10, None), (100, 10, 110), (100, 0, 100), (100, None, 130)],
)
def test_time_limit_is_deadline_and_grace_when_a_pod_has_one(
    deadline: int | None, grace: int | None, expected: float | None
) -> None:
    """Kubernetes' grace period is 30 s where the pod gives none."""
    spec = {"terminationGracePeriodSeconds": grace}
    assert time_limit_s(make("p", 4, runs=deadline, spec=spec)) == expected


def test_gang_has_the_weakest_values_when_its_pods_differ() -> None:
    """The lowest priority, the longest time limit, and the time of the first pod."""
    entry = PendingEntry(
        "default/g",
        (make("a", 4, 9, runs=50, priority=7), make("b", 4, 5, runs=80, priority=3)),
    )
    assert (entry.name, entry.namespace) == ("g", "default")
    assert (entry.priority, entry.time_limit_s) == (3, 80)
    assert entry.request(START + 100).requested_at == START + 5
    endless = PendingEntry("default/g", (make("a", 4, runs=50), make("b", 4)))
    assert endless.time_limit_s is None


@pytest.mark.parametrize(
    ("minimum", "pods", "expected"),
    [("", 1, True), ("2", 1, False), ("2", 2, True), ("2", 3, True), ("x", 1, False)],
)
def test_gang_is_complete_when_as_many_pods_are_there_as_its_label_says(
    minimum: str, pods: int, expected: bool
) -> None:
    """A label that is no number starts no gang, as in the scheduler."""
    labels = {MINIMUM_LABEL: minimum} if minimum else {}
    members = [make(f"p{number}", 4, labels=labels) for number in range(pods)]
    assert gang_complete_by_label(members) is expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"runs": 200}, 200),
        # not reported as started yet: from when it is seen, at 100
        ({"runs": 200, "started": None}, 300),
        # it should have ended at 50, and may at any moment
        ({"runs": 50}, 100),
        # at 40 that is too long ago: it may never end
        ({"runs": 100 - int(OVERDUE_TTL_S)}, None),
    ],
)
def test_reservation_starts_when_the_holder_has_ended(given: Json, expected: float | None) -> None:
    """10 of 14 units are held; the clock shows 100."""
    held = holder("h", **given)
    (entry,) = schedule(ClusterState([a_node("n", T4_MIB)], [held]), pending("p", 12)).entries
    assert entry.reservation is not None
    starts_by = entry.reservation.starts_by
    assert starts_by == (None if expected is None else START + expected)


def test_reservation_starts_earlier_when_the_holder_is_being_deleted() -> None:
    """The API server's time, which includes the grace period, is before its deadline."""
    held = deleted(holder("h", runs=500), 130)
    (entry,) = schedule(ClusterState([a_node("n", T4_MIB)], [held]), pending("p", 12)).entries
    assert entry.reservation is not None
    assert entry.reservation.starts_by == START + 130


def test_gang_is_not_pending_when_cards_are_reserved_for_it() -> None:
    """What is reserved is not available to others."""
    members = [pending(name, 14, labels=gang_labels("g", 2)) for name in ("a", "b")]
    cluster = ClusterState([a_node("n", T4_MIB, T4_MIB)])
    (alone,) = schedule(cluster, *members).entries
    assert alone.pending.id == "default/g"
    whole = tuple(Placement("n", (piece(index, T4_MIB, name="n"),)) for index in (0, 1))
    other = pending("p", 4, 1)
    gangs = {"default/g": whole}
    (entry,) = schedule(cluster, *members, other, gangs=gangs).entries
    assert (entry.pending.id, entry.placements) == ("p", ())
    usage = UsageOverlay(cluster)
    for placement in whole:
        usage.add(placement)
    queue = PendingQueue(cluster, "binpack", PLAIN, live=LiveColumns(cluster, usage))
    (again,) = complete(queue.schedule((*members, other), START, gangs=gangs)).entries
    assert (again.reservation, again.why) == (entry.reservation, entry.why)


@pytest.mark.parametrize("first", [15, 4])
def test_gang_is_not_pending_when_no_node_could_hold_one_of_its_members(first: int) -> None:
    """A T4 has 14 units: the member that asks for 15 can never start, whatever the order of the two."""
    labels = gang_labels("g", 2)
    members = [
        pending(f"g-{number}", units, labels=labels)
        for number, units in enumerate((first, 19 - first))
    ]
    entries = schedule(ClusterState([a_node("n", T4_MIB)]), *members, pending("p", 4)).entries
    assert [entry.pending.name for entry in entries] == ["p"]


def test_nodes_are_not_used_when_they_are_excluded_for_an_entry() -> None:
    """Other entries may use them."""
    cluster = ClusterState([a_node("a", T4_MIB), a_node("b", T4_MIB)])
    first, second = schedule(
        cluster, pending("p", 4, 1), pending("q", 14, 2), excluded_nodes={"p": frozenset("a")}
    ).entries
    assert [it.placements[0].node for it in (first, second)] == ["b", "a"]


def test_pod_waits_for_a_node_when_pods_of_another_kind_are_there() -> None:
    """On nodes of core_mem pods with and without compute do not mix; one without pods is preferred."""
    labels = {MODE_LABEL: "core_mem"}
    held = holder("h", 4, node="a")
    nodes = [a_node(name, T4_MIB, labels=labels) for name in ("a", "b")]
    pod = pending("p", 4)
    resources = pod.spec.containers[0].resources
    resources.limits = {**resources.limits, ack.CORE: "50"}
    (entry,) = schedule(ClusterState(nodes, [held]), pod).entries
    assert [it.node for it in entry.placements] == ["b"]
    # There is no other node: it waits there.
    (entry,) = schedule(ClusterState(nodes[:1], [held]), pod).entries
    assert entry.pending.id == "p"


def test_rank_is_that_of_a_pod_when_it_is_not_in_the_queue() -> None:
    """By priority and time, as if it came now."""
    pods = [pending(name, 14, at) for name, at in (("a", 10), ("b", 20))]
    snapshot = schedule(ClusterState([a_node("n", T4_MIB)], [holder("h", 14)]), *pods)
    assert [entry.pending.id for entry in snapshot.entries] == ["a", "b"]
    for at, priority, expected in ((5, 0, 0), (15, 0, 1), (25, 0, 2), (25, 1, 0), (5, -1, 2)):
        pod = make("new", 4, at, priority=priority)
        request = PendingEntry("new", (pod,)).request(START + 100)
        assert snapshot.rank(snapshot.sort_key(request)) == expected


def test_snapshot_can_reserve_only_until_four_entries_have() -> None:
    """The fifth waits without a card."""
    cluster = ClusterState([a_node("n", *[T4_MIB] * 5)])
    for index in range(5):
        cluster.set_pod(holder(f"h{index}", 14, index))
    for count in (3, 4, 5):
        pods = [pending(f"p{number}", 14, number) for number in range(count)]
        snapshot = schedule(cluster, *pods)
        reserved = [entry.reservation is not None for entry in snapshot.entries]
        assert reserved == [number < 4 for number in range(count)]
        assert snapshot.can_reserve is (count < 4)
        assert {snapshot.node_of_card[device(index, "n")] for index in range(5)} == {"n"}


def test_cards_are_reserved_again_when_a_card_is_healthy_again() -> None:
    """Two cards of 8: while one is unhealthy there is nothing to wait for, afterwards for card 0."""
    cluster = ClusterState([a_node("n", T4_MIB, T4_MIB)], [holder("h", runs=200)])
    queue = PendingQueue(cluster, "binpack", PLAIN)
    pod = pending("p", 16, labels={gpushare.COUNT: "2"})

    def reserved() -> tuple[frozenset[str], float | None] | None:
        (entry,) = complete(queue.schedule([pod], START + 100)).entries
        found = entry.reservation
        return None if found is None else (frozenset(found.cards), found.starts_by)

    both = frozenset({device(0, "n"), device(1, "n")})
    assert reserved() == (both, START + 200)
    cluster.set_unhealthy("n", frozenset({1}))
    assert reserved() is None
    cluster.set_unhealthy("n", frozenset())
    assert reserved() == (both, START + 200)
