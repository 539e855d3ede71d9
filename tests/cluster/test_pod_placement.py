"""Where pods fit and which node is best, as tables."""

import pytest

from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Pod
from fenka.cluster.placement import PodEvaluator
from fenka.cluster.state import ClusterState
from tests.builders import GIB, T4_MIB, a_node, a_pod, on_card
from tests.core.builders import device
from tests.fakes.evaluators import ComparedEvaluator

UNITS_16 = 16 * GIB


def placed(world: ClusterState, judge: PodEvaluator, pod: Pod) -> str | None:
    """Schedule as kube-scheduler does, by scores alone, and bind: the node; None where nothing fits."""
    fitting = judge.filter(pod, [it.metadata.name for it in world.nodes()]).fitting
    if not fitting:
        return None
    name, best = max(judge.prioritize(pod, fitting), key=lambda it: it[1])
    assert best == 10
    placements = judge.placements(pod, name)
    assert not isinstance(placements, Infeasible)
    world.assume(pod, placements)
    return name


def cards(judge: PodEvaluator, pod: Pod, name: str = "n") -> list[int]:
    """The cards of a node on which the pod would be."""
    placements = judge.placements(pod, name)
    assert not isinstance(placements, Infeasible)
    return [piece.card for placement in placements for piece in placement.slices]


def held(world: ClusterState, node: str, card: int = 0) -> int:
    """MiB."""
    return world.card_usage(node, device(card, node)).memory_mib


def test_pods_are_packed_when_the_policy_is_binpack() -> None:
    """2; 8 and 8; 2; 5 GiB on two T4 of 14: 4 units are 15079 * 4 // 14 MiB."""
    world = ClusterState([a_node("04", T4_MIB), a_node("05", T4_MIB)])
    judge = ComparedEvaluator(world, "binpack")

    def units(node: str) -> float:
        return round(held(world, node) * 14 / T4_MIB)

    rows = [
        ([2], {2, 0}),
        ([8, 8], {10, 8}),
        ([2], {12, 8}),
        ([5], {12, 13}),
    ]
    for step, (sizes, after) in enumerate(rows):
        for number, size in enumerate(sizes):
            assert placed(world, judge, a_pod(f"binpack-{step}-{number}", size))
        assert {units("04"), units("05")} == after
    assert units("04") + units("05") == 25
    assert placed(world, judge, a_pod("too-much", 3)) is None


@pytest.mark.parametrize(
    ("held_units", "asked", "card"),
    [
        ((4, 8, 12, 0), 8, 1),
        ((4, 16, 12, 0), 12, 0),
        ((16, 16, 12, 0), 4, 2),
        ((0, 0, 0, 0), 4, 0),
    ],
)
def test_card_with_the_least_sufficient_memory_is_chosen(
    held_units: tuple[int, ...], asked: int, card: int
) -> None:
    """Ties go to the lowest index. 4 cards of 16."""
    pods = [
        a_pod(f"p{i}", units, node="n", annotations=on_card(i, units))
        for i, units in enumerate(held_units)
        if units
    ]
    judge = ComparedEvaluator(ClusterState([a_node("n", *[UNITS_16] * 4)], pods), "binpack")
    assert cards(judge, a_pod("new", asked)) == [card]


def test_nodes_policy_is_used_when_its_label_names_one() -> None:
    """spread takes the empty card where binpack would fill the other up."""
    for label, card in (("spread", 1), ("binpack", 0), ("nonsense", 0)):
        node = a_node("n", T4_MIB, T4_MIB, labels={"ack.node.gpu.placement": label})
        pod = a_pod("old", 4, node="n", annotations=on_card(0, 4))
        assert cards(
            ComparedEvaluator(ClusterState([node], [pod]), "binpack"), a_pod("new", 4)
        ) == [card]


def test_new_policy_is_used_when_the_label_changes() -> None:
    """Verdicts are cached, but not beyond a change."""
    world = ClusterState([a_node("n", T4_MIB, T4_MIB)])
    judge = ComparedEvaluator(world, "binpack")
    world.set_pod(a_pod("old", 4, node="n", annotations=on_card(0, 4)))
    assert cards(judge, a_pod("new", 4)) == [0]
    world.set_node(a_node("n", T4_MIB, T4_MIB, labels={"ack.node.gpu.placement": "spread"}))
    assert cards(judge, a_pod("new", 4)) == [1]


def test_each_node_has_its_reason_when_the_pod_does_not_fit() -> None:
    """gpushare's words if they are true; reasons that preemption cannot resolve are apart."""
    full = a_pod("full", 12, node="full", annotations=on_card(0, 12))
    world = ClusterState(
        [
            a_node("full", T4_MIB),
            a_node("small", 8 * GIB),
            a_node("plain"),
            a_node("leaving", T4_MIB, labels={"gpushare": "false"}),
            a_node("torn", T4_MIB, labels={"gpushare": "true", "cgpu": "false"}),
            a_node("broken", T4_MIB, annotations={"fenka.io/cards": "{"}),
            a_node("sick", T4_MIB),
            a_node("shut", T4_MIB, annotations={"fenka.io/cordoned": "0"}),
            a_node("good", T4_MIB),
        ],
        [full],
    )
    world.set_unhealthy("sick", frozenset({0}))
    names = [it.metadata.name for it in world.nodes()]
    found = ComparedEvaluator(world, "binpack").filter(a_pod("p", 10), [*names, "gone"])
    assert found.fitting == ["good"]
    assert found.failed == {
        "full": "Insufficient GPU Memory in one device: no GPU fits: 1 of 1 has too little memory"
    }
    expected = {
        "small": "Insufficient GPU Memory in one device: no GPU fits: 1 of 1 has too little memory",
        "plain": "The node plain is not for GPU share, need skip",
        "leaving": "its label gpushare=false takes it out of sharing",
        "sick": "no GPU fits: 1 of 1 is unhealthy",
        "shut": "no GPU fits: 1 of 1 is cordoned",
        "gone": 'node "gone" not found',
    }
    assert {name: found.unresolvable[name] for name in expected} == expected
    assert "contradict" in found.unresolvable["torn"]
    assert "fenka.io/cards" in found.unresolvable["broken"]


def test_every_node_fits_when_the_pod_requests_nothing() -> None:
    """Also with a limit of 0."""
    judge = ComparedEvaluator(ClusterState([a_node("n", T4_MIB), a_node("plain")]), "binpack")
    for pod in (a_pod("zero", 0), a_pod("none")):
        assert judge.filter(pod, ["n", "plain", "gone"]).fitting == ["n", "plain", "gone"]
        assert judge.prioritize(pod, ["n", "plain"]) == [("n", 0), ("plain", 0)]
        assert judge.placements(pod, "n") == ()


def test_every_node_is_unresolvable_when_the_request_is_invalid() -> None:
    """No eviction helps it."""
    judge = ComparedEvaluator(ClusterState([a_node("n", T4_MIB)]), "binpack")
    for pod, said in (
        (a_pod("p", "four"), "'four' is no quantity"),
        (a_pod("p", 5, labels={"aliyun.com/gpu-count": "2"}), "evenly over 2 cards"),
        (a_pod("p", 4, labels={"aliyun.com/gpu-count": "x"}), "not a number of cards"),
    ):
        found = judge.filter(pod, ["n"])
        assert said in found.unresolvable["n"]
        assert said in (judge.explain(pod) or "")


def test_pod_gets_several_cards_when_it_requests_them() -> None:
    """8 units over two cards: 4 on each, in both generations of annotations."""
    world = ClusterState([a_node("n", T4_MIB, T4_MIB, T4_MIB)])
    judge = ComparedEvaluator(world, "binpack")
    pod = a_pod("p", 8, labels={"aliyun.com/gpu-count": "2"})
    assert placed(world, judge, pod) == "n"
    assert [held(world, "n", i) for i in range(3)] == [4308, 4308, 0]
    found = judge.filter(a_pod("q", 24, labels={"aliyun.com/gpu-count": "2"}), ["n"])
    assert found.failed["n"].endswith(
        "2 of 3 have too little memory, 1 is without enough others beside it"
    )


def test_cards_are_counted_one_by_one_when_they_differ() -> None:
    """gpushare's defect (d): 14 + 7 units are not 2 of 10."""
    judge = ComparedEvaluator(ClusterState([a_node("n", T4_MIB, 7611)]), "binpack")
    assert cards(judge, a_pod("p", 12)) == [0]
    assert cards(judge, a_pod("p", 6)) == [1]
    assert judge.filter(a_pod("p", 15), ["n"]).fitting == []


def test_card_has_nothing_free_when_it_is_overcommitted() -> None:
    """gpushare's defect (a): 16 in all, 20 used, and a request of 100."""
    pods = [a_pod(f"p{i}", 10, node="n", annotations=on_card(0, 10)) for i in range(2)]
    judge = ComparedEvaluator(ClusterState([a_node("n", UNITS_16)], pods), "binpack")
    assert judge.filter(a_pod("p", 100), ["n"]).fitting == []
    assert judge.filter(a_pod("p", 1), ["n"]).fitting == []


def test_cards_are_gone_when_a_node_shrinks() -> None:
    """gpushare's defect (b): 4 cards become 2, with and without an inventory."""
    for inventory in (True, False):
        world = ClusterState([a_node("n", *[UNITS_16] * 4, inventory=inventory)])
        judge = ComparedEvaluator(world, "binpack")
        for index in range(2):
            world.set_pod(a_pod(f"p{index}", 16, node="n", annotations=on_card(index, 16)))
        assert judge.filter(a_pod("p", 4), ["n"]).fitting == ["n"]
        world.set_node(a_node("n", *[UNITS_16] * 2, inventory=inventory))
        assert judge.filter(a_pod("p", 4), ["n"]).fitting == []


def test_allocation_ends_when_a_pod_is_replaced_by_one_of_its_name() -> None:
    """gpushare's defect (f): force-deleted and made again under the same name; whatever comes first."""
    world = ClusterState([a_node("n", UNITS_16)])
    judge = ComparedEvaluator(world, "binpack")
    for turn in range(20):
        first = a_pod("web-0", 16, node="n", uid=f"a{turn}", annotations=on_card(0, 16))
        second = a_pod("web-0", 16, uid=f"b{turn}")
        world.set_pod(first)
        world.set_pod(second)
        assert judge.filter(second, ["n"]).fitting == []
        world.forget_pod(first.metadata.uid)
        assert judge.filter(second, ["n"]).fitting == ["n"]
        world.forget_pod(second.metadata.uid)


def test_best_node_scores_10_when_nodes_are_prioritized() -> None:
    """10 for the best alone, then 8 down to 0; equal nodes by name, whatever the order asked in."""
    world = ClusterState([a_node(name, T4_MIB) for name in "edcba"])
    judge = ComparedEvaluator(world, "binpack")
    world.set_pod(a_pod("p", 2, node="c", annotations=on_card(0, 2)))
    scores = dict(judge.prioritize(a_pod("new", 2), list("bedac")))
    assert scores == {"c": 10, "a": 8, "b": 5, "d": 2, "e": 0}
    assert judge.prioritize(a_pod("new", 2), ["a"]) == [("a", 10)]
    assert judge.prioritize(a_pod("new", 2), ["a", "b"]) == [("a", 10), ("b", 0)]


def test_emptiest_node_is_chosen_when_the_policy_is_spread() -> None:
    """The reverse."""
    world = ClusterState([a_node("a", T4_MIB), a_node("b", T4_MIB)])
    world.set_pod(a_pod("p", 2, node="a", annotations=on_card(0, 2)))
    assert placed(world, ComparedEvaluator(world, "spread"), a_pod("new", 2)) == "b"


def test_explanation_covers_all_nodes_when_none_fits() -> None:
    """For kube-scheduler's own refusals; with a hint only where nothing that is held is to blame."""
    world = ClusterState([a_node("a", T4_MIB), a_node("b", 7611)])
    judge = ComparedEvaluator(world, "binpack")
    assert judge.explain(a_pod("p", 4)) is None
    assert judge.explain(a_pod("p", 20)) == (
        "no GPU fits: 2 of 2 have too little memory; the largest card has 14 units, ask for no more"
    )
    world.set_pod(a_pod("old", 10, node="a", annotations=on_card(0, 10)))
    assert judge.explain(a_pod("p", 10)) == "no GPU fits: 2 of 2 have too little memory"
    world.set_node(a_node("c", 2 * T4_MIB))
    assert "the largest card has 29 units" in (judge.explain(a_pod("p", 30)) or "")
    assert ComparedEvaluator(ClusterState(), "binpack").explain(a_pod("p", 4)) == "there is no GPU"
