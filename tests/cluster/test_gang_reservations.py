"""Gangs: placed whole, and restarted when they are incomplete."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.gang_placement import INCOMPLETE_TTL_S, NODE_MISSING_TTL_S, RESERVATION_TTL_S
from fenka.cluster.objects import (
    Container,
    ObjectMeta,
    Pod,
    ResourceRequirements,
    SchedulingGate,
    SchedulingGroup,
)
from fenka.cluster.pod_groups import (
    NAME_LABELS,
    GangPolicy,
    PodGroup,
    PodGroupSpec,
    SchedulingPolicy,
)
from tests.builders import T4_MIB, a_node, a_pod, gang_labels, node_json, on_card
from tests.core.builders import device
from tests.fakes.extender import ExtenderHarness, on_t4


def test_gang_is_placed_over_two_nodes_when_none_has_room_for_all() -> None:
    """Four of 7 units on two T4 of 14: two on each, held from the first filter on."""
    cluster = on_t4("a", "b")
    pods = cluster.gang("g", 4, 7)
    first = cluster.filter(pods[0])
    assert len(first) == 1
    assert cluster.woken == ["g-1", "g-2", "g-3"]
    # 15079 - 2 * (15079 * 7 // 14) = 1 MiB left: nobody else gets in between.
    assert [cluster.free("a"), cluster.free("b")] == [1, 1]
    assert cluster.filter(a_pod("other", 1)) == []
    places = [cluster.filter(pod) for pod in pods]
    assert sorted(places) == [["a"], ["a"], ["b"], ["b"]]
    for pod, (node,) in zip(pods, places, strict=True):
        assert cluster.extender.prioritize(pod, [node]) == [(node, 10)]
        cluster.bind(pod, node)
    assert [cluster.state.card_usage(it, device(0, it)).memory_mib for it in "ab"] == [15078, 15078]
    assert [cluster.free("a"), cluster.free("b")] == [1, 1]


def test_nothing_is_reserved_when_a_gang_is_incomplete_or_does_not_fit() -> None:
    """Until all its pods exist, and until all of them fit."""
    cluster = on_t4("a", "b")
    early = cluster.gang("g", 4, 7, present=3)
    assert cluster.why(early[0]) == "gang g is incomplete: 3 of its 4 pods exist"
    assert cluster.free("a") == T4_MIB
    held = cluster.put(a_pod("old", 8, node="a", uid="old", annotations=on_card(0, 8)))
    pods = cluster.gang("g", 4, 7)
    assert cluster.why(pods[3]) == (
        "no room for all 4 pods of gang g: no GPU fits: 2 of 2 have too little memory; "
        "2 of the gang's 4 would fit together; position 1 of 1 in the queue"
    )
    assert cluster.free("b") == T4_MIB
    cluster.state.forget_pod(held.metadata.uid)
    assert len(cluster.filter(pods[3])) == 1


def test_members_are_tried_again_when_they_were_told_of_fewer_pods() -> None:
    """kube-scheduler does not retry a pod when another one is created. Each is named once."""
    cluster = on_t4("a", "b")

    def outdated(limit: int = 9) -> list[str]:
        return [pod.metadata.name for pod in cluster.gangs.wrongly_informed(limit)]

    cluster.holds("old", 0, 8, node="a")
    for present in (1, 2, 3):
        pod = cluster.gang("g", 4, 7, present)[-1]
        assert cluster.why(pod) == f"gang g is incomplete: {present} of its 4 pods exist"
        if present == 1:
            assert outdated() == []
    assert outdated() == ["g-0", "g-1"]
    assert outdated() == []
    # The third was told of three; the others are, when they are tried again.
    first, *_, last = cluster.gang("g", 4, 7)
    assert cluster.why(last).startswith("no room for all 4 pods of gang g")
    assert outdated() == ["g-2"]
    cluster.gone("g-3")
    assert cluster.why(first) == "gang g is incomplete: 3 of its 4 pods exist"
    assert outdated() == []
    cluster.gone("g-2")
    assert outdated(0) == []
    assert outdated() == ["g-0"]


def test_member_is_tried_again_when_the_api_server_shows_it_after_kube_scheduler_asked() -> None:
    """kube-scheduler's watch may be ahead of fenka's."""
    cluster = on_t4("a")
    early = a_pod("g-0", 7, uid="g-0", labels=gang_labels("g", 2))
    assert cluster.why(early) == "the API server has not shown fenka this pod of a gang yet"
    assert cluster.gangs.wrongly_informed(9) == []
    cluster.gang("g", 2, 7, present=1)
    assert cluster.gangs.wrongly_informed(9) == [early]
    assert cluster.gangs.wrongly_informed(9) == []


def test_member_is_not_tried_again_when_it_has_got_a_node() -> None:
    """It was told that its gang was incomplete, and then placed with it."""
    cluster = on_t4("a", "b")
    (early,) = cluster.gang("g", 2, 10, present=1)
    assert "incomplete" in cluster.why(early)
    late = cluster.gang("g", 2, 10)[1]
    for pod in (late, early):
        (node,) = cluster.filter(pod)
        cluster.bind(pod, node)
    assert cluster.gangs.wrongly_informed(9) == []


def test_reservation_expires_when_members_do_not_come() -> None:
    """It leaves nothing behind; the next one is made after a pause."""
    cluster = on_t4("a", "b")
    pods = cluster.gang("g", 2, 10)
    cluster.filter(pods[0])
    assert cluster.filter(a_pod("other", 10)) == []
    cluster.now = RESERVATION_TTL_S
    cluster.gangs.expire()
    assert [cluster.free("a"), cluster.free("b")] == [T4_MIB] * 2
    assert cluster.filter(a_pod("other", 10)) == ["a", "b"]
    # It does not hold the cards again at once, or it would hold them for ever.
    assert cluster.why(pods[1]) == (
        "kube-scheduler did not bind all of gang g within 30 s, something else blocks g-0, g-1; "
        "cards are reserved again in 30 s"
    )
    cluster.now += RESERVATION_TTL_S
    assert len(cluster.filter(pods[1])) == 1
    cluster.now += RESERVATION_TTL_S
    assert "cards are reserved again in 60 s" in cluster.why(pods[1])


def test_reservation_ends_when_a_member_is_deleted() -> None:
    """Its successor is placed with the others, without a pause."""
    cluster = on_t4("a", "b")
    pods = cluster.gang("g", 2, 10)
    cluster.filter(pods[0])
    del cluster.pods["g-1"]
    cluster.put(a_pod("g-9", 10, uid="g-9", labels=gang_labels("g", 2)))
    assert len(cluster.filter(pods[0])) == 1
    assert cluster.woken == ["g-1", "g-9"]


async def test_waiting_member_is_not_bound_when_its_gang_is_reserved_for_again() -> None:
    """Its gang's other pod is replaced while it waits: both must arrive for the new reservation."""
    cluster = ExtenderHarness([node_json("a", T4_MIB, T4_MIB)])
    pods = cluster.gang("g", 2, 10)
    assert cluster.filter(pods[0]) == ["a"]
    waiting = asyncio.create_task(cluster.barrier.wait_for_members(pods[0], "a"))
    await asyncio.sleep(0)
    cluster.gone("g-1")
    successor = cluster.put(a_pod("g-9", 10, uid="g-9", labels=gang_labels("g", 2)))
    assert cluster.filter(successor) == ["a"]
    assert not await waiting
    both = (cluster.barrier.wait_for_members(pod, "a") for pod in (pods[0], successor))
    assert await asyncio.gather(*both) == [True, True]


def test_member_without_a_card_counts_when_it_exists() -> None:
    """A launcher beside two workers; members with scheduling gates are not placed."""
    cluster = on_t4("a", "b")
    workers = cluster.gang("g", 3, 10, present=2)
    assert "2 of its 3 pods exist" in cluster.why(workers[0])
    launcher = cluster.put(a_pod("launcher", uid="launcher", labels=gang_labels("g", 3)))
    assert cluster.gangs.gang(launcher) is None
    assert len(cluster.filter(workers[0])) == 1
    cluster.now += 10 * RESERVATION_TTL_S
    workers[1].spec.scheduling_gates = (SchedulingGate(name="quota"),)
    assert cluster.why(workers[0]) == "gang g waits for pods with scheduling gates: 1 of its 3"


async def test_gang_is_left_to_kube_scheduler_when_it_requests_no_shared_card() -> None:
    """No cards at all, or whole ones of nodes that do not share."""
    cluster = on_t4("a", "b")
    idle = [
        cluster.put(a_pod(f"i{n}", uid=f"i{n}", labels=gang_labels("i", 3), node="a"))
        for n in (0, 1)
    ]
    whole = [a_pod(f"w{n}", uid=f"w{n}", labels=gang_labels("w", 3)) for n in (0, 1)]
    for pod in whole:
        pod.spec.containers = (
            Container(resources=ResourceRequirements(limits={"nvidia.com/gpu": "1"})),
        )
        cluster.put(pod)
    cluster.now += 10 * INCOMPLETE_TTL_S
    assert [cluster.gangs.gang(it) for it in (*idle, *whole)] == [None] * 4
    assert cluster.gangs.incomplete_gangs() == []
    assert await cluster.barrier.wait_for_members(whole[0], "elsewhere")
    assert "elsewhere" in cluster.extender.filter(whole[0], ["elsewhere"]).unresolvable
    cluster.state.set_node(a_node("elsewhere"))
    assert cluster.extender.filter(whole[0], ["elsewhere"]).fitting == ["elsewhere"]
    # Where a sharing node gives whole cards too, they are planned.
    cluster.state.set_node(
        a_node("c", T4_MIB, labels={"gpushare": "true", "fenka.io/whole-cards": "true"})
    )
    assert cluster.gangs.gang(whole[0]) is not None
    assert "2 of its 3 pods exist" in cluster.why(whole[0])


def test_gang_is_placed_elsewhere_when_a_reserved_node_is_not_offered() -> None:
    """kube-scheduler's other rules exclude that node."""
    cluster = on_t4("a", "b", "c")
    pods = cluster.gang("g", 2, 10)
    (node,) = cluster.filter(pods[0])
    others = [it for it in cluster.names if it != node]
    # Once may be anybody's question: kube-scheduler asks again.
    assert cluster.extender.filter(pods[0], others).fitting == []
    assert cluster.filter(pods[1]) != []
    assert cluster.extender.filter(pods[0], others).fitting == []
    cluster.now += NODE_MISSING_TTL_S
    (instead,) = cluster.extender.filter(pods[0], others).fitting
    assert instead in others
    assert cluster.free(node) == T4_MIB


def test_pod_is_placed_alone_when_its_gang_has_enough() -> None:
    """The fifth of a gang of four."""
    cluster = on_t4("a", "b")
    pods = cluster.gang("g", 2, 4)
    for pod in pods:
        (node,) = cluster.filter(pod)
        cluster.bind(pod, node)
        pod.spec.node_name = node
    extra = cluster.put(a_pod("g-9", 4, uid="g-9", labels=gang_labels("g", 2)))
    assert cluster.filter(extra) == ["a", "b"]


def test_gang_is_rejected_on_every_node_when_its_size_is_unknown() -> None:
    """One sentence, on every node."""
    cluster = on_t4("a")
    lost = cluster.put(a_pod("x", 4, labels={NAME_LABELS[1]: "g"}))
    assert cluster.why(lost) == (
        "it is in the gang g, and its label pod-group.scheduling.sigs.k8s.io/min-available is '': "
        "set it to the number of pods that start together"
    )
    two = cluster.put(a_pod("y", 4, labels=gang_labels("h", 1)))
    two.spec.scheduling_group = SchedulingGroup(pod_group_name="native")
    assert cluster.why(two) == "its PodGroup native does not exist"


def test_pod_group_gives_the_size_when_the_cluster_has_one() -> None:
    """scheduling.k8s.io; a group without a gang policy gives none."""
    cluster = on_t4("a", "b")
    group = PodGroup(
        metadata=ObjectMeta(name="n", namespace="default"),
        spec=PodGroupSpec(scheduling_policy=SchedulingPolicy(gang=GangPolicy(min_count=2))),
    )
    cluster.groups["default/n"] = group
    pods = [cluster.put(a_pod(f"n-{it}", 10, uid=f"n-{it}")) for it in range(2)]
    for pod in pods:
        pod.spec.scheduling_group = SchedulingGroup(pod_group_name="n")
    assert {tuple(cluster.filter(pod)) for pod in pods} == {("a",), ("b",)}
    group.spec.scheduling_policy.gang = None
    cluster.gangs.expire()
    assert cluster.gangs.gang(pods[0]) is None


def test_members_are_evicted_when_a_gang_is_incomplete_for_a_minute() -> None:
    """A member that has succeeded counts as present."""
    cluster = on_t4("a", "b")
    pods = cluster.gang("g", 2, 10)
    for pod, node in zip(pods, "ab", strict=True):
        pod.spec.node_name = node
    assert cluster.gangs.incomplete_gangs() == []
    pods[0].status.phase = "Succeeded"
    assert cluster.gangs.incomplete_gangs() == []
    pods[0].status.phase = "Failed"
    assert cluster.gangs.incomplete_gangs() == []
    cluster.now += INCOMPLETE_TTL_S
    assert cluster.gangs.incomplete_gangs() == [pods[1]]
    replaced = a_pod("g-0", 10, uid="new", node="a", labels=gang_labels("g", 2))
    cluster.put(replaced)
    assert cluster.gangs.incomplete_gangs() == []


def test_pods_are_preempted_only_when_all_of_a_gang_would_fit() -> None:
    """Room for one of two is not enough."""
    cluster = on_t4("a", "b")
    cluster.put(a_pod("weak", 10, node="a", uid="weak", priority=0, annotations=on_card(0, 10)))
    strong = cluster.put(
        a_pod("even", 10, node="b", uid="even", priority=9, annotations=on_card(0, 10))
    )
    pods = cluster.gang("g", 2, 10)
    for pod in pods:
        pod.spec.priority = 9
    assert cluster.extender.preempt(pods[0], {"a": []}, {}) == {}
    strong.spec.priority = 0
    results = cluster.extender.preempt(pods[0], {"a": []}, {})
    assert results["a"].uids == ("weak",)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(2, 4), st.integers(1, 14)), min_size=2, max_size=3),
    data=st.data(),
)
def test_gang_holds_all_or_nothing_when_two_compete(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever the order in which kube-scheduler asks: a gang has all its places, or none, and no card is
    overcommitted; once all have been asked often enough, at least one gang that fits alone is whole."""
    cluster = on_t4("a", "b", "c")
    gangs = {f"g{n}": cluster.gang(f"g{n}", *it) for n, it in enumerate(sizes)}
    every = [pod for pods in gangs.values() for pod in pods]
    places: dict[str, str] = {}

    def ask(pod: Pod) -> None:
        found = cluster.filter(pod)
        if found:
            places[pod.metadata.uid] = found[0]

    for _ in range(data.draw(st.integers(0, 12))):
        ask(data.draw(st.sampled_from(every)))
    for pod in every:
        ask(pod)
    for name in cluster.names:
        assert cluster.gangs.live.usage.card_usage(name, device(0, name)).memory_mib <= T4_MIB
    planned = {
        key: [
            cluster.gangs.planned_placement(pod, places.get(pod.metadata.uid, "")) is not None
            for pod in pods
        ]
        for key, pods in gangs.items()
    }
    for whole in planned.values():
        assert all(whole) or not any(whole)
    alone = [on_t4("a", "b", "c") for _ in sizes]
    fits = [bool(one.filter(one.gang("g", *it)[0])) for one, it in zip(alone, sizes, strict=True)]
    assert any(all(whole) for whole in planned.values()) == any(fits)


def test_spare_member_waits_when_the_gang_is_placed_without_it() -> None:
    """Two of three start together; the third is placed like a single pod once both are bound."""
    cluster = on_t4("a", "b")
    first, second, spare = (
        cluster.put(a_pod(name, 7, uid=name, labels=gang_labels("g", 2))) for name in "pqr"
    )
    assert cluster.filter(first) == ["a"]
    assert cluster.woken == ["q"]
    assert cluster.why(spare) == "gang g is being placed without this pod"
    # 15079 - 2 * 7539 = 1 MiB: nothing is reserved for the spare one
    assert [cluster.free("a"), cluster.free("b")] == [1, T4_MIB]
    for pod in (first, second):
        cluster.bind(pod, *cluster.filter(pod))
    assert cluster.filter(spare) == ["b"]
