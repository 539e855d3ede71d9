"""Which pods are evicted for another, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.objects import Pod
from fenka.cluster.pod_placement import PodEvaluator
from fenka.cluster.pod_preemption import PodPreemption
from fenka.cluster.queue_constraints import HeldPlacement, QueueConstraints
from fenka.cluster.state import ClusterState
from fenka.core.preemption import DisruptionBudget
from fenka.core.request import Placement, Slice
from fenka.dialects import ack, gpushare
from fenka.dialects.base import NVIDIA_GPU
from fenka.dialects.leases import REPORT, LeaseReport, Lingering, encode_report
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


def test_victims_are_of_the_other_card_when_one_is_reserved() -> None:
    """Only the reserved card is closed; what kube-scheduler has chosen on it is no further candidate."""
    pods = [running("low", 10, 0, 1), running("high", 10, 1, 2)]
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], pods)
    constraints = QueueConstraints(reserved=frozenset({device(0, "n")}), nodes=frozenset({"n"}))
    known = {it.metadata.uid: it for it in pods}
    for chosen in ([], ["low"]):
        result = PodPreemption(state, "binpack").victims(NEW, "n", chosen, known, constraints)
        assert result is not None
        assert result.uids == (*chosen, "high")


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


def asking(priority: int = 100, **limits: str) -> Pod:
    """Return a pod with these limits: mem, core, gpu."""
    names = {"mem": gpushare.MEMORY, "core": ack.CORE, "gpu": NVIDIA_GPU}
    pod = a_pod("new", 0, priority=priority)
    pod.spec.containers[0].resources.limits = {names[key]: text for key, text in limits.items()}
    return pod


SHARING = {"gpushare": "true"}
CONTRADICTION = {"gpushare": "true", "cgpu": "false"}
MEMORY_ONLY = {"ack.node.gpu.schedule": "cgpu"}


@pytest.mark.parametrize(
    ("new", "sizes", "labels", "expected"),
    [
        # a pod without cards: kube-scheduler's choice is enough
        (asking(), (T4_MIB,), SHARING, ("a",)),
        (asking(), (), {}, ("a",)),
        # whole cards of a node that does not share: the kubelet chooses them
        (asking(gpu="1"), (), {}, ("a",)),
        # slices of a node that does not share, or that admits nothing new
        (asking(mem="4"), (), {}, None),
        (asking(mem="4"), (T4_MIB,), CONTRADICTION, None),
        # a request that cannot be read
        (asking(mem="four"), (T4_MIB,), SHARING, None),
        (asking(mem="4", core="7"), (T4_MIB,), SHARING, None),
        # two dialects at once
        (asking(mem="4", gpu="1"), (T4_MIB,), SHARING, None),
        # the node's mode shares memory alone: evicting pods does not change that
        (asking(mem="4", core="10"), (T4_MIB,), MEMORY_ONLY, None),
        (asking(mem="4"), (T4_MIB,), MEMORY_ONLY, ("a",)),
    ],
)
def test_nothing_is_evicted_when_the_node_can_never_hold_the_pod(
    new: Pod, sizes: tuple[int, ...], labels: dict[str, str], expected: tuple[str, ...] | None
) -> None:
    """kube-scheduler has chosen pod a, which holds the only card."""
    pods = [running("a", 14, 0, 1)]
    state = ClusterState([a_node("n", *sizes, labels=labels)], pods)
    result = PodPreemption(state, "binpack").victims(new, "n", ["a"], {"a": pods[0]})
    assert (result.uids if result else None) == expected


@pytest.mark.parametrize(
    ("priority", "expected"), [(None, None), (0, None), (-1, None), (1, ("a",))]
)
def test_pod_without_a_priority_counts_as_0(
    priority: int | None, expected: tuple[str, ...] | None
) -> None:
    """A new pod of priority 0 or less evicts none of priority 0."""
    pod = a_pod("a", 14, node="n", uid="a", annotations=on_card(0, 14))
    state = ClusterState([a_node("n", T4_MIB)], [pod])
    result = PodPreemption(state, "binpack").victims(
        a_pod("new", 10, priority=priority), "n", [], {"a": pod}
    )
    assert (result.uids if result else None) == expected


def test_victims_are_of_another_card_when_an_entry_holds_the_first() -> None:
    """The entry before it gets 10 of card 0's 14 units once they are free: 14 - 10 = 4 < 10."""
    pods = [running("low", 10, 0, 1), running("high", 10, 1, 2)]
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], pods)
    held = Placement("n", (Slice(0, device(0, "n"), 10770, 0),))
    constraints = QueueConstraints(
        held={"n": (HeldPlacement("before", held),)}, nodes=frozenset({"n"})
    )
    result = PodPreemption(state, "binpack").victims(NEW, "n", [], {}, constraints)
    assert result is not None
    assert result.uids == ("high",)


@pytest.mark.parametrize(("units", "expected"), [(10, None), (4, ())])
def test_pod_that_is_gone_makes_no_room_when_its_node_still_holds_its_slice(
    units: int, expected: tuple[str, ...] | None
) -> None:
    """The API server has no such pod to evict: 14 - 10 = 4 units are left."""
    report = LeaseReport(
        lingering={"gone": Lingering("team/gone", (Slice(0, device(0, "n"), 10770, 0),))}
    )
    node = a_node("n", T4_MIB, annotations={REPORT: encode_report(report)})
    preemption = PodPreemption(ClusterState([node]), "binpack")
    result = preemption.victims(a_pod("new", units, priority=100), "n", [], {})
    assert (result.uids if result else None) == expected


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
