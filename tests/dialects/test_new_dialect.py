"""A dialect is added by one module and one row of the registry (on nodes: tests/node/test_dialects.py)."""

import msgspec
import pytest

from fenka.cluster.explain import explain
from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterSnapshot
from fenka.core.request import Placement
from fenka.dialects.base import CARDS
from fenka.dialects.nodes import encode_inventory
from fenka.dialects.registry import DIALECTS
from fenka.views.node_rows import cluster_nodes
from tests import builders
from tests.dialects import made_up
from tests.dialects.builders import T4_MIB, share
from tests.fakes.evaluators import ComparedEvaluator

REGISTERED = (*DIALECTS, made_up)
FOUR = T4_MIB * 4 // 15
"""A T4 has 15 units of 1000 MiB."""


@pytest.fixture(autouse=True)
def row_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Screens read pods by all dialects of the registry."""
    monkeypatch.setattr(Pod.demand, "__defaults__", (REGISTERED, None))


def snapshot(*pods: Pod) -> ClusterSnapshot:
    """A node with one T4, and these pods."""
    inventory = encode_inventory(share(T4_MIB).node.cards, 1024)
    node = msgspec.convert(builders.sharing("n", annotations={CARDS: inventory}), Node)
    return ClusterSnapshot.of([node], pods, dialects=REGISTERED)


def a_pod(name: str, amount: int, **given: object) -> Pod:
    """A pod that requests memory by the new name."""
    return msgspec.convert(builders.pod(name, {made_up.GB: amount}, **given), Pod)


def placed(pod: Pod) -> tuple[tuple[Placement, ...], dict[str, str]]:
    """Where the scheduler would put the pod, and the annotations that it would bind it with."""
    state = snapshot(pod).state
    placements = ComparedEvaluator(state, "binpack").placements(pod, "n")
    assert not isinstance(placements, Infeasible)
    node, dialect = state.shared_node("n"), pod.demand(REGISTERED).dialect
    assert node is not None
    assert dialect is made_up
    return placements, dialect.encode(pod.request, node, placements, 0)


def test_pod_of_new_dialect_is_filtered_by_its_size() -> None:
    """A T4 has 15 units of it: 16 do not fit."""
    pods = a_pod("fits", 15), a_pod("too-large", 16)
    evaluator = ComparedEvaluator(snapshot(*pods).state, "binpack")
    assert evaluator.filter(pods[0], ["n"]).fitting == ["n"]
    assert "too little memory" in evaluator.filter(pods[1], ["n"]).unresolvable["n"]


def test_pod_of_new_dialect_is_counted_by_its_record_when_bound() -> None:
    """What the scheduler writes is what any process reads again."""
    placements, annotations = placed(a_pod("p", 4))
    assert [piece.memory_mib for piece in placements[0].slices] == [FOUR]
    assert made_up.RECORD in annotations
    bound = a_pod("p", 4, node="n", annotations=annotations)
    allocation = snapshot(bound).state.allocation(bound.metadata.uid)
    assert allocation is not None
    assert allocation.error is None
    assert allocation.placements == placements


def test_pod_of_new_dialect_is_shown_with_what_it_has() -> None:
    """By the table of nodes, and by fenka why."""
    _, annotations = placed(a_pod("p", 4))
    bound = a_pod("p", 4, node="n", annotations=annotations)
    pending = a_pod("q", 12)
    cluster = snapshot(bound, pending)
    (row,) = cluster_nodes(cluster)
    assert [program.name for program in row.programs] == ["p"]
    assert 3 < row.allocated < 4
    assert "it asks for 4 of example.com/gpu-gb" in explain(bound, cluster, ()).summary
    assert "too little memory" in explain(pending, cluster, ()).sentence


def test_record_of_new_dialect_that_cannot_be_read_counts_on_the_first_card() -> None:
    """As with every other dialect: the pod holds no more than it requests."""
    bound = a_pod("p", 4, node="n", annotations={made_up.RECORD: "[" * 10_000})
    allocation = snapshot(bound).state.allocation(bound.metadata.uid)
    assert allocation is not None
    assert allocation.error is not None
    assert len(allocation.error) < 400
    assert [piece.memory_mib for it in allocation.placements for piece in it.slices] == [FOUR]
