"""Which pods are evicted for another, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.objects import Pod
from fenka.cluster.pod_placement import PodEvaluator
from fenka.cluster.pod_preemption import PodPreemption
from fenka.cluster.queue_constraints import QueueConstraints
from fenka.cluster.state import ClusterState
from fenka.core.preemption import DisruptionBudget
from fenka.dialects import gpushare
from tests.builders import T4_MIB, a_node, a_pod, on_card
from tests.core.builders import device


def running(name: str, units: int, card: int, priority: int) -> Pod:
    """Return a pod on node n."""
    return a_pod(
        name, units, node="n", uid=name, priority=priority, annotations=on_card(card, units)
    )


def preempted(pods: list[Pod], new: Pod, victims: list[str], *sizes: int) -> list[str] | None:
    """Return the victims on a node with these cards."""
    world = ClusterState([a_node("n", *(sizes or (T4_MIB, T4_MIB)))], pods)
    known = {it.metadata.uid: it for it in pods}
    found = PodPreemption(world, "binpack").victims(new, "n", victims, known)
    return list(found.uids) if found else None


NEW = a_pod("new", 10, priority=100)


def test_victims_stay_when_they_are_enough() -> None:
    """They are kube-scheduler's choice."""
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
    """Neither as an additional victim nor as one that kube-scheduler has chosen."""
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


def test_victims_are_not_chosen_when_their_card_would_go_to_another() -> None:
    """Card 0 is reserved for an entry before it, and card 1's pod is as important."""
    pods = [running("low", 10, 0, 1), running("equal", 10, 1, 100)]
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], pods)
    constraints = QueueConstraints(reserved=frozenset({device(0, "n")}), nodes=frozenset({"n"}))
    preemption = PodPreemption(state, "binpack")
    assert preemption.victims(NEW, "n", [], {}, constraints) is None
    result = preemption.victims(NEW, "n", [], {})
    assert result is not None
    assert result.uids == ("low",)


def test_gang_is_evicted_whole_when_one_member_is_a_victim() -> None:
    """Half a gang would wait for the other half."""
    pods = [running("g1", 10, 0, 1), running("g2", 4, 1, 1), running("single", 14, 2, 2)]
    state = ClusterState([a_node("n", T4_MIB, T4_MIB, T4_MIB)], pods)
    preemption = PodPreemption(
        state,
        "binpack",
        gang_key=lambda pod: "g" if pod.metadata.name.startswith("g") else None,
    )
    new = a_pod("new", 14, priority=2)
    result = preemption.victims(new, "n", [], {})
    assert result is not None
    assert set(result.uids) == {"g1", "g2"}


@pytest.mark.parametrize(("allowed", "expected", "violations"), [(1, "a", 0), (0, "b", 0)])
def test_pod_without_a_budget_is_evicted_when_the_others_allows_nothing(
    allowed: int, expected: str, violations: int
) -> None:
    """a has the lower priority, so it goes if its budget allows that."""
    pods = [running("a", 14, 0, 1), running("b", 14, 1, 2)]
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], pods)
    budgets = {"a": frozenset({DisruptionBudget("default/x", allowed)})}
    preemption = PodPreemption(
        state, "binpack", budgets=lambda pod: budgets.get(pod.metadata.uid, frozenset())
    )
    result = preemption.victims(NEW, "n", [], {})
    assert result is not None
    assert (result.uids, result.violations) == ((expected,), violations)


@given(
    residents=st.lists(
        st.tuples(st.integers(1, 14), st.integers(0, 2), st.integers(0, 3)), max_size=6
    ),
    new=st.tuples(st.integers(1, 14), st.sampled_from([1, 1, 2]), st.integers(1, 3)),
    data=st.data(),
)
def test_pod_fits_when_its_victims_are_gone(
    residents: list[tuple[int, int, int]], new: tuple[int, int, int], data: st.DataObject
) -> None:
    """And not before; nobody as important goes; without a result no allowed set of pods would do."""
    state = ClusterState([a_node("n", T4_MIB, T4_MIB, 7611)])
    judge, pods = PodEvaluator(state, "binpack"), dict[str, Pod]()
    for number, (units, card, priority) in enumerate(residents):
        pod = running(f"p{number}", units, card, priority)
        if state.card_usage("n", device(card, "n")).memory_mib < (15079, 15079, 7611)[card]:
            pods[pod.metadata.uid] = pod
            state.set_pod(pod)
    units, cards, priority = new
    labels = {gpushare.COUNT: str(cards)} if cards > 1 else {}
    pod = a_pod("new", units * cards, priority=priority, labels=labels)
    lower = [uid for uid, it in pods.items() if (it.spec.priority or 0) < priority]
    chosen = data.draw(st.lists(st.sampled_from(lower), unique=True)) if lower else []
    result = PodPreemption(state, "binpack").victims(pod, "n", chosen, pods)
    if result is not None:
        assert set(chosen) <= set(result.uids) <= set(lower)
        assert len(set(result.uids)) == len(result.uids)
    for uid in lower if result is None else result.uids:
        state.forget_pod(uid)
    assert (judge.filter(pod, ["n"]).fitting == ["n"]) == (result is not None)
