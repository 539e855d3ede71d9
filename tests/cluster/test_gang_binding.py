"""From a gang's reservation to its bindings: who may be bound, what the others wait for, and pauses."""

import pytest

from fenka.cluster.gang_placement import (
    INCOMPLETE_TTL_S,
    MAX_BACKOFF_S,
    NODE_MISSING_TTL_S,
    RESERVATION_TTL_S,
    GangPending,
    MembersAwaited,
)
from fenka.cluster.objects import Pod
from fenka.core.inventory import Taint
from tests.builders import a_node, a_pod, gang_labels, on_card
from tests.fakes.extender import ExtenderHarness, on_t4
from tests.fakes.queue import make

KEY = "default/g"


def reserved(size: int = 2, units: int = 10) -> tuple[ExtenderHarness, list[str]]:
    """Return a gang with a reservation on as many nodes, and the node of each member."""
    cluster = on_t4(*"abcde"[:size])
    pods = cluster.gang("g", size, units)
    return cluster, [cluster.filter(pod)[0] for pod in pods]


# ---- pauses ----


def test_pause_doubles_up_to_ten_minutes_when_reservations_are_not_used() -> None:
    """30, 60, 120, 240, 480 s, and then 600: the cards are others' meanwhile."""
    cluster = on_t4("a", "b")
    pods = cluster.gang("g", 2, 10)
    for pause in (30, 60, 120, 240, 480, 600, 600):
        assert len(cluster.filter(pods[0])) == 1
        cluster.now += RESERVATION_TTL_S
        assert cluster.why(pods[0]).endswith(f"; cards are reserved again in {pause} s")
        cluster.now += pause - 1
        assert cluster.why(pods[1]).endswith("; cards are reserved again in 1 s")
        assert cluster.gangs.reserved() == {}
        cluster.now += 1
    assert pause == MAX_BACKOFF_S


def test_pause_is_forgotten_when_the_gang_has_started() -> None:
    """Its next generation begins with the shortest one."""
    cluster, _ = reserved()
    pods = list(cluster.pods.values())
    for _ in range(2):
        cluster.filter(pods[0])
        cluster.now += RESERVATION_TTL_S
        cluster.gangs.expire()
        cluster.now += MAX_BACKOFF_S
    for pod in pods:
        (node,) = cluster.filter(pod)
        cluster.bind(pod, node)
    assert cluster.gangs.reserved() == {}
    cluster.gone("g-0", "g-1")
    again = cluster.gang("g", 2, 10)
    assert len(cluster.filter(again[0])) == 1
    cluster.now += RESERVATION_TTL_S
    assert "reserved again in 30 s" in cluster.why(again[0])


def test_pause_is_forgotten_when_all_of_the_gang_was_deleted() -> None:
    """Another gang may get its name."""
    cluster, _ = reserved()
    cluster.now = RESERVATION_TTL_S
    cluster.gangs.expire()
    cluster.gone("g-0", "g-1")
    assert cluster.gangs.incomplete_gangs() == []
    again = cluster.gang("g", 2, 10)
    assert len(cluster.filter(again[0])) == 1


@pytest.mark.parametrize(
    ("size", "arrived", "blocked"),
    [
        (2, [], "g-0, g-1"),
        (2, [0], "g-1"),
        # three names are enough
        (5, [], "g-0, g-1, g-2"),
        (5, [1, 2], "g-0, g-3, g-4"),
    ],
)
def test_reason_names_the_members_that_did_not_come(
    size: int, arrived: list[int], blocked: str
) -> None:
    """Something else, such as a taint or CPU, keeps those from kube-scheduler's binding."""
    cluster, nodes = reserved(size)
    pods = list(cluster.pods.values())
    for number in arrived:
        assert isinstance(cluster.gangs.arrive(pods[number], nodes[number]), MembersAwaited)
    cluster.now = RESERVATION_TTL_S
    assert cluster.why(pods[0]) == (
        f"kube-scheduler did not bind all of gang g within 30 s, something else blocks {blocked}; "
        "cards are reserved again in 30 s"
    )


# ---- arrivals ----


def test_members_are_bound_only_when_the_last_has_arrived() -> None:
    """Each waits for the rest of the reservation's time; then all may be bound, in any order."""
    cluster, nodes = reserved(3)
    settled: list[str] = []
    cluster.gangs.on_settled = settled.append
    pods = list(cluster.pods.values())
    assert cluster.gangs.arrive(pods[0], nodes[0]) == MembersAwaited(KEY, RESERVATION_TTL_S)
    cluster.now = 10
    assert cluster.gangs.arrive(pods[2], nodes[2]) == MembersAwaited(KEY, RESERVATION_TTL_S - 10)
    assert [cluster.gangs.may_bind(pod, node) for pod, node in zip(pods, nodes, strict=True)] == (
        [False] * 3
    )
    assert cluster.gangs.waiting_status(pods[1]) == (
        "waiting for the rest of its gang: 2 of 3 pods can be bound"
    )
    assert settled == []
    assert cluster.gangs.arrive(pods[1], nodes[1]) is True
    assert settled == [KEY]
    assert all(cluster.gangs.may_bind(pod, node) for pod, node in zip(pods, nodes, strict=True))
    assert [cluster.gangs.waiting_status(pod) for pod in pods] == [None] * 3


def test_member_is_not_bound_elsewhere_than_reserved() -> None:
    """kube-scheduler chose another node: the reservation does not have the pod there."""
    cluster, (first, second) = reserved()
    one, two = cluster.pods.values()
    assert cluster.gangs.arrive(two, second) == MembersAwaited(KEY, RESERVATION_TTL_S)
    assert cluster.gangs.arrive(one, second) is False
    assert not cluster.gangs.may_bind(one, second)
    assert cluster.gangs.planned_placement(one, second) is None
    placement = cluster.gangs.planned_placement(one, first)
    assert placement is not None
    # 15079 * 10 // 14
    assert [piece.memory_mib for piece in placement.slices] == [10770]


def test_single_pod_may_be_bound_at_once() -> None:
    """It waits for nobody."""
    cluster = on_t4("a")
    pod = cluster.put(make("p", 4))
    assert cluster.gangs.arrive(pod, "a") is True
    assert cluster.gangs.waiting_status(pod) is None
    assert not cluster.gangs.may_bind(pod, "a")
    cluster.gangs.start(pod)


@pytest.mark.parametrize(("running", "expected"), [(0, False), (1, False), (2, True)])
def test_member_without_a_reservation_is_bound_when_its_gang_is_complete_without_it(
    running: int, expected: bool
) -> None:
    """After a restart nothing is reserved any more. Two pods are needed."""
    cluster = on_t4("a", "b")
    for number in range(running):
        name = f"r{number}"
        labels = gang_labels("g", 2)
        cluster.put(a_pod(name, 4, uid=name, node="a", annotations=on_card(0, 4), labels=labels))
    extra = cluster.put(a_pod("extra", 4, uid="extra", labels=gang_labels("g", 2)))
    assert cluster.gangs.arrive(extra, "b") is expected


def test_member_is_not_bound_when_its_gangs_size_cannot_be_read() -> None:
    """Nobody can say whether it is complete."""
    cluster = on_t4("a")
    pod = cluster.put(a_pod("x", 4, labels={**gang_labels("g", 2), **gang_labels("g", 0)}))
    assert cluster.gangs.arrive(pod, "a") is False
    assert cluster.gangs.key(pod) is None


# ---- reserved nodes ----


def test_arrived_member_keeps_its_node_when_it_is_not_offered_again() -> None:
    """kube-scheduler has chosen that node before; others may ask about the pod with other nodes."""
    cluster, (first, second) = reserved()
    one, _ = cluster.pods.values()
    cluster.gangs.arrive(one, first)
    for _ in range(3):
        cluster.now += 2 * NODE_MISSING_TTL_S
        assert cluster.filter(one, second) == []
    assert set(cluster.gangs.reserved()) == {KEY}
    assert cluster.filter(one, first) == [first]


def test_time_without_an_offer_counts_from_the_last_offer() -> None:
    """Missing, offered, missing again within a second: it is not lost."""
    cluster, (first, second) = reserved()
    one, _ = cluster.pods.values()
    assert cluster.filter(one, second) == []
    cluster.now = 0.9
    assert cluster.filter(one, first) == [first]
    cluster.now = 1.5
    assert cluster.filter(one, second) == []
    assert {it.node for it in cluster.gangs.reserved()[KEY]} == {first, second}


@pytest.mark.parametrize("harm", ["taint", "cordon", "labels", "gone"])
def test_reservation_ends_at_once_when_its_node_takes_no_pods_any_more(harm: str) -> None:
    """Nothing has to be waited for: the third node serves."""
    cluster = on_t4("a", "b", "c")
    pods = cluster.gang("g", 2, 10)
    (first,) = cluster.filter(pods[0])
    others = [name for name in cluster.names if name != first]
    labels = {"gpushare": "true", "cgpu": "false"} if harm == "labels" else {}
    changed = a_node(first, 15079, labels=labels, unschedulable=harm == "cordon")
    if harm == "taint":
        changed.spec.taints = (Taint(key="k", value="v", effect="NoSchedule"),)
    if harm == "gone":
        cluster.state.forget_node(first)
    else:
        cluster.state.set_node(changed)
    assert {cluster.filter(pod, *others)[0] for pod in pods} == set(others)
    assert {it.node for it in cluster.gangs.reserved()[KEY]} == set(others)


def test_gang_is_answered_when_no_node_shares_cards_with_it() -> None:
    """One sentence, and it waits for cards, not for its pods."""
    cluster = on_t4("a", "b")
    pods = cluster.gang("g", 2, 10)
    gang = cluster.gangs.gang(pods[0])
    assert gang is not None
    answer = cluster.gangs.place(pods[0], gang, ["unknown"])
    assert answer == GangPending(
        "no room for all 2 pods of gang g: no node of the cluster shares cards with it", queued=True
    )


# ---- preemption for gangs ----


def may_preempt(cluster: ExtenderHarness, pod: Pod) -> bool:
    """Return whether evictions on all nodes make room for the pod's gang."""
    may_evict = cluster.preemption.may_evict
    return bool(cluster.gangs.nodes_after_preemption(pod, cluster.names, may_evict))


@pytest.mark.parametrize(
    ("victim_priority", "units", "expected"),
    [(0, 10, True), (9, 10, False), (0, 14, True), (0, 15, False), (10, 10, False)],
)
def test_gang_fits_after_preemption_only_when_enough_is_of_lower_priority(
    victim_priority: int, units: int, expected: bool
) -> None:
    """Both nodes are full with pods of that priority; the gang of two has 9."""
    cluster = on_t4("a", "b")
    for name in "ab":
        record = on_card(0, 14)
        cluster.put(
            a_pod(f"v{name}", 14, uid=name, node=name, priority=victim_priority, annotations=record)
        )
    pods = cluster.gang("g", 2, units)
    for pod in pods:
        pod.spec.priority = 9
    assert may_preempt(cluster, pods[0]) is expected
    assert may_preempt(cluster, make("single", 15))


def test_only_bound_members_are_evicted_when_a_gang_stays_incomplete() -> None:
    """A launcher without a card goes as well; a member that waits for its node stays."""
    cluster = on_t4("a", "b")
    labels, record = gang_labels("g", 4), on_card(0, 4)
    cluster.put(a_pod("launcher", uid="launcher", node="b", labels=labels))
    cluster.put(a_pod("runs", 4, uid="runs", node="a", labels=labels, annotations=record))
    cluster.put(a_pod("waits", 4, uid="waits", labels=labels))
    cluster.now = 1000
    assert cluster.gangs.incomplete_gangs() == []
    cluster.now += INCOMPLETE_TTL_S
    names = [pod.metadata.name for pod in cluster.gangs.incomplete_gangs()]
    assert sorted(names) == ["launcher", "runs"]


def test_gang_does_not_fit_after_preemption_when_a_member_cannot_be_read() -> None:
    """Nothing is evicted for a gang that can never start."""
    cluster = on_t4("a", "b")
    first, _ = cluster.gang("g", 2, 4)
    assert may_preempt(cluster, first)
    cluster.put(a_pod("g-1", "four", uid="g-1", labels=gang_labels("g", 2)))
    assert not may_preempt(cluster, first)


def test_pod_without_a_priority_is_evicted_for_a_gang_only_above_0() -> None:
    """Neither victim nor gang has one at first."""
    cluster = on_t4("a")
    cluster.put(a_pod("v", 14, uid="v", node="a", annotations=on_card(0, 14)))
    pods = cluster.gang("g", 2, 7)
    assert not may_preempt(cluster, pods[0])
    for pod in pods:
        pod.spec.priority = 1
    assert may_preempt(cluster, pods[0])
