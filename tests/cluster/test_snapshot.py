"""A cluster as it was listed once."""

import msgspec
import pytest

from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterSnapshot, ClusterState
from fenka.dialects import hami
from fenka.dialects.registry import DIALECTS, WITH_HAMI
from tests.builders import T4_MIB, a_node, a_pod, on_card, pod
from tests.core.builders import device


def test_nodes_and_pods_are_in_order_when_they_were_listed_in_another() -> None:
    """Screens show them so; pods by namespace first."""
    nodes = [a_node(name, T4_MIB) for name in ("b", "a", "c")]
    pods = [
        a_pod(name, 4, uid=f"{namespace}{name}", namespace=namespace)
        for namespace, name in [("team", "a"), ("default", "b"), ("default", "a")]
    ]
    snapshot = ClusterSnapshot.of(nodes, pods)
    assert [node.metadata.name for node in snapshot.nodes] == ["a", "b", "c"]
    assert [each.full_name for each in snapshot.pods] == ["default/a", "default/b", "team/a"]
    assert [each.metadata.name for each in nodes] == ["b", "a", "c"]


def test_snapshot_is_made_of_anything_that_can_be_iterated_once() -> None:
    """Readers stream pages."""
    running = a_pod("p", 7, uid="p", node="a", annotations=on_card(0, 7))
    snapshot = ClusterSnapshot.of(iter([a_node("a", T4_MIB)]), iter([running]))
    assert len(snapshot.nodes) == len(snapshot.pods) == 1
    # 15079 * 7 // 14
    assert snapshot.state.card_usage("a", device(0, "a")).memory_mib == 7539


@pytest.mark.parametrize(
    ("unhealthy", "expected"),
    [
        (None, [True, True]),
        ({}, [True, True]),
        ({"a": frozenset({1})}, [True, False]),
        ({"a": frozenset({0, 1})}, [False, False]),
        # a node that is not listed, and a card that it does not have
        ({"b": frozenset({0})}, [True, True]),
        ({"a": frozenset({7})}, [True, True]),
    ],
)
def test_cards_are_unhealthy_when_a_health_daemon_names_them(
    unhealthy: dict[str, frozenset[int]] | None, expected: list[bool]
) -> None:
    """By node and index."""
    snapshot = ClusterSnapshot.of([a_node("a", T4_MIB, T4_MIB)], [], unhealthy)
    (shared,) = snapshot.state.shared_nodes()
    assert [card.healthy for card in shared.node.cards] == expected


def test_names_of_hami_are_read_when_the_dialects_have_them() -> None:
    """The scheduler's own options decide."""
    limits = {hami.COUNT: 1, hami.MEMORY: 4096}
    annotations = {hami.ALLOCATED: "GPU-a-0,NVIDIA,4096,0:;"}
    running = msgspec.convert(pod("p", limits, node="a", annotations=annotations), Pod)
    for dialects, expected in ((WITH_HAMI, 4096), (DIALECTS, 0)):
        snapshot = ClusterSnapshot.of([a_node("a", T4_MIB)], [running], dialects=dialects)
        # without HAMi's names the same limits are a whole card, and no record says which
        assert snapshot.state.card_usage("a", device(0, "a")).memory_mib == expected


def test_state_is_the_callers_when_it_has_all_objects_already() -> None:
    """It read them page by page."""
    node, running = a_node("a", T4_MIB), a_pod("p", 7, uid="p", node="a", annotations=on_card(0, 7))
    state = ClusterState([node], [running])
    snapshot = ClusterSnapshot.of([node], [running], {"a": frozenset({0})}, state=state)
    assert snapshot.state is state
    (shared,) = state.shared_nodes()
    assert not shared.node.cards[0].healthy
