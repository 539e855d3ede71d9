"""Nodes that admit only the pods for which they were bought, until their pin ends."""

import json
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.autoscaling import (
    ENDING,
    ORDER,
    PIN,
    PLANNED,
    PLANNED_PODS,
    RECLAIMED,
    encode_planned_pods,
)
from fenka.cluster.compact import CompactNode
from fenka.cluster.explain import explain
from fenka.cluster.node_admission import exclusion, ineligibility_reasons
from fenka.cluster.node_pins import MAX_PIN_S, Pin, read_pin
from fenka.cluster.objects import Node
from fenka.cluster.state import ClusterSnapshot
from fenka.dialects.base import NVIDIA_GPU
from tests.builders import T4_MIB, Json, a_node, a_pod, gang_labels, node_json, on_card
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import make, pending

SENTENCE = (
    "the node was bought for other pods (order t4-17), which alone may use it for 60 s after it "
    "first offers its cards"
)


def bought(
    name: str,
    *uids: str,
    cards: int = 1,
    order: str = "t4-17",
    on: Sequence[tuple[int, ...]] = (),
    **rest: Any,
) -> Json:
    """Return a node of T4s that was bought for these pods. on: the cards of each, by default any."""
    annotations = {PIN: "60", PLANNED_PODS: encode_planned_pods(uids, on)}
    sizes = [T4_MIB] * cards
    return node_json(name, *sizes, labels={ORDER: order}, annotations=annotations, **rest)


def free(name: str, cards: int = 1) -> Json:
    """Return a node of T4s that anybody may use."""
    return node_json(name, *[T4_MIB] * cards)


# ---- whom a node admits ----


def test_node_admits_only_its_planned_pods_when_it_was_bought_for_them() -> None:
    """The first pod that asks would otherwise take the place of one that fits nowhere else."""
    cluster = ExtenderHarness([bought("n", "mine")])
    mine, other = make("mine", 4), make("other", 4)
    cluster.set(mine, other)
    assert cluster.ask(other) == {"n": SENTENCE}
    assert cluster.filter(mine) == ["n"]
    assert cluster.start(mine) == "n/0"


def test_binding_is_refused_when_the_node_was_bought_for_other_pods() -> None:
    """The node may have been labelled after `filter`."""
    cluster = ExtenderHarness([free("n")])
    other = cluster.put(make("other", 4))
    assert cluster.filter(other) == ["n"]
    cluster.state.set_node(msgspec.convert(bought("n", "mine"), Node))
    assert cluster.bind(other, "n") == SENTENCE


def test_tenant_gains_nothing_when_he_writes_the_annotation_of_planned_pods() -> None:
    """Only the node says which pods are planned."""
    cluster = ExtenderHarness([bought("n", "mine")])
    claim = {PLANNED: json.dumps({"order": "t4-17", "slot": 0})}
    assert cluster.ask(cluster.put(make("thief", 4, annotations=claim))) == {"n": SENTENCE}


def test_planned_pod_goes_to_its_node_and_nowhere_else_when_that_has_room() -> None:
    """A fuller node would be the better one, but other pods may be planned with that room."""
    cluster = ExtenderHarness([free("a"), bought("n", "mine"), free("z")])
    cluster.holds("h", 0, 8, node="a")
    mine = cluster.put(make("mine", 4))
    assert cluster.filter(mine) == ["n"]
    assert cluster.extender.filter(mine, ["a", "n", "z"]).failed == dict.fromkeys(
        "az", "the pod is planned for the node n"
    )
    assert cluster.filter(make("other", 4)) == ["a", "z"]


@pytest.mark.parametrize("why", ["no room", "not offered", "gone", "no cards yet"])
def test_planned_pod_goes_elsewhere_when_its_node_cannot_have_it(why: str) -> None:
    """A plan is no promise; room elsewhere may be used."""
    cluster = ExtenderHarness([free("a"), bought("n", "mine")])
    mine = cluster.put(make("mine", 4))
    names = ["a", "n"]
    match why:
        case "no room":
            cluster.holds("h", 0, 12, node="n")
        case "not offered":
            names = ["a"]
        case "gone":
            cluster.state.forget_node("n")
        case _:
            document = bought("n", "mine", inventory=False)
            document["status"]["allocatable"] = {}
            cluster.state.set_node(msgspec.convert(document, Node))
    assert cluster.filter(mine, *names) == ["a"]


def test_planned_pods_have_their_own_nodes_when_several_were_bought() -> None:
    """Each pod fits both nodes; the plan decides."""
    cluster = ExtenderHarness([bought("m", "p"), bought("n", "q")])
    p, q = make("p", 4), make("q", 4)
    cluster.set(p, q)
    assert cluster.filter(q) == ["n"]
    assert cluster.filter(p) == ["m"]


def test_planned_pods_fit_together_when_each_goes_to_its_planned_cards() -> None:
    """By best fit the pods of 4 could both join the one of 6, and leave out another one of 6."""
    sizes = {"a": 8, "b": 4, "c": 6, "d": 6, "e": 4}
    node = bought("n", *sizes, cards=2, on=[(0,), (1,), (0,), (1,), (1,)])
    for order in permutations(sizes):
        cluster = ExtenderHarness([node])
        cluster.set(*(pending(name, units) for name, units in sizes.items()))
        placed = [cluster.start(cluster.pods[name]) for name in order]
        assert sorted(placed) == ["n/0"] * 2 + ["n/1"] * 3


def test_planned_pod_takes_another_card_when_the_planned_one_is_not_free() -> None:
    """The plan was for a node without other pods."""
    cluster = ExtenderHarness([bought("n", "mine", cards=2, on=[(0,)])])
    cluster.holds("h", 0, 12)
    assert cluster.start(cluster.put(make("mine", 4))) == "n/1"


def test_gang_is_placed_on_its_planned_cards() -> None:
    """Otherwise the pod of 12 would be left out."""
    cluster = ExtenderHarness([bought("n", "x", "g-0", "g-1", cards=2, on=[(0,), (1,), (1,)])])
    cluster.set(pending("x", 12))
    for pod in cluster.gang("g", 2, 6):
        assert cluster.filter(pod) == ["n"]
        placement = cluster.gangs.planned_placement(pod, "n")
        assert placement is not None
        assert [piece.card for piece in placement.slices] == [1]


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 14), min_size=1, max_size=6),
    st.lists(st.sets(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    st.sampled_from([(), (1,), (0, 1), (7,)]),
)
def test_evaluators_agree_when_nodes_are_pinned(
    sizes: list[int], planned: list[set[int]], on: tuple[int, ...]
) -> None:
    """The harness compares the columnar evaluator with the definition at each call."""
    # The autoscaler plans a pod for one node. For a pod of two nodes the evaluators' scores differ.
    once = [numbers - set().union(*planned[:place]) for place, numbers in enumerate(planned)]
    nodes = [
        bought(name, *(f"p{number}" for number in numbers), order=name, cards=2, on=[on] * 3)
        if numbers
        else free(name, 2)
        for name, numbers in zip("abcd", once, strict=False)
    ]
    cluster = ExtenderHarness(nodes)
    for number, units in enumerate(sizes):
        pod = cluster.put(make(f"p{number}", units))
        fitting = cluster.evaluator.filter(pod, cluster.names).fitting
        cluster.evaluator.explain(pod)
        ranked = cluster.evaluator.ranked(pod, cluster.names)
        cluster.evaluator.prioritize(pod, cluster.names)
        assert set(fitting) == set(ranked)
        for name in fitting:
            assert exclusion(cluster.state, name, pod) is None
        if fitting:
            cluster.bind(pod, ranked[0])


def test_whole_cards_go_to_their_node_when_it_does_not_share() -> None:
    """The kubelet chooses the card, but not the pod."""
    offers = {"status": {"allocatable": {NVIDIA_GPU: "1"}}}
    bought_whole = bought("n", "mine", inventory=False) | offers
    cluster = ExtenderHarness([bought_whole, node_json("a", inventory=False) | offers])
    mine, other = (
        make(name, 0, spec={"containers": [{"resources": {"limits": {NVIDIA_GPU: "1"}}}]})
        for name in ("mine", "other")
    )
    cluster.set(mine, other)
    assert cluster.filter(mine) == ["n"]
    assert cluster.filter(other) == ["a"]
    assert cluster.extender.filter(other, ["n"]).unresolvable == {"n": SENTENCE}
    assert cluster.extender.preempt(other, {"n": ["someone"]}, {}) == {}


# ---- the queue, gangs, preemption ----


def test_queue_keeps_no_room_of_a_bought_node_for_earlier_pods() -> None:
    """They would block the pod for which it was bought."""
    cluster = ExtenderHarness([bought("n", "mine")])
    first, mine = pending("first", 10), pending("mine", 10, 5)
    assert cluster.wait(first) == [{"n": SENTENCE}]
    cluster.set(mine)
    assert [it.pending.name for it in cluster.queue.refreshed().entries()] == ["mine"]
    assert cluster.filter(mine) == ["n"]
    cluster.state.end_pin("n")
    cluster.now += 1
    entries = cluster.queue.refreshed().entries()
    assert [(it.pending.name, bool(it.placements)) for it in entries] == [
        ("first", True),
        ("mine", False),
    ]


def test_queue_places_a_planned_pod_on_its_node_when_that_has_room() -> None:
    """The room that it would otherwise hold elsewhere is left to others."""
    cluster = ExtenderHarness([free("a"), bought("n", "mine")])
    cluster.set(pending("mine", 10), pending("other", 10, 5))
    entries = cluster.queue.refreshed().entries()
    assert [(it.pending.name, it.placements[0].node) for it in entries] == [
        ("mine", "n"),
        ("other", "a"),
    ]
    cluster.holds("h", 0, 10, node="n")
    cluster.now += 1
    entries = cluster.queue.refreshed().entries()
    assert [it.placements[0].node for it in entries if it.placements] == ["a"]


def test_gang_is_placed_as_planned_when_a_node_was_bought_for_each_member() -> None:
    """Together on one node they would take the place of another planned pod."""
    cluster = ExtenderHarness(
        [bought("m", "g-0", "x"), bought("n", "g-1"), bought("o", "someone"), free("a")]
    )
    members = cluster.gang("g", 2, 7)
    assert [cluster.filter(pod) for pod in members] == [["m"], ["n"]]
    assert cluster.filter(cluster.put(make("x", 7))) == ["m"]


def test_rest_of_a_gang_is_placed_beside_nodes_that_were_bought_for_others() -> None:
    """Only some members may be planned: the others had room when it was bought."""
    cluster = ExtenderHarness([bought("n", "g-0"), bought("o", "someone"), free("a")])
    members = cluster.gang("g", 2, 7)
    assert [cluster.filter(pod) for pod in members] == [["n"], ["a"]]
    alone = ExtenderHarness([bought("n", "g-0"), bought("o", "someone")])
    first, _ = alone.gang("g", 2, 7)
    assert alone.filter(first) == []


def test_nothing_is_evicted_on_a_node_that_was_bought_for_others() -> None:
    """The pod could not use the room."""
    cluster = ExtenderHarness([bought("n", "mine")])
    cluster.holds("low", 0, 14, node="n", priority=1)
    high, mine = make("high", 4, priority=9), make("mine", 4, priority=9)
    cluster.set(high, mine)
    result = cluster.extender.filter(high, ["n"])
    assert (result.failed, result.unresolvable) == ({}, {"n": SENTENCE})
    assert cluster.extender.preempt(high, {"n": ["low"]}, {}) == {}
    assert cluster.extender.preempt(mine, {"n": ["low"]}, {})["n"].uids == ("low",)


def test_gang_evicts_nothing_when_it_would_fit_only_a_node_that_was_bought_for_others() -> None:
    """Evicting for half of it helps nobody."""
    cluster = ExtenderHarness([bought("n", "mine"), free("a")])
    cluster.holds("low", 0, 14, node="a", priority=1)
    first, _ = (
        cluster.put(make(f"g-{n}", 14, priority=9, labels=gang_labels("g", 2))) for n in (0, 1)
    )
    assert cluster.extender.preempt(first, {"a": ["low"]}, {}) == {}
    cluster.state.end_pin("n")
    assert cluster.extender.preempt(first, {"a": ["low"]}, {}) != {}


def test_why_names_the_order_when_a_node_was_bought_for_others() -> None:
    """Its cards are free, which would otherwise be a riddle."""
    node = msgspec.convert(bought("n", "mine"), Node)
    explanation = explain(a_pod("other", 4), ClusterSnapshot.of([node], []), ())
    assert [verdict.reasons for verdict in explanation.nodes] == [[SENTENCE]]


@pytest.mark.parametrize("key", [ENDING, RECLAIMED])
def test_node_takes_no_pods_when_it_is_ending(key: str) -> None:
    """Gangs and reservations of the queue respect its taint."""
    tainted = free("n") | {"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}}
    cluster = ExtenderHarness([tainted, free("a")])
    pod = make("p", 4)
    node = cluster.state.node("n")
    assert node is not None
    assert ineligibility_reasons(pod, node) == [f"taint {key}:NoSchedule is not tolerated"]
    cluster.holds("h", 0, 14, node="a")
    cluster.set(pending("p", 4))
    assert [it.placements for it in cluster.queue.refreshed().entries()] == [()]
    (first, *_) = cluster.gang("g", 2, 4)
    assert cluster.filter(first, "n") == []


# ---- when a pin ends ----


def test_pin_stays_ended_when_its_node_changes() -> None:
    """The node's annotations may stay; those of another order count."""
    cluster = ExtenderHarness([bought("n", "mine")])
    other = cluster.put(make("other", 4))
    before = cluster.state.version
    cluster.state.end_pin("n")
    assert cluster.state.version > before
    cluster.state.set_node(msgspec.convert(bought("n", "mine", "late"), Node))
    assert cluster.filter(other) == ["n"]
    cluster.state.set_node(msgspec.convert(bought("n", "mine", order="t4-18"), Node))
    assert cluster.filter(other) == []
    cluster.state.set_node(msgspec.convert(free("n"), Node))
    assert cluster.filter(other) == ["n"]


def test_planned_pods_follow_the_node_when_the_plan_changes() -> None:
    """A pod that was created again has another UID."""
    cluster = ExtenderHarness([bought("n", "mine")])
    again = cluster.put(make("again", 4))
    assert cluster.filter(again) == []
    cluster.state.set_node(msgspec.convert(bought("n", "again"), Node))
    assert cluster.filter(again) == ["n"]


@pytest.mark.parametrize(
    ("labels", "annotations"),
    [
        ({}, {PIN: "60", PLANNED_PODS: '{"u": []}'}),
        ({ORDER: "o"}, {PIN: "60"}),
        ({ORDER: "o"}, {PLANNED_PODS: '{"u": []}'}),
        ({ORDER: "o"}, {PIN: "soon", PLANNED_PODS: '{"u": []}'}),
        ({ORDER: "o"}, {PIN: "nan", PLANNED_PODS: '{"u": []}'}),
        ({ORDER: "o"}, {PIN: "-1", PLANNED_PODS: '{"u": []}'}),
        ({ORDER: "o"}, {PIN: f"{MAX_PIN_S + 1}", PLANNED_PODS: '{"u": []}'}),
        ({ORDER: "o"}, {PIN: "60", PLANNED_PODS: "u"}),
        ({ORDER: "o"}, {PIN: "60", PLANNED_PODS: '["u"]'}),
        ({ORDER: "o"}, {PIN: "60", PLANNED_PODS: '{"u": [-1]}'}),
    ],
)
def test_node_has_no_pin_when_its_record_is_incomplete_or_unreadable(
    labels: dict[str, str], annotations: dict[str, str]
) -> None:
    """Otherwise nobody could use the node."""
    assert read_pin(a_node("n", T4_MIB, labels=labels, annotations=annotations)) is None


def test_pin_is_read_from_what_the_scheduler_keeps_of_a_node() -> None:
    """It keeps few annotations."""
    node = msgspec.convert(bought("n", "u", "v", on=[(0,)]), CompactNode)
    assert read_pin(node) == Pin("t4-17", 60.0, frozenset({("u", (0,)), ("v", ())}))


def test_pod_that_runs_on_a_bought_node_stays() -> None:
    """A pin is about new pods."""
    cluster = ExtenderHarness([bought("n", "mine")])
    cluster.set(make("h", 4, node="n", annotations=on_card(0, 4)))
    assert cluster.free("n") < T4_MIB
