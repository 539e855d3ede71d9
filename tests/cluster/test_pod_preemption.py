"""Which pods are evicted for another, as tables."""

import pytest

from fenka.cluster.objects import Pod
from fenka.cluster.pod_preemption import PodPreemption
from fenka.cluster.state import ClusterState
from tests.builders import T4_MIB, a_node, a_pod, on_card


def running(name: str, units: int, card: int, priority: int) -> Pod:
    """A pod on node n."""
    return a_pod(
        name, units, node="n", uid=name, priority=priority, annotations=on_card(card, units)
    )


def preempted(pods: list[Pod], new: Pod, victims: list[str], *sizes: int) -> list[str] | None:
    """Who goes of a node with these cards."""
    world = ClusterState([a_node("n", *(sizes or (T4_MIB, T4_MIB)))], pods)
    known = {it.metadata.uid: it for it in pods}
    found = PodPreemption(world, "binpack").victims(new, "n", victims, known)
    return list(found.uids) if found else None


NEW = a_pod("new", 10, priority=100)


def test_victims_stay_when_they_are_enough() -> None:
    """kube-scheduler's choice."""
    pods = [running("a", 10, 0, 1), running("b", 10, 1, 1)]
    assert preempted(pods, NEW, ["a"]) == ["a"]


def test_victims_are_added_when_they_are_on_different_cards() -> None:
    """5 + 5 on two cards: kube-scheduler evicts one of each, which frees no card of 10."""
    pods = [running(f"p{card}{i}", 5, card, 1) for card in (0, 1) for i in (0, 1)]
    # 14 - 5 = 9 < 10 on each card after p00 and p10; one more of either card is needed.
    assert preempted(pods, NEW, ["p00", "p10"]) == ["p00", "p10", "p01"]


def test_least_important_pods_are_evicted_when_cards_differ() -> None:
    """Card 1's pods are less important; of them 14 - 10 = 4 units may stay: the 3 do."""
    pods = [
        running("vip", 12, 0, 50),
        running("a", 6, 1, 1),
        running("b", 5, 1, 2),
        running("c", 3, 1, 3),
    ]
    assert set(preempted(pods, NEW, []) or ()) == {"a", "b"}


@pytest.mark.parametrize("priority", [100, 101])
def test_pod_is_not_evicted_when_its_priority_is_not_lower(priority: int) -> None:
    """Neither as an addition nor as kube-scheduler's victim."""
    pods = [running("a", 10, 0, priority)]
    assert preempted(pods, NEW, [], T4_MIB) is None
    assert preempted(pods, NEW, ["a"], T4_MIB) is None


def test_victims_are_chosen_on_each_card_when_several_are_requested() -> None:
    """10 units on two cards, 5 each, of 14: 12 on each must go, the third card's pod may stay."""
    pods = [running(f"p{card}", 12, card, card) for card in range(3)]
    new = a_pod("new", 10, priority=100, labels={"aliyun.com/gpu-count": "2"})
    assert set(preempted(pods, new, [], T4_MIB, T4_MIB, T4_MIB) or ()) == {"p0", "p1"}


def test_nothing_is_evicted_when_the_card_is_too_small() -> None:
    """7 units cannot become 10."""
    assert preempted([running("a", 7, 0, 1)], NEW, [], 7611) is None
