"""The order of namespaces in the queue: their allocations, past use and earlier requests."""

from typing import Any

import msgspec
import pytest

from fenka.cluster.objects import Node, Pod
from fenka.cluster.queue_state import RESERVATION_TTL_S
from fenka.core.queue import Fairness
from tests.builders import T4_MIB, node_json, on_card
from tests.fakes.extender import PLAIN, ExtenderHarness
from tests.fakes.queue import UNSCHEDULABLE, make, stamp


@pytest.mark.parametrize(
    ("fairness", "expected"),
    [
        # time alone
        (PLAIN, ["a1", "a2", "b1"]),
        # a holds one, and asked for one before a2: 60 + 61, 120 + 61, 0
        (Fairness(60, 3600), ["b1", "a1", "a2"]),
        # a1 has waited for 60 s by now, and is a's first; b1 for 11 s
        (Fairness(60, 60), ["a1", "b1", "a2"]),
        (Fairness(60, 61), ["b1", "a1", "a2"]),
        # both have starved: by time
        (Fairness(60, 11), ["a1", "b1", "a2"]),
    ],
)
def test_namespace_is_later_when_it_has_used_more(fairness: Fairness, expected: list[str]) -> None:
    """Its allocations, its past use and its earlier requests count, up to the maximum penalty."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)], fairness)
    cluster.holds("h", 0, 14, namespace="a")
    cluster.now = 60
    pods = [
        make("a1", 8, 1, namespace="a"),
        make("a2", 8, 2, namespace="a"),
        make("b1", 8, 50, namespace="b"),
    ]
    cluster.wait(*pods)
    cluster.now = 61
    assert [it.pending.id for it in cluster.queue.refreshed().entries()] == expected
    for pod in pods:
        rank = expected.index(pod.metadata.name) + 1
        assert cluster.queue.position(pod) == f"; position {rank} of 3 in the queue"
        assert f"position {rank} of 3" in cluster.ask(pod)["n"]


MANY = 200


def heavy(number: int, **rest: Any) -> Pod:
    """One of many pods of the namespace heavy, all created at once, which take the whole card."""
    return make(f"h{number}", 14, 0, namespace="heavy", **rest)


def ran(cluster: ExtenderHarness, pod: Pod, since: float, until: float) -> None:
    """It starts, and ends, while the watch looks on."""
    name, status = pod.metadata.name, {"startTime": stamp(since)}
    cluster.now = since
    held: dict[str, Any] = {"node": "n", "annotations": on_card(0, 14)}
    cluster.set(make(name, 14, 0, namespace=pod.metadata.namespace, said=status, **held))
    cluster.now = until
    cluster.gone(name)


def firsts(cluster: ExtenderHarness, count: int = 2) -> list[str]:
    """Return the names of the first in line."""
    return [it.pending.name for it in cluster.queue.refreshed().entries()[:count]]


def test_namespace_is_first_when_it_has_used_less() -> None:
    """A long queue of short pods does not block a namespace that comes later."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)], Fairness())
    cluster.set(*(heavy(number, said=UNSCHEDULABLE) for number in range(MANY)))
    for number in range(10):
        ran(cluster, heavy(number), 100 + 2 * number, 101 + 2 * number)
    cluster.now = 3000
    cluster.set(make("late", 14, 2990, namespace="light", said=UNSCHEDULABLE))
    cluster.set(make("later", 14, 2991, namespace="light", said=UNSCHEDULABLE))
    assert firsts(cluster) == ["late", "h10"]
    ran(cluster, make("late", 14, 2990, namespace="light"), 3000, 3001)
    assert firsts(cluster) == ["later", "h10"]


def test_reserved_cards_count_as_used_when_the_reservation_expires() -> None:
    """Pods whose volume is missing block the free card for 15 s, not for 15 s each."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)], Fairness())
    cluster.set(*(heavy(number, said=UNSCHEDULABLE) for number in range(MANY)))
    late = make("late", 14, 5, namespace="light")
    cluster.set(late)
    assert "reserved" in cluster.start(late)
    cluster.now = RESERVATION_TTL_S
    assert firsts(cluster) == ["late", "h1"]
    assert cluster.start(late) == "n/0"
    assert cluster.queue.state.usage(cluster.queue.now()) == pytest.approx(
        {"heavy": RESERVATION_TTL_S}
    )


def test_use_is_rebuilt_when_a_replica_starts() -> None:
    """From the pods that the API server shows, running and finished."""
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": stamp(400)}
    ended = {"startTime": stamp(100), "conditions": [ready], "phase": "Succeeded"}
    runs = {"startTime": stamp(950), "phase": "Running"}
    on: dict[str, Any] = {"node": "n", "annotations": on_card(0, 14)}
    cluster = ExtenderHarness([node_json("n", T4_MIB)], Fairness(half_life_s=1e9), now=1000)
    pods = [
        make("ended", 14, 0, namespace="a", said=ended, **on),
        make("runs", 14, 0, namespace="b", said=runs, **on),
    ]
    for _ in range(2):
        cluster.set(*pods)
        cluster.queue.replace_pods(pods)
    used = cluster.queue.state.usage(cluster.queue.now())
    assert used == pytest.approx({"a": 300, "b": 50}, rel=1e-3)
    cluster.now = 1100
    cluster.queue.replace_pods([])
    cluster.now = 2000
    assert cluster.queue.state.usage(cluster.queue.now()) == pytest.approx(
        {"a": 300, "b": 150}, rel=1e-3
    )


def test_use_is_counted_when_the_node_comes_after_the_pod() -> None:
    """Pods may come by the watch before their node does."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)], Fairness(half_life_s=1e9), now=100)
    cluster.state.forget_node("n")
    on: dict[str, Any] = {"node": "n", "annotations": on_card(0, 7)}
    cluster.set(make("p", 7, 0, namespace="a", said={"startTime": stamp(0)}, **on))
    assert cluster.queue.state.usage(cluster.queue.now()) == {}
    cluster.state.set_node(msgspec.convert(node_json("n", T4_MIB), Node))
    cluster.wait(make("q", 14, 0))
    assert firsts(cluster) == ["q"]
    assert cluster.queue.state.usage(cluster.queue.now()) == pytest.approx({"a": 50}, rel=1e-3)


def test_bypass_is_measured_when_a_later_request_is_served_first() -> None:
    """b1, of 50, goes before a1 of 1: 49 s. c, of 55, uses what a1 does not wait for: none."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB, T4_MIB)], Fairness(60, 3600))
    cluster.holds("h2", 2, 12, namespace="c")
    cluster.holds("h0", 0, 10, namespace="x", runs=100, started=0)
    cluster.holds("k", 0, 4, namespace="a")
    cluster.holds("h1", 1, 12, namespace="c", runs=500, started=0)
    cluster.now = 60
    a1 = make("a1", 8, 1, namespace="a")
    b1 = make("b1", 8, 50, namespace="b")
    cluster.wait(a1, b1)
    assert cluster.queue.refreshed().max_bypass_s() == 0
    # b1: 0, a1: 60 and what it has had, c: 120
    c = make("c", 2, 55, namespace="c")
    cluster.set(c)
    # b1 has named card 0, a1 card 1
    assert cluster.start(c) == "n/2"
    cluster.set(make("c", 2, 55, namespace="c", node="n", annotations=on_card(2, 2)))
    assert cluster.queue.refreshed().max_bypass_s() == 0
    cluster.gone("h0")
    cluster.now = 61
    assert cluster.start(b1) == "n/0"
    cluster.set(make("b1", 8, 50, namespace="b", node="n", annotations=on_card(0, 8)))
    cluster.now = 62
    assert cluster.queue.refreshed().max_bypass_s() == 49
    assert cluster.queue.state.max_bypass_bound_s == 3600
    cluster.gone("a1")
    assert cluster.queue.refreshed().max_bypass_s() == 0
