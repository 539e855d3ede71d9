"""Spot nodes admit only pods that may be ended at any time, or end while the node is protected."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.autoscaling import (
    CAPACITY,
    GROUP,
    INTERRUPTIBLE,
    ORDER,
    PIN,
    PLANNED_PODS,
    PROTECTED_UNTIL,
    SPOT_ADMIT,
    encode_planned_pods,
)
from fenka.cluster.compact import CompactNode, CompactPod
from fenka.cluster.explain import explain
from fenka.cluster.node_admission import exclusion
from fenka.cluster.objects import Node
from fenka.cluster.spot_nodes import RECHECK_S, SpotRule, is_interruptible, read_spot_rule
from fenka.cluster.state import ClusterSnapshot, ClusterState
from fenka.dialects.base import NVIDIA_GPU
from tests.builders import T4_MIB, Json, a_node, a_pod, gang_labels, node_json, pod_json
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import START, make, pending, stamp

SENTENCE = (
    'spot node, taken back at any time: annotate the pod fenka.io/interruptible: "true" '
    "if it may restart"
)
SPOT = {CAPACITY: "spot", GROUP: "t4-spot"}
MARKED = {INTERRUPTIBLE: "true"}


def spot(
    name: str, until: float | None = None, cards: int = 1, admit: str = "marked", **rest: Any
) -> Json:
    """Return a spot node of T4s that was bought. until: seconds after START."""
    annotations = {SPOT_ADMIT: admit, **rest.pop("annotations", {})}
    if until is not None:
        annotations[PROTECTED_UNTIL] = stamp(until)
    labels = {**SPOT, **rest.pop("labels", {})}
    return node_json(name, *[T4_MIB] * cards, labels=labels, annotations=annotations, **rest)


def on_demand(name: str) -> Json:
    """Return a node of one T4 that stays."""
    return node_json(name, T4_MIB)


def cluster_of(*nodes: Json) -> ExtenderHarness:
    """Return a cluster at START."""
    cluster = ExtenderHarness(nodes)
    cluster.state.set_time(START)
    return cluster


# ---- which pods a node admits ----


@pytest.mark.parametrize(
    ("labels", "annotations", "rule"),
    [
        (SPOT, {}, SpotRule()),
        (SPOT, {SPOT_ADMIT: "marked"}, SpotRule()),
        (SPOT, {SPOT_ADMIT: "All"}, SpotRule()),
        (SPOT, {PROTECTED_UNTIL: "soon"}, SpotRule()),
        (SPOT, {PROTECTED_UNTIL: stamp(60)}, SpotRule(START + 60)),
        (SPOT, {SPOT_ADMIT: "all", PROTECTED_UNTIL: stamp(60)}, None),
        ({GROUP: "t4"}, {}, None),
        ({GROUP: "t4", CAPACITY: "on-demand"}, {SPOT_ADMIT: "marked"}, None),
        # Labelled by people: how it is taken back is not known.
        ({CAPACITY: "spot"}, {}, None),
        ({CAPACITY: "spot", GROUP: ""}, {}, None),
        ({}, {SPOT_ADMIT: "marked", PROTECTED_UNTIL: stamp(60)}, None),
    ],
)
def test_rule_is_that_of_a_spot_node_that_was_bought(
    labels: Mapping[str, str], annotations: Mapping[str, str], rule: SpotRule | None
) -> None:
    """What is missing or cannot be read protects nothing."""
    document = node_json("n", T4_MIB, labels=dict(labels), annotations=dict(annotations))
    assert read_spot_rule(msgspec.convert(document, Node)) == rule
    # The scheduler keeps few annotations.
    assert read_spot_rule(msgspec.convert(document, CompactNode)) == rule


@pytest.mark.parametrize(
    ("annotations", "runs", "now", "admitted"),
    [
        ({}, None, 0, False),
        (MARKED, None, 0, True),
        (MARKED, None, 9999, True),
        ({INTERRUPTIBLE: "yes"}, None, 0, False),
        ({}, 3600, 0, True),
        ({}, 3601, 0, False),
        ({}, 3600, 1, False),
        ({}, 600, 3000, True),
        ({}, 600, 3001, False),
        ({}, 600, 4000, False),
        (MARKED, 600, 4000, True),
    ],
)
def test_node_admits_pods_that_may_be_ended_or_end_in_time(
    annotations: Json, runs: int | None, now: float, admitted: bool
) -> None:
    """The node is protected until 3600."""
    cluster = cluster_of(spot("n", 3600))
    cluster.state.set_time(START + now)
    pod = cluster.put(make("p", 4, runs=runs, annotations=annotations))
    assert cluster.ask(pod) == ({} if admitted else {"n": SENTENCE})
    assert cluster.bind(pod, "n") == ("n/0" if admitted else SENTENCE)


def test_grace_counts_when_a_pod_ends_by_its_deadline() -> None:
    """The kubelet ends it only then."""
    cluster = cluster_of(spot("n", 3600))
    grace = {"terminationGracePeriodSeconds": 60}
    assert cluster.ask(make("p", 4, runs=3540, spec=grace)) == {}
    assert cluster.ask(make("q", 4, runs=3541, spec=grace)) == {"n": SENTENCE}


def test_protection_does_not_count_when_the_time_is_not_known() -> None:
    """A screen that forgets to set it must not promise a place."""
    state = ClusterState([msgspec.convert(spot("n", 3600), Node)])
    assert exclusion(state, "n", make("p", 4, runs=1)) == SENTENCE
    state.set_time(START)
    assert exclusion(state, "n", make("p", 4, runs=1)) is None


def test_node_admits_every_pod_when_its_group_says_so() -> None:
    """The administrator decides, not the pod."""
    cluster = cluster_of(spot("n", admit="all"))
    assert cluster.ask(make("p", 4)) == {}


def test_pod_goes_to_a_node_that_stays_when_it_may_not_be_ended() -> None:
    """The fuller spot node would be the better one."""
    cluster = cluster_of(spot("a"), on_demand("z"))
    cluster.holds("h", 0, 8, node="a")
    assert cluster.filter(cluster.put(make("notebook", 4))) == ["z"]
    assert cluster.filter(cluster.put(make("job", 4, annotations=MARKED))) == ["a", "z"]


def test_verdict_follows_the_pod_when_it_is_annotated_while_it_waits() -> None:
    """Nothing of the nodes changes."""
    cluster = cluster_of(spot("n"))
    assert cluster.wait(pending("p", 4)) == [{"n": SENTENCE}]
    cluster.set(pending("p", 4, annotations=MARKED))
    assert cluster.filter(cluster.pods["p"]) == ["n"]
    cluster.now += 1
    assert [bool(it.placements) for it in cluster.queue.refreshed().entries()] == [True]


def test_evaluator_does_not_repeat_its_last_verdict_when_the_pod_was_annotated() -> None:
    """It keeps the verdict of `filter` for `prioritize`."""
    cluster = cluster_of(spot("n"))
    assert cluster.evaluator.filter(make("p", 4), ["n"]).fitting == []
    assert cluster.evaluator.filter(make("p", 4, annotations=MARKED), ["n"]).fitting == ["n"]


def test_planned_pod_is_refused_when_its_node_came_too_late_for_it() -> None:
    """What is left of the protection is all that counts."""
    planned = {PIN: "60", PLANNED_PODS: encode_planned_pods(["p", "q"])}
    cluster = cluster_of(spot("n", 3600, annotations=planned, labels={ORDER: "t4-1"}))
    p, q = make("p", 4, runs=3300), make("q", 4, annotations=MARKED)
    cluster.set(p, q)
    assert cluster.filter(p) == ["n"]
    cluster.state.set_time(START + 301)
    assert cluster.ask(p) == {"n": SENTENCE}
    assert cluster.filter(q) == ["n"]


def test_whole_cards_are_kept_for_those_who_may_have_them_when_the_node_does_not_share() -> None:
    """The kubelet chooses the card, but not the pod."""
    offers = {"status": {"allocatable": {NVIDIA_GPU: "1"}}}
    cluster = cluster_of(spot("n", inventory=False) | offers)
    spec = {"containers": [{"resources": {"limits": {NVIDIA_GPU: "1"}}}]}
    assert cluster.filter(cluster.put(make("p", 0, spec=spec, annotations=MARKED))) == ["n"]
    other = cluster.put(make("q", 0, spec=spec))
    assert cluster.extender.filter(other, ["n"]).unresolvable == {"n": SENTENCE}


def test_pod_without_cards_is_not_refused() -> None:
    """It is not fenka's; a taint keeps it from the node."""
    cluster = cluster_of(spot("n"))
    assert cluster.filter(cluster.put(make("p", 0))) == ["n"]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 14), st.booleans(), st.none() | st.sampled_from([60, 1000, 3600])),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.sampled_from(["stays", "all", None, 60, 1000, 3600]), min_size=1, max_size=5),
    st.lists(st.sampled_from([0, 1, 950, 2600, 3600]), min_size=1, max_size=6),
)
def test_evaluators_agree_when_nodes_are_spot(
    pods: list[tuple[int, bool, int | None]], nodes: list[Any], times: list[int]
) -> None:
    """The harness compares the columnar evaluator with the definition at each call."""
    made = [
        on_demand(name)
        if kind == "stays"
        else spot(name, admit="all")
        if kind == "all"
        else spot(name, kind)
        for name, kind in zip("abcde", nodes, strict=False)
    ]
    cluster = cluster_of(*made)
    for number, (units, marked, runs) in enumerate(pods):
        cluster.state.set_time(START + times[number % len(times)])
        annotations = MARKED if marked else {}
        pod = cluster.put(make(f"p{number}", units, runs=runs, annotations=annotations))
        fitting = cluster.evaluator.filter(pod, cluster.names).fitting
        cluster.evaluator.explain(pod)
        ranked = cluster.evaluator.ranked(pod, cluster.names)
        cluster.evaluator.prioritize(pod, cluster.names)
        assert set(fitting) == set(ranked)
        for name in fitting:
            assert exclusion(cluster.state, name, pod) is None
        if fitting:
            cluster.bind(pod, ranked[0])


# ---- the queue, gangs, preemption, screens ----


def test_queue_keeps_no_room_of_a_spot_node_for_pods_that_it_does_not_admit() -> None:
    """They would block the pod for which it was bought."""
    cluster = cluster_of(spot("n"))
    cluster.wait(pending("notebook", 10))
    cluster.set(pending("job", 10, 5, annotations=MARKED))
    assert [it.pending.name for it in cluster.queue.refreshed().entries()] == ["job"]


def test_queue_is_scheduled_again_when_a_pod_outlasts_the_protection_that_is_left() -> None:
    """Nobody reports that time passes."""
    cluster = cluster_of(spot("n", 3600))
    cluster.holds("h", 0, 14)
    cluster.set(pending("p", 10, runs=3590))

    def entries() -> list[str]:
        return [it.pending.name for it in cluster.queue.refreshed().entries()]

    assert entries() == ["p"]
    cluster.now = RECHECK_S
    cluster.state.set_time(START + cluster.now)
    assert entries() == []


def test_nothing_changes_for_the_queue_when_no_protection_is_near_its_end() -> None:
    """To schedule the queue again costs most of all."""
    cluster = cluster_of(spot("n", 3600), spot("m"))
    before = cluster.state.version
    cluster.state.set_time(START + RECHECK_S - 1)
    assert cluster.state.version == before
    cluster.state.set_time(START + 3600)
    ended = cluster.state.version
    assert ended > before
    cluster.state.set_time(START + 9999)
    assert cluster.state.version == ended


def test_unprotected_nodes_have_one_rule_when_they_were_protected_until_different_times() -> None:
    """A pod is compared with each rule."""
    cluster = cluster_of(spot("a", 60), spot("b", 70))
    cluster.gangs.live.read()
    assert cluster.state.spot.get("a") != cluster.state.spot.get("b")
    cluster.state.set_time(START + 70)
    assert cluster.state.spot.get("a") == cluster.state.spot.get("b") == SpotRule()
    # The clock is set back.
    cluster.state.set_time(START)
    assert cluster.state.spot.get("a") == SpotRule(START + 60)
    assert cluster.filter(cluster.put(make("p", 4, runs=30))) == ["a", "b"]


def test_node_follows_its_annotations_and_is_forgotten() -> None:
    """The configuration may change."""
    cluster = cluster_of(spot("n"))
    pod = cluster.put(make("p", 4))
    assert cluster.filter(pod) == []
    cluster.state.set_node(msgspec.convert(spot("n", admit="all"), Node))
    assert cluster.filter(pod) == ["n"]
    cluster.state.set_node(msgspec.convert(spot("n"), Node))
    assert cluster.filter(pod) == []
    cluster.state.forget_node("n")
    assert cluster.state.spot.excluded(pod) == frozenset()


def test_gang_is_placed_beside_spot_nodes_when_it_may_not_be_ended() -> None:
    """Each member would fit the spot node."""
    cluster = cluster_of(spot("n"), on_demand("a"))
    assert [cluster.filter(pod) for pod in cluster.gang("g", 2, 7)] == [["a"], ["a"]]
    alone = cluster_of(spot("n"))
    first, _ = alone.gang("g", 2, 7)
    assert alone.ask(first) == {"n": f"no room for all 2 pods of gang g: {SENTENCE}"}


def test_planned_gang_is_refused_when_its_node_does_not_admit_it() -> None:
    """A plan is no right to a node that is taken back."""
    planned = {PIN: "60", PLANNED_PODS: encode_planned_pods(["g-0", "g-1"])}
    cluster = cluster_of(spot("n", annotations=planned, labels={ORDER: "t4-1"}))
    first, _ = cluster.gang("g", 2, 4)
    assert cluster.filter(first) == []


def test_gang_is_placed_on_a_spot_node_when_its_members_may_be_ended() -> None:
    """All of them say so."""
    cluster = cluster_of(spot("n"))
    members = [make(f"g-{n}", 7, labels=gang_labels("g", 2), annotations=MARKED) for n in range(2)]
    cluster.set(*members)
    assert [cluster.filter(pod) for pod in members] == [["n"], ["n"]]


def test_nothing_is_evicted_on_a_spot_node_for_a_pod_that_it_does_not_admit() -> None:
    """The pod could not use the room."""
    cluster = cluster_of(spot("n"))
    cluster.holds("low", 0, 14, node="n", priority=1)
    high, marked = make("high", 4, priority=9), make("m", 4, priority=9)
    marked.metadata.annotations = MARKED
    cluster.set(high, marked)
    assert cluster.extender.filter(high, ["n"]).unresolvable == {"n": SENTENCE}
    assert cluster.extender.preempt(high, {"n": ["low"]}, {}) == {}
    assert cluster.extender.preempt(marked, {"n": ["low"]}, {})["n"].uids == ("low",)


def test_gang_evicts_nothing_when_it_would_fit_only_with_a_spot_node() -> None:
    """Evicting for half of it helps nobody."""
    cluster = cluster_of(spot("n"), on_demand("a"))
    cluster.holds("low", 0, 14, node="a", priority=1)
    first, _ = (
        cluster.put(make(f"g-{n}", 14, priority=9, labels=gang_labels("g", 2))) for n in (0, 1)
    )
    assert cluster.extender.preempt(first, {"a": ["low"]}, {}) == {}


def test_why_says_what_to_do_when_only_spot_nodes_have_room() -> None:
    """Their cards are free, which would otherwise be a riddle."""
    node = msgspec.convert(spot("n"), Node)
    explanation = explain(a_pod("notebook", 4), ClusterSnapshot.of([node], []), ())
    assert [verdict.reasons for verdict in explanation.nodes] == [[SENTENCE]]


def test_pod_that_runs_on_a_spot_node_stays() -> None:
    """The rule is about new pods."""
    cluster = cluster_of(spot("n"))
    cluster.holds("h", 0, 4)
    assert cluster.free("n") < T4_MIB


@pytest.mark.parametrize(("value", "kept"), [("true", True), ("x" * 9999, False)])
def test_scheduler_keeps_of_a_pod_whether_it_may_be_ended(value: str, kept: bool) -> None:
    """What else a tenant writes costs no memory."""
    document = pod_json("p", 4, annotations={INTERRUPTIBLE: value})
    pod = msgspec.convert(document, CompactPod)
    assert (INTERRUPTIBLE in pod.metadata.annotations) is kept
    assert is_interruptible(pod) is kept


def test_node_that_people_labelled_admits_every_pod() -> None:
    """Its group is not the autoscaler's, so nobody says when it is taken back."""
    node = a_node("n", T4_MIB, labels={CAPACITY: "spot"})
    assert exclusion(ClusterState([node]), "n", make("p", 4)) is None
