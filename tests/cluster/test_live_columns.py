"""Columns that follow the cluster's state: what they remember of nodes stays bounded."""

import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.placement import BEST, NO_CONSTRAINTS, QueueConstraints
from fenka.cluster.pod_columns import MAX_SPARE_VALUES, LiveColumns
from fenka.cluster.state import ClusterState
from fenka.core.columns import CARD_MEMORY
from fenka.core.policies.candidates import TargetPolicy
from fenka.core.policies.scores import SCORES
from fenka.core.policies.target import ExpectedWorkload
from fenka.core.policies.workload import Typical
from fenka.core.request import Memory, Request
from fenka.dialects import gpu_manager, nodes
from tests.builders import GIB, T4_MIB, a_node, a_pod, on_card
from tests.fakes.evaluators import ComparedEvaluator


def test_rules_stay_few_when_a_nodes_error_changes_again_and_again() -> None:
    """Each error is a rule of its own, since it is the sentence that pods get."""
    cluster = ClusterState([a_node("n", T4_MIB), a_node("m", T4_MIB)])
    live = LiveColumns(cluster)
    evaluator = ComparedEvaluator(cluster, "binpack", live)
    for number in range(10 * MAX_SPARE_VALUES):
        labels = {nodes.MODE_LABEL: f"unknown-{number}"}
        cluster.set_node(a_node("n", T4_MIB, labels=labels))
        live.read()
        assert len(live.rules.numbers) <= MAX_SPARE_VALUES + 2 * 2
    result = evaluator.filter(a_pod("p", 4), ["n", "m"])
    assert result.fitting == ["m"]
    assert f"unknown-{number} is none of" in result.unresolvable["n"]


def test_names_of_changed_nodes_take_no_room_when_they_have_been_read() -> None:
    """A large set is looked through by whoever takes a name out of it, however few are in it."""
    watched = list[set[str]]()

    class Watched(ClusterState):
        def watch(self, changed: set[str]) -> None:
            watched.append(changed)

    live = LiveColumns(Watched(a_node(f"n{number}", T4_MIB) for number in range(1000)))
    (changed,) = watched
    assert live.read().count == 1000
    assert (changed, sys.getsizeof(changed)) == (set(), sys.getsizeof(set()))


def test_columns_follow_only_when_they_have_been_read() -> None:
    """Those of a replica that answers no requests take no room."""
    cluster = ClusterState([a_node("n", T4_MIB)])
    live = LiveColumns(cluster)
    live.follow()
    assert live.version == 0
    columns = live.read()
    version = live.version
    cluster.set_node(a_node("m", T4_MIB))
    live.follow()
    assert live.version > version
    assert columns.slot("m") >= 0


def test_kinds_stay_few_when_a_nodes_cards_change_again_and_again() -> None:
    """Cards of each size are a kind of their own."""
    cluster = ClusterState([a_node("n", T4_MIB), a_node("m", T4_MIB)])
    live = LiveColumns(cluster)
    for number in range(3 * MAX_SPARE_VALUES):
        cluster.set_node(a_node("n", T4_MIB + number))
        live.read()
        assert len(live.kinds.numbers) <= MAX_SPARE_VALUES + 2


def test_kind_is_the_same_for_nodes_that_hold_the_same_when_empty() -> None:
    """Neither the names of cards nor those that take nothing make a kind."""
    nodes = [a_node("n", T4_MIB, T4_MIB), a_node("m", T4_MIB, T4_MIB), a_node("k", T4_MIB)]
    cluster = ClusterState(nodes)
    cluster.set_unhealthy("m", frozenset({0}))
    live = LiveColumns(cluster)
    columns = live.read()
    numbers = live.kinds.of_slot[columns.slots(["n", "m", "k"])].tolist()
    assert numbers[0] != numbers[1] == numbers[2]


def test_copy_keeps_its_nodes_when_those_of_the_cluster_change() -> None:
    """Whoever evaluates on a copy finishes with the nodes that there were."""
    cluster = ClusterState([a_node("n", T4_MIB), a_node("m", T4_MIB)])
    live = LiveColumns(cluster)
    copy = live.read().copy()
    cluster.set_node(a_node("n", 2 * T4_MIB))
    cluster.forget_node("m")
    cluster.set_node(a_node("k", T4_MIB))
    for columns, memory_mib in (
        (live.read(), {"n": 2 * T4_MIB, "k": T4_MIB}),
        (copy, {"n": T4_MIB, "m": T4_MIB}),
    ):
        slots = {node.name: slot for slot, node in enumerate(columns.nodes) if node is not None}
        assert {name: columns.slot(name) for name in memory_mib} == slots
        assert memory_mib == {
            name: columns.cards[CARD_MEMORY, columns.starts[slot]] for name, slot in slots.items()
        }


def test_prioritize_counts_what_was_placed_since_filter() -> None:
    """One evaluation serves both only if nothing has changed in between."""
    cluster = ClusterState([a_node("n", T4_MIB), a_node("m", T4_MIB)])
    evaluator = ComparedEvaluator(cluster, "binpack")
    pod, names = a_pod("p", 4), ["n", "m"]
    assert evaluator.filter(pod, names).fitting == names
    assert dict(evaluator.prioritize(pod, names))["m"] == BEST
    cluster.set_pod(a_pod("q", 8, node="n", annotations=on_card(0, 8)))
    assert dict(evaluator.prioritize(pod, names))["n"] == BEST


def test_each_pod_is_evaluated_for_itself_when_nothing_changes() -> None:
    """A pod of the same size may be under other constraints, or about other nodes."""
    cluster = ClusterState([a_node("n", T4_MIB), a_node("m", T4_MIB)])
    evaluator = ComparedEvaluator(cluster, "binpack")
    first, second = a_pod("p", 4, uid="1"), a_pod("p", 4, uid="2")
    reserved = QueueConstraints(
        frozenset(card.uuid for card in cluster.shared_nodes()[0].node.cards),
        nodes=frozenset({"m"}),
    )
    assert evaluator.filter(first, ["n"]).fitting == ["n"]
    assert evaluator.filter(first, ["n", "m"]).fitting == ["n", "m"]
    assert evaluator.filter(first, ["n", "m"], reserved).fitting == ["n"]
    assert evaluator.filter(second, ["n", "m"]).fitting == ["n", "m"]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from([7611, T4_MIB]), min_size=1, max_size=3), min_size=1),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=8),
    st.lists(st.lists(st.integers(1, 15), min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from(sorted(SCORES)),
    st.booleans(),
)
def test_every_policy_decides_on_columns_as_on_nodes(
    sizes: list[list[int]],
    held: list[tuple[int, int]],
    asked: list[list[int]],
    name: str,
    each: bool,
) -> None:
    """Pods of one to three containers, also beside a reserved card; every call is compared.

    each: whether they are of gpu-manager, which places each container. gpushare places them on one card.
    """
    names = [f"n{number}" for number in range(len(sizes))]
    cluster = ClusterState(a_node(it, *cards) for it, cards in zip(names, sizes, strict=True))
    expected = ExpectedWorkload(
        (Typical(Request(Memory(5, 1024)), 3), Typical(Request(whole=True), 1))
    )
    evaluator = ComparedEvaluator(cluster, TargetPolicy(name, expected))
    for number, (at, amount) in enumerate(held):
        on = names[at % len(names)]
        cluster.set_pod(a_pod(f"h{number}", amount, node=on, annotations=on_card(0, amount)))
    first = cluster.shared_nodes()[0].node
    kept = QueueConstraints(frozenset({first.cards[0].uuid}), nodes=frozenset({first.name}))
    for number, amounts in enumerate(asked):
        pod = a_pod(f"p{number}", *amounts)
        if each:
            for container, amount in zip(pod.spec.containers, amounts, strict=True):
                memory = str(amount * GIB // gpu_manager.UNIT_MIB)
                container.resources.limits = {gpu_manager.CORE: "10", gpu_manager.MEMORY: memory}
        for constraints in (kept, NO_CONSTRAINTS):
            evaluator.filter(pod, names, constraints)
            evaluator.evaluate(pod, names, constraints)
            evaluator.prioritize(pod, names, constraints)
            evaluator.ranked(pod, names, constraints)
        evaluator.explain(pod)
