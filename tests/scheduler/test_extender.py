"""The extender's answers from filter to bind."""

import pytest

from fenka.cluster.placement import BEST
from fenka.scheduler.extender import HOLD_S
from tests.builders import T4_MIB, node_json
from tests.fakes.extender import ExtenderHarness, freed_card, two_cards
from tests.fakes.queue import make

NAMES = [f"n{number}" for number in range(9)]


def test_pod_is_not_evicted_when_another_would_get_the_card() -> None:
    """Both of priority 5; low is on the card that the first has reserved, and on no other."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.holds("low", 0, 10, priority=1)
    first, second = make("first", 12, 1, priority=5), make("second", 8, 2, priority=5)
    cluster.wait(first, second)
    results = cluster.extender.preempt(first, {"n": ["low"]}, {})
    assert results["n"].uids == ("low",)
    assert cluster.extender.preempt(second, {"n": ["low"]}, {}) == {}


def test_bind_uses_the_constraints_of_filter_when_another_pod_came_since() -> None:
    """In between another came to wait, and named the card: the pod that was let through has it."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 8, runs=100, started=0)
    pod, head = make("p", 4, 5), make("head", 12, 1)
    cluster.set(pod, head)
    assert cluster.ask(pod) == {}
    cluster.wait(head)
    assert cluster.bind(pod, "n") == "n/0"


def test_bind_fails_when_the_card_was_reserved_at_filter() -> None:
    """And if there was no filter."""
    cluster = two_cards()
    cluster.wait(make("head", 12, 1))
    pod = make("p", 4, 5)
    cluster.set(pod)
    assert cluster.bind(pod, "n") == "n/0"
    other = make("q", 4, 6)
    cluster.set(other)
    assert "reserved" in cluster.bind(other, "n")
    assert "reserved" in cluster.ask(other)["n"]


def test_bind_counts_a_pod_once_when_it_was_bound_since_filter() -> None:
    """Who was kept for at filter is bound by now: its slice is in the world."""
    cluster, head, later = freed_card(6, 6)
    assert cluster.ask(later) == {}
    assert cluster.start(head) == "n/0"
    cluster.wait(make("third", 12, 0.5))
    assert cluster.bind(later, "n") == "n/0"


def test_filter_returns_the_best_nodes_when_more_fit() -> None:
    """The fullest node is among them, and scores best: kube-scheduler would choose it among all too."""
    cluster = ExtenderHarness([node_json(name, T4_MIB) for name in NAMES])
    cluster.holds("h", 0, 4, node="n7")
    pod = cluster.put(make("p", 4, 1))
    fitting = cluster.extender_with(cluster.queue, max_nodes=3).filter(pod, NAMES).fitting
    assert len(fitting) == 3
    assert dict(cluster.extender.prioritize(pod, fitting))["n7"] == BEST


@pytest.mark.parametrize(("units", "max_nodes"), [(4, 0), (4, 9), (0, 3)])
def test_filter_returns_all_nodes_when_none_is_to_be_left_out(units: int, max_nodes: int) -> None:
    """Without a limit, within the limit, and if fenka prefers none: then kube-scheduler chooses."""
    cluster = ExtenderHarness([node_json(name, T4_MIB) for name in NAMES])
    pod = cluster.put(make("p", units, 1))
    extender = cluster.extender_with(cluster.queue, max_nodes)
    assert list(extender.filter(pod, NAMES).fitting) == NAMES


def answered_with_one_node(first: str, second: str) -> tuple[ExtenderHarness, list[str]]:
    """Return nodes with room for 12 units on n0 and 14 elsewhere, and what filter answered for both pods."""
    cluster = ExtenderHarness([node_json(name, T4_MIB) for name in NAMES])
    cluster.holds("h", 0, 2, node="n0")
    cluster.extender = cluster.extender_with(cluster.queue, max_nodes=1)
    return cluster, [cluster.filter(cluster.put(make(name, 8, 1)))[0] for name in (first, second)]


def test_filter_leaves_room_when_another_pod_is_being_bound() -> None:
    """Each fits on n0, the fullest node, but both do not."""
    cluster, nodes = answered_with_one_node("p", "q")
    assert nodes == ["n0", "n1"]
    assert [cluster.bind(cluster.pods[name], node) for name, node in zip("pq", nodes, strict=True)]
    assert cluster.filter(cluster.put(make("r", 4, 1))) == ["n0"]


@pytest.mark.parametrize("order", ["pq", "qp"])
def test_bind_leaves_the_card_of_another_answer_when_it_comes_earlier(order: str) -> None:
    """On one node: 8 of 14 units fit beside 4 only, and p was answered with the smaller card."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB), node_json("m", T4_MIB)])
    cluster.holds("h", 0, 4)
    cluster.extender = cluster.extender_with(cluster.queue, max_nodes=1)
    pods = {"p": cluster.put(make("p", 10, 1)), "q": cluster.put(make("q", 8, 1))}
    assert [cluster.filter(pod) for pod in pods.values()] == [["n"], ["n"]]
    cards = {name: cluster.bind(pods[name], "n") for name in order}
    assert cards == {"p": "n/0", "q": "n/1"}


def test_filter_gives_the_room_to_another_pod_when_there_is_no_other() -> None:
    """Nothing is reserved by filter: the first that is bound has it."""
    cluster = ExtenderHarness([node_json(name, T4_MIB) for name in ("n", "m")])
    cluster.holds("h", 0, 14, node="m")
    cluster.extender = cluster.extender_with(cluster.queue, max_nodes=1)
    pods = [cluster.put(make(name, 8, 1)) for name in "pq"]
    assert [cluster.filter(pod) for pod in pods] == [["n"], ["n"]]
    assert cluster.bind(pods[1], "n") == "n/0"
    assert "too little memory" in cluster.bind(pods[0], "n")


def test_filter_takes_the_room_again_when_the_other_pod_was_not_bound() -> None:
    """kube-scheduler does not report that it has given up."""
    cluster, _ = answered_with_one_node("p", "q")
    cluster.now += HOLD_S
    assert cluster.filter(cluster.put(make("r", 12, 1))) == ["n0"]
