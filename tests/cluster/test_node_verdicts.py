"""Verdicts on nodes: whole cards by counting, shared cards as the scheduler places, hints by trying."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.explain import ADD_CARDS, CHANGE_REQUEST, MAX_HINTS, NodeVerdicts, explain_nodes
from fenka.cluster.node_admission import ineligibility_reasons
from fenka.cluster.objects import Node, Pod
from fenka.cluster.placement import Feasible, PodEvaluator
from fenka.cluster.state import ClusterSnapshot
from fenka.core.inventory import Card, DeviceId
from fenka.dialects.base import CARDS
from fenka.dialects.nodes import decode_node, encode_inventory
from tests.builders import GIB, T4_MIB, Json, node, on_card, pod, sharing, units

GPU = "nvidia.com/gpu"


def explained(asked: Json, nodes: list[Json], pods: Sequence[Json] = ()) -> NodeVerdicts:
    """Return the verdicts on these nodes, on which these pods are."""
    return explain_nodes(msgspec.convert(asked, Pod), snapshot(nodes, pods))


def snapshot(nodes: list[Json], pods: Sequence[Json]) -> ClusterSnapshot:
    """Return the cluster."""
    return ClusterSnapshot.of(
        [msgspec.convert(it, Node) for it in nodes], [msgspec.convert(it, Pod) for it in pods]
    )


def whole(name: str, cards: int, **given: Any) -> Json:
    """Return a node that gives whole cards only."""
    return node(name, resources={GPU: cards}, **given)


def holder(name: str, cards: int, on: str) -> Json:
    """Return a pod that runs with whole cards."""
    return pod(name, {GPU: cards}, node=on)


# ---- whole cards ----


@pytest.mark.parametrize(
    ("asked", "held", "reasons"),
    [
        # 4 - 1 - 1 = 2 are free
        (2, [1, 1], []),
        (3, [1, 1], ["whole cards: 3 asked, 2 of 4 free"]),
        (4, [], []),
        (5, [], ["whole cards: 5 asked, 4 of 4 free"]),
        (1, [4], ["whole cards: 1 asked, 0 of 4 free"]),
        # a card has failed since: fewer are offered than held, none is free
        (1, [4, 2], ["whole cards: 1 asked, 0 of 4 free"]),
    ],
)
def test_whole_cards_are_free_when_no_pod_holds_them(
    asked: int, held: list[int], reasons: list[str]
) -> None:
    """The node offers four."""
    pods = [holder(f"h{number}", count, "a") for number, count in enumerate(held)]
    (verdict,) = explained(pod("p", {GPU: asked}), [whole("a", 4)], pods).nodes
    assert (verdict.fits, verdict.gpu, verdict.reasons) == (not reasons, True, reasons)


@pytest.mark.parametrize(
    ("asked", "held", "hints"),
    [
        # 4 - 3 = 1 is free: 3 need two more, which only the first gives
        (3, [2, 1], ["it starts when default/h0 ends (2 whole cards of a)"]),
        # each of both gives one: the one of less comes first
        (
            2,
            [2, 1],
            [
                "it starts when default/h1 ends (1 whole cards of a)",
                "it starts when default/h0 ends (2 whole cards of a)",
            ],
        ),
        # both together would make room, none alone does
        (4, [2, 2], []),
        # it fits already
        (1, [2, 1], []),
        (5, [2], [CHANGE_REQUEST, ADD_CARDS]),
    ],
)
def test_hints_name_pods_whose_end_alone_frees_enough_whole_cards(
    asked: int, held: list[int], hints: list[str]
) -> None:
    """The node offers four."""
    pods = [holder(f"h{number}", count, "a") for number, count in enumerate(held)]
    found = explained(pod("p", {GPU: asked}), [whole("a", 4)], pods)
    assert found.hints == hints
    assert ("more than 4 cards to give whole" in found.never) == (asked > 4)


def test_hints_are_few_when_many_pods_would_make_room() -> None:
    """The smallest of all nodes come first."""
    nodes = [whole("a", 3), whole("b", 3)]
    pods = [holder(f"{on}{n}", 1, on) for on in "ba" for n in range(3)]
    hints = explained(pod("p", {GPU: 1}), nodes, pods).hints
    assert hints == [f"it starts when default/a{n} ends (1 whole cards of a)" for n in range(3)]
    assert len(hints) == MAX_HINTS


@given(
    offered=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    held=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=5),
    asked=st.integers(1, 5),
)
def test_whole_card_verdicts_are_those_of_counting(
    offered: list[int], held: list[tuple[int, int]], asked: int
) -> None:
    """A node fits exactly if it has as many left; a pod is a hint exactly if its end changes that."""
    nodes = [whole(f"n{number}", count) for number, count in enumerate(offered)]
    held = [(at % len(offered), count) for at, count in held]
    pods = [holder(f"h{i}", count, f"n{at}") for i, (at, count) in enumerate(held)]
    verdicts = explained(pod("p", {GPU: asked}), nodes, pods)
    left = [
        total - sum(count for at, count in held if at == number)
        for number, total in enumerate(offered)
    ]
    assert [it.fits for it in verdicts.nodes] == [0 < asked <= free for free in left]
    assert [it.gpu for it in verdicts.nodes] == [total > 0 for total in offered]
    if asked > max(offered):
        assert verdicts.hints == [CHANGE_REQUEST, ADD_CARDS]
        return
    helpful = {
        f"it starts when default/h{i} ends ({count} whole cards of n{at})"
        for i, (at, count) in enumerate(held)
        if left[at] < asked <= left[at] + count
    }
    assert len(verdicts.hints) == min(len(helpful), MAX_HINTS)
    assert helpful.issuperset(verdicts.hints)


# ---- which kind of cards ----

BOTH = {"gpushare": "true", "fenka.io/whole-cards": "true"}


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        # such a node shares its cards too: whole ones are placed like slices
        (BOTH, "card 0: in use"),
        # it gives no whole cards: the kubelet offers none
        ({"gpushare": "true"}, f"offers no {GPU}"),
        # labels that contradict each other give nothing
        ({**BOTH, "cgpu": "false"}, f"offers no {GPU}"),
    ],
)
def test_whole_cards_are_placed_like_slices_when_a_node_gives_both(
    labels: dict[str, str], reason: str
) -> None:
    """Whether the nodes do, is decided by all labels together."""
    nodes = [sharing("a", labels=labels)]
    small = pod("small", units(1), node="a", annotations=on_card(0, 1))
    (verdict,) = explained(pod("p", {GPU: 1}), nodes, [small]).nodes
    assert verdict.reasons == [reason]


# ---- shared cards ----


@pytest.mark.parametrize(
    ("limit", "present", "reasons"),
    [
        (3, 2, []),
        (2, 2, ["has 2 of 2 pods"]),
        (1, 2, ["has 2 of 1 pods"]),
        # a node that has not reported a limit
        (0, 2, []),
    ],
)
def test_node_is_full_when_it_has_as_many_pods_as_it_takes(
    limit: int, present: int, reasons: list[str]
) -> None:
    """Pods without a card count too."""
    pods = [pod(f"q{number}", node="a") for number in range(present)]
    nodes = [sharing("a", resources={"pods": limit})]
    (verdict,) = explained(pod("p", units(4)), nodes, pods).nodes
    assert verdict.reasons == reasons


def test_kubelets_count_is_the_reason_when_cards_fit_and_units_do_not() -> None:
    """Two pods whose records name no card are counted on the first; the kubelet counts 14 + 4 of 28."""
    pods = [
        pod("one", units(14), node="a", annotations=on_card(0, 14)),
        pod("two", units(4), node="a"),
    ]
    # 28 - 18 = 10 units by the kubelet, 14 by the second card.
    asked = pod("p", units(11))
    verdicts = explained(asked, [sharing("a", cards=2)], pods)
    (verdict,) = verdicts.nodes
    assert verdict.reasons == ["aliyun.com/gpu-mem: 11 asked, 10 of 28 free by the kubelet's count"]
    assert verdicts.sentence == ""
    assert verdicts.hints == [
        "it starts when default/two ends (4 units on card 0 of a)",
        "it starts when default/one ends (14 units on card 0 of a)",
    ]


@pytest.mark.parametrize(
    ("full", "sentence"),
    [
        (("a", "b"), "no GPU fits: 2 of 2 have too little memory"),
        # one node fits, or is excluded by something else than its cards
        (("a",), ""),
        ((), ""),
    ],
)
def test_sentence_counts_cards_when_the_cards_of_all_nodes_are_the_reason(
    full: tuple[str, ...], sentence: str
) -> None:
    """Nodes that do not share are not counted."""
    nodes = [sharing("a"), sharing("b"), node("cpu")]
    pods = [pod(f"on-{on}", units(12), node=on, annotations=on_card(0, 12)) for on in full]
    assert explained(pod("p", units(4)), nodes, pods).sentence == sentence


@pytest.mark.parametrize(
    ("cordoned", "taken", "reasons"),
    [
        ("", [12, 12], ["cards 0,1: too little memory (2 of 14 units free)"]),
        (
            "",
            [12, 11],
            [
                "card 0: too little memory (2 of 14 units free)",
                "card 1: too little memory (3 of 14 units free)",
            ],
        ),
        ("0", [0, 12], ["card 0: cordoned", "card 1: too little memory (2 of 14 units free)"]),
        ("0,1", [0, 0], ["cards 0,1: cordoned"]),
    ],
)
def test_cards_are_named_together_when_they_have_the_same_reason(
    cordoned: str, taken: list[int], reasons: list[str]
) -> None:
    """Four units are asked, of cards of 14."""
    node = sharing("a", cards=2, annotations={"fenka.io/cordoned": cordoned})
    pods = [
        pod(f"t{card}", units(count), node="a", annotations=on_card(card, count))
        for card, count in enumerate(taken)
        if count
    ]
    (verdict,) = explained(pod("p", units(4)), [node], pods).nodes
    assert verdict.reasons == reasons


def test_reason_counts_cards_when_too_few_of_a_node_fit() -> None:
    """Two of three cards have four units left: 14 - 12 = 2, 14, 14."""
    taken = pod("t", units(12), node="a", annotations=on_card(0, 12))
    asked = pod("p", units(12), labels={"aliyun.com/gpu-count": "3"})
    (verdict,) = explained(asked, [sharing("a", cards=3)], [taken]).nodes
    assert verdict.reasons == [
        "card 0: too little memory (2 of 14 units free)",
        "cards 1,2: without enough others beside it: 3 cards asked, 2 fit",
    ]


@settings(deadline=None)
@given(
    placed=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 14)), max_size=6),
    amount=st.integers(1, 14),
    cordoned=st.sampled_from(["", "0", "1", "0,1"]),
    unschedulable=st.booleans(),
)
def test_node_fits_exactly_when_the_scheduler_would_place_the_pod(
    placed: list[tuple[int, int]], amount: int, cordoned: str, unschedulable: bool
) -> None:
    """The verdict agrees with the evaluator, the node's own rules and the kubelet's sum of units.

    Trying what other pods' end would change leaves the cluster as it was.
    """
    annotations = {"fenka.io/cordoned": cordoned}
    nodes = [
        sharing("n0", cards=2, annotations=annotations),
        sharing("n1", cards=2, unschedulable=unschedulable),
    ]
    pods = [
        pod(f"h{i}", units(count), node=f"n{at // 2}", annotations=on_card(at % 2, count))
        for i, (at, count) in enumerate(placed)
    ]
    cluster, asked = snapshot(nodes, pods), msgspec.convert(pod("p", units(amount)), Pod)
    before = {name: cluster.state.allocations(name) for name in ("n0", "n1")}
    evaluator = PodEvaluator(cluster.state, "binpack")
    expected = {}
    for number, each in enumerate(cluster.nodes):
        ((name, verdict),) = evaluator.evaluate(asked, (each.metadata.name,))
        held = sum(count for at, count in placed if at // 2 == number)
        expected[name] = (
            isinstance(verdict, Feasible)
            and not ineligibility_reasons(asked, each)
            and held + amount <= 28
        )
    verdicts = explain_nodes(asked, cluster)
    assert {it.node: it.fits for it in verdicts.nodes} == expected
    assert all(it.fits == (not it.reasons) for it in verdicts.nodes)
    assert {name: cluster.state.allocations(name) for name in before} == before
    assert verdicts.hints


# ---- nodes that give nothing ----


@pytest.mark.parametrize(
    ("node_", "reason", "gpu"),
    [
        (node("a"), "shares no GPU (aliyun.com/gpu-mem is 0)", False),
        (
            node("a", labels={"gpushare": "true"}),
            "is labelled to share, but its kubelet offers no aliyun.com/gpu-mem: the node's events and "
            "the log of fenka's node pod there say why",
            False,
        ),
        (
            node("a", labels={"gpushare": "true", "cgpu": "false"}),
            "the labels gpushare=true and cgpu=false contradict each other: keep one of them",
            False,
        ),
        # cards whose node was taken out of sharing
        (
            sharing("a", labels={"gpushare": "false"}),
            "its label gpushare=false takes it out of sharing",
            True,
        ),
        # a mode that shares memory alone
        (
            sharing("a", labels={"ack.node.gpu.schedule": "cgpu"}),
            "its label ack.node.gpu.schedule=cgpu shares out memory alone, not compute",
            True,
        ),
    ],
)
def test_reason_is_the_nodes_own_when_it_gives_no_such_slices(
    node_: Json, reason: str, gpu: bool
) -> None:
    """The pod requests memory and compute; another node would do."""
    asked = pod("p", {**units(4), "aliyun.com/gpu-core.percentage": 10})
    other = sharing("b", resources={"aliyun.com/gpu-core.percentage": 100})
    first, second = explained(asked, [node_, other]).nodes
    (sentence,) = first.reasons
    assert reason in sentence
    assert (first.fits, first.gpu, second.fits) == (False, gpu, True)


@pytest.mark.parametrize(
    ("taken", "notes"),
    [
        # full is not overcommitted
        ([14], []),
        ([10, 4], []),
        ([10, 5], ["card 0 of a is overcommitted: 15360 of 14336 MiB"]),
    ],
)
def test_note_names_a_card_only_when_more_is_held_than_it_has(
    taken: list[int], notes: list[str]
) -> None:
    """15 units of 1,024 MiB are 15,360."""
    pods = [
        pod(f"h{number}", units(count), node="a", annotations=on_card(0, count))
        for number, count in enumerate(taken)
    ]
    assert explained(pod("p", units(1)), [sharing("a")], pods).notes == notes


def test_memory_of_no_lease_counts_as_taken_and_is_named() -> None:
    """A program of the host has 12 of 14 units: the pod goes to the other card, or the reason names it."""
    cards = [
        Card(index, DeviceId(f"GPU-{index}"), "Tesla T4", T4_MIB, unleased_mib=mib)
        for index, mib in enumerate((12288, 0))
    ]
    who = {cards[0].uuid: "12.0 GiB used by python, no lease"}
    inventory = encode_inventory(cards, GIB, who)
    host = sharing("a", cards=2, annotations={CARDS: inventory})
    (verdict,) = explained(pod("p", units(4)), [host], []).nodes
    assert verdict.fits
    taken = pod("t", units(12), node="a", annotations=on_card(1, 12))
    (verdict,) = explained(pod("p", units(4)), [host], [taken]).nodes
    assert verdict.reasons == [
        "cards 0,1: too little memory (2 of 14 units free)",
        "card 0: 12.0 GiB used by python, no lease",
    ]
    shared = decode_node("a", {CARDS: inventory}, {"aliyun.com/gpu-mem": "28"})
    assert shared
    assert list(shared.node.cards) == cards
