"""Which pods are evicted for another, as tables."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.objects import BACKFILL_CLASS, Pod
from fenka.cluster.placement import HeldPlacement, PodEvaluator, QueueConstraints
from fenka.cluster.pod_preemption import PodPreemption
from fenka.cluster.state import ClusterState
from fenka.core.preemption import DisruptionBudget
from fenka.core.request import Placement, Slice
from fenka.core.usage import UsageOverlay
from fenka.dialects import ack, gpushare
from fenka.dialects.base import NVIDIA_GPU
from fenka.dialects.lease_records import REPORT, LeaseReport, Lingering, encode_report
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


def of_class(pod: Pod, name: str) -> Pod:
    """Return the pod, of this PriorityClass."""
    pod.spec.priority_class_name = name
    return pod


@pytest.mark.parametrize(
    ("backfill", "chosen", "victims"),
    [
        ({"a", "b"}, ["a"], ["a", "b"]),
        ({"b"}, ["a"], None),
        ({"b"}, [], None),
        ({"a", "b"}, ["unknown"], None),
        ({"c"}, [], ["c"]),
    ],
)
def test_only_backfill_is_evicted_when_the_preemptors_class_is_bounded(
    backfill: set[str], chosen: list[str], victims: list[str] | None
) -> None:
    """Another team's pod of lower priority stays, neither chosen by kube-scheduler nor added by fenka."""
    pods = [running("a", 7, 0, -1000), running("b", 7, 0, -1000), running("c", 10, 1, 0)]
    pods = [of_class(pod, BACKFILL_CLASS if pod.metadata.uid in backfill else "") for pod in pods]
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], pods)
    known = {pod.metadata.uid: pod for pod in pods}
    bounded = PodPreemption(state, "binpack", backfill_only=["serving"])
    new = of_class(a_pod("new", 10, priority=1000), "serving")
    result = bounded.victims(new, "n", chosen, known)
    assert (list(result.uids) if result else None) == victims
    other = of_class(a_pod("new", 10, priority=1000), "important")
    assert bounded.victims(other, "n", chosen, known) is not None


def test_backfill_stays_when_its_gang_has_a_member_that_may_not_be_evicted() -> None:
    """A gang is evicted whole, or not."""
    pods = [
        of_class(running("a", 10, 0, -1000), BACKFILL_CLASS),
        of_class(running("b", 10, 1, -1000), "other"),
    ]
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], pods)
    new = of_class(a_pod("new", 10, priority=1000), "serving")
    together = PodPreemption(state, "binpack", gang_key=lambda _: "g", backfill_only=["serving"])
    assert together.victims(new, "n", [], {}) is None
    alone = PodPreemption(state, "binpack", backfill_only=["serving"])
    result = alone.victims(new, "n", [], {})
    assert result is not None
    assert result.uids == ("a",)


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


@pytest.mark.parametrize(("priority", "expected"), [(1, ["g1", "g2"]), (2, None)])
def test_rest_of_a_gang_is_evicted_when_kube_scheduler_has_chosen_a_member(
    priority: int, expected: list[str] | None
) -> None:
    """g1 is enough for 10 units; it stays if the other member may not be evicted."""
    pods = [running("g1", 10, 0, 1), running("g2", 4, 1, priority), running("other", 4, 1, 1)]
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], pods)
    preemption = PodPreemption(
        state, "binpack", gang_key=lambda pod: "g" if pod.metadata.name.startswith("g") else None
    )
    known = {it.metadata.uid: it for it in pods}
    result = preemption.victims(a_pod("new", 14, priority=2), "n", ["g1"], known)
    assert (list(result.uids) if result else None) == expected


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


def protected(*names: str, allowed: int) -> Callable[[Pod], frozenset[DisruptionBudget]]:
    """Return the budgets of pods: those with these names have one in common."""
    shared = frozenset({DisruptionBudget("default/x", allowed)})
    return lambda pod: shared if pod.metadata.name in names else frozenset()


@pytest.mark.parametrize(
    ("allowed", "expected", "violations"),
    [
        # both may go
        (2, ("a", "b"), 0),
        # a's end uses the budget up: c goes, although it is more important than b
        (1, ("a", "c"), 0),
        # kube-scheduler counts a's violation itself
        (0, ("a", "c"), 0),
    ],
)
def test_budget_counts_the_victims_that_kube_scheduler_has_chosen(
    allowed: int, expected: tuple[str, ...], violations: int
) -> None:
    """9 units are requested of 14: without a and b, or without a and c, 14 - 5 = 9 are free."""
    pods = [running("a", 4, 0, 1), running("b", 5, 0, 1), running("c", 5, 0, 2)]
    state = ClusterState([a_node("n", T4_MIB)], pods)
    preemption = PodPreemption(state, "binpack", budgets=protected("a", "b", allowed=allowed))
    known = {it.metadata.uid: it for it in pods}
    result = preemption.victims(a_pod("new", 9, priority=100), "n", ["a"], known)
    assert result is not None
    assert (result.uids, result.violations) == (expected, violations)


def test_violation_is_counted_when_no_other_victim_makes_room() -> None:
    """Both pods of the card must go, and the budget allows one."""
    pods = [running("a", 7, 0, 1), running("b", 7, 0, 1)]
    state = ClusterState([a_node("n", T4_MIB)], pods)
    preemption = PodPreemption(state, "binpack", budgets=protected("a", "b", allowed=1))
    known = {it.metadata.uid: it for it in pods}
    new = a_pod("new", 14, priority=100)
    for chosen in ([], ["a"]):
        result = preemption.victims(new, "n", chosen, known)
        assert result is not None
        assert (set(result.uids), result.violations) == ({"a", "b"}, 1)


def test_pod_counts_once_against_its_budget_when_it_holds_a_whole_card_and_a_slice() -> None:
    """Its node reports two placements of it; it is evicted once."""
    slices = (Slice(0, device(0, "n"), T4_MIB, 100), Slice(1, device(1, "n"), 10770, 10))
    annotations = {REPORT: encode_report(LeaseReport({"a": slices}))}
    pod = running("a", 14, 0, 1)
    state = ClusterState([a_node("n", T4_MIB, T4_MIB, annotations=annotations)], [pod])
    preemption = PodPreemption(state, "binpack", budgets=protected("a", allowed=1))
    result = preemption.victims(NEW, "n", [], {"a": pod})
    assert result is not None
    assert (result.uids, result.violations) == (("a",), 0)


def test_victims_make_room_beside_what_is_reserved_for_gangs() -> None:
    """The gang's 6 of card 0 stay: 14 - 6 = 8 < 10, so card 1's pod goes although it is more important."""
    pods = [running("low", 8, 0, 1), running("high", 10, 1, 2)]
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], pods)
    view = UsageOverlay(state)
    view.add(Placement("n", (Slice(0, device(0, "n"), 6462, 0),)))
    with_gang = PodPreemption(state, "binpack", view).victims(NEW, "n", [], {})
    without = PodPreemption(state, "binpack").victims(NEW, "n", [], {})
    assert with_gang is not None
    assert without is not None
    assert (with_gang.uids, without.uids) == (("high",), ("low",))


def test_chosen_victim_stays_one_when_it_is_not_known_any_more() -> None:
    """It has ended meanwhile: kube-scheduler's eviction of it does nothing."""
    pods = [running("a", 10, 0, 1)]
    state = ClusterState([a_node("n", T4_MIB)], pods)
    result = PodPreemption(state, "binpack").victims(NEW, "n", ["gone"], {"a": pods[0]})
    assert result is not None
    assert result.uids == ("gone", "a")


@pytest.mark.parametrize("priority", [99, 100, 101])
def test_nothing_is_evicted_when_a_chosen_victim_is_as_important(priority: int) -> None:
    """An answer that kube-scheduler would not have given itself is not given to others."""
    pods = [running("a", 10, 0, priority), running("b", 10, 1, 1)]
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], pods)
    known = {it.metadata.uid: it for it in pods}
    result = PodPreemption(state, "binpack").victims(NEW, "n", ["a"], known)
    assert (result is None) is (priority >= 100)


@given(
    residents=st.lists(
        st.tuples(
            st.integers(1, 7), st.integers(0, 1), st.integers(0, 2), st.sets(st.sampled_from("xy"))
        ),
        max_size=6,
    ),
    allowed=st.fixed_dictionaries({"x": st.integers(0, 2), "y": st.integers(0, 2)}),
    wanted=st.integers(1, 14),
    data=st.data(),
)
def test_budgets_never_go_below_zero_without_being_counted(
    residents: list[tuple[int, int, int, set[str]]],
    allowed: dict[str, int],
    wanted: int,
    data: st.DataObject,
) -> None:
    """Violations are the evictions for which a budget had none left, kube-scheduler's victims first."""
    pods, left = dict[str, Pod](), {0: 14, 1: 14}
    budgets: dict[str, frozenset[DisruptionBudget]] = {}
    for number, (units, card, priority, names) in enumerate(residents):
        if units <= left[card]:
            left[card] -= units
            uid = f"p{number}"
            pods[uid] = running(uid, units, card, priority)
            budgets[uid] = frozenset(DisruptionBudget(name, allowed[name]) for name in names)
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], pods.values())
    chosen = data.draw(st.lists(st.sampled_from(sorted(pods)), unique=True)) if pods else []
    preemption = PodPreemption(state, "binpack", budgets=lambda pod: budgets[pod.metadata.uid])
    result = preemption.victims(a_pod("new", wanted, priority=100), "n", chosen, pods)
    assert result is not None
    remaining = dict(allowed)
    for uid in chosen:
        for budget in budgets[uid]:
            remaining[budget.name] -= 1
    added = [uid for uid in result.uids if uid not in chosen]
    if result.violations == 0:
        for uid in added:
            assert all(remaining[budget.name] > 0 for budget in budgets[uid])
            for budget in budgets[uid]:
                remaining[budget.name] -= 1
    assert result.violations <= len(added)
