"""Pods without cards are placed by kube-scheduler's scores, with the arithmetic written out."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.columns import Columns, Ints
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Placement, Request, Slice
from fenka.simulation.kube_scheduler import (
    PROFILES,
    Hosts,
    KubeScheduler,
    balanced_allocation,
    least_allocated,
    most_allocated,
    taint_toleration,
)
from fenka.simulation.replay import WITHOUT_CARDS, replay
from fenka.simulation.trace import Trace, TracePod

SMALL = Request(None, cards=0, cpu_milli=1000, host_memory_mib=100)


def hosts(*nodes: tuple[int, int, int, int], cpu: int = 1000, memory: int = 100) -> Hosts:
    """Return nodes with total CPU, total memory, used CPU, used memory, and a pod of this size."""
    rows = np.array(nodes, np.int64).T
    needed = rows[2:] + np.array([[cpu], [memory]])
    return Hosts(rows[:2], rows[2:], needed, np.zeros(len(nodes), np.bool_))


def scores(found: Ints) -> list[int]:
    """Return plain numbers."""
    return [int(score) for score in found]


def node(name: str, cards: int, cpu: int = 8000, memory: int = 800) -> Node:
    """Return a node with cards of 1,000 parts."""
    made = (Card(index, DeviceId(f"{name}-{index}"), "T4", 1000) for index in range(cards))
    return Node(name, tuple(made), cpu, memory, unit_mib=1)


def chosen(profile: str, nodes: Sequence[Node], *held: Placement) -> set[str | None]:
    """Return the nodes that a profile chooses, over 20 seeds."""
    columns = Columns(nodes)
    for placement in held:
        columns.add(placement)
    return {KubeScheduler(profile, Random(seed)).choose(columns, SMALL) for seed in range(20)}


def test_allocation_scores_are_means_of_rounded_percents() -> None:
    """After a pod of 1,000 and 100.

    Least: (8000-1000)*100/8000 = 87, (800-100)*100/800 = 87; then 0 and (900-300)*100/900 = 66: 33.
    Most: 1000*100/8000 = 12, 12; then 3000*100/3000 = 100 and 300*100/900 = 33: 133/2 = 66.
    """
    on = hosts((8000, 800, 0, 0), (3000, 900, 2000, 200))
    assert scores(least_allocated(on)) == [87, 33]
    assert scores(most_allocated(on)) == [12, 66]


def test_what_a_node_has_none_of_does_not_count() -> None:
    """As in kube-scheduler: (4000-1000)*100/4000 = 75 for CPU alone; then there is no balance either."""
    on = hosts((4000, 0, 0, 0))
    assert scores(least_allocated(on)) == [75]
    assert scores(most_allocated(on)) == [25]
    assert scores(balanced_allocation(on)) == [75]
    assert scores(least_allocated(hosts((0, 0, 0, 0)))) == [0]


@pytest.mark.parametrize(
    ("used", "score"),
    [
        # 1/8 and 1/8 of both: balance 100 before and after. 50 + 50 // 2.
        ((0, 0), 75),
        # Before |4/8 - 3/8| / 2 = 0.0625: 93. After |5/8 - 4/8| / 2: 93.
        ((4000, 300), 75),
        # Before |0 - 4/8| / 2 = 0.25: 75. After |1/8 - 5/8| / 2 = 0.25: 75.
        ((0, 400), 75),
    ],
)
def test_balance_is_neutral_when_the_pod_has_the_nodes_own_ratio(
    used: tuple[int, int], score: int
) -> None:
    """A pod of an eighth of both keeps each distance."""
    assert scores(balanced_allocation(hosts((8000, 800, *used)))) == [score]


def test_balance_scores_the_improvement() -> None:
    """A pod of 4/8 of the CPU and 1/8 of the memory.

    On an idle node: before 100, after |4/8 - 1/8| / 2 = 0.1875: 81. 50 + (50 + 81 - 100) // 2 = 65.
    Where 4/8 of the memory is used: before 75, after |4/8 - 5/8| / 2: 93. 50 + (50 + 93 - 75) // 2 = 84.
    """
    on = hosts((8000, 800, 0, 0), (8000, 800, 0, 400), cpu=4000)
    assert scores(balanced_allocation(on)) == [65, 84]


def test_taint_costs_300_of_the_sum() -> None:
    """100 times the weight of 3; the other two plugins together give at most 200."""
    on = hosts((1, 1, 0, 0), (1, 1, 0, 0))
    marked = Hosts(on.total, on.used, on.needed, np.array([True, False]))
    assert scores(taint_toleration(marked)) == [0, 100]
    assert (3, taint_toleration) in PROFILES["taint"]


def test_profiles_choose_among_an_idle_and_a_used_node() -> None:
    """b has its card and 2,000 of 8,000 taken: spread goes to a, pack and taint go to b. c is equal to a."""
    nodes = (node("a", 1), node("b", 1), node("c", 1))
    held = Placement("b", (Slice(0, DeviceId("b-0"), 500, 0),), cpu_milli=2000, host_memory_mib=200)
    assert chosen("kube-scheduler", nodes, held) == {"a", "c"}
    assert chosen("most-allocated", nodes, held) == {"b"}
    assert chosen("taint", nodes, held) == {"b"}


def test_node_without_cards_has_no_taint() -> None:
    """It is taken first, although it is smaller."""
    nodes = (node("a", 1), node("host", 0, cpu=2000, memory=200))
    assert chosen("kube-scheduler", nodes) == {"a"}
    assert chosen("taint", nodes) == {"host"}


def test_tainted_node_is_taken_when_no_other_fits() -> None:
    """The taint is a preference. Where nothing fits there is no node."""
    assert chosen("taint", (node("a", 1), node("host", 0, cpu=999))) == {"a"}
    assert chosen("taint", (node("a", 1, cpu=999),)) == {None}


@given(
    st.sampled_from(WITHOUT_CARDS),
    st.lists(st.tuples(st.booleans(), st.integers(1, 4000)), max_size=30),
    st.integers(1, 4),
)
def test_no_pod_is_refused_that_fits(
    without_cards: str, pods: list[tuple[bool, int]], look_ahead: int
) -> None:
    """Whatever places the pods without cards; they never take what nodes do not have."""
    arrivals = [
        TracePod(
            f"p{number}",
            Request(None, cards=int(card), whole=card, cpu_milli=cpu, host_memory_mib=50),
            1000 * card,
        )
        for number, (card, cpu) in enumerate(pods)
    ]
    nodes = (node("a", 2), node("b", 1), node("c", 0))
    trace = Trace(nodes, tuple(arrivals))
    outcome = replay(trace, nodes, arrivals, "binpack", look_ahead, without_cards=without_cards)
    assert outcome.refused_though_fitting == 0
    asked = sum(cpu for card, cpu in pods if card or without_cards != "elsewhere")
    assert outcome.refused or asked <= 3 * 8000


def test_pods_elsewhere_take_nothing() -> None:
    """A pod of all CPU arrives before one that needs a card and some CPU."""
    nodes = (node("a", 1),)
    host = TracePod("host", Request(None, cards=0, cpu_milli=8000), 0)
    whole = TracePod("whole", Request(None, cards=1, whole=True, cpu_milli=1), 1000)
    trace = Trace(nodes, (host, whole))
    taken = {
        how: replay(trace, nodes, [host, whole], "binpack", without_cards=how).allocation[100]
        for how in WITHOUT_CARDS
    }
    assert taken == {how: 100.0 if how == "elsewhere" else 0.0 for how in WITHOUT_CARDS}
