"""Rows of a cluster's queue, from one reading and without its scheduler. The screen is in tests/cli."""

from typing import Any

import msgspec
import pytest

from fenka.cluster.objects import Pod
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.cluster.state import ClusterSnapshot
from fenka.core.queue import Fairness
from fenka.views.cluster_queue import cluster_queue
from fenka.views.workloads import QueueRow
from tests.builders import T4_MIB, a_node, gang_labels, on_card
from tests.fakes.queue import START, UNSCHEDULABLE, make, pending
from tests.mig_builders import mig_node, mig_pod_json

MEMORY = "aliyun.com/gpu-mem"
PLAIN = SchedulerOptions(fairness=Fairness(penalty_per_request_s=0))
NODE = a_node("n", T4_MIB, T4_MIB)


def rows(*pods: Pod, now: float = 100) -> list[QueueRow]:
    """Return the queue of these pods on a node of two T4, `now` seconds after START."""
    return cluster_queue(ClusterSnapshot.of([NODE], pods), PLAIN, START + now)


def holder(
    name: str, card: int, units: int, runs: int | None = None, namespace: str = "other"
) -> Pod:
    """Return a pod that has run since START; `runs` is its deadline."""
    placed: dict[str, Any] = {"node": "n", "annotations": on_card(card, units)}
    return make(name, units, started=0, runs=runs, namespace=namespace, **placed)


def test_row_has_its_cards_and_time_when_they_are_reserved() -> None:
    """10 of 14 units are held of each card, until 300 and until 200: card 1 is free first."""
    (row,) = rows(holder("h0", 0, 10, 300), holder("h1", 1, 10, 200), pending("p", 12, 5))
    assert row == QueueRow(
        1,
        "p",
        "default",
        0,
        f"12 {MEMORY}",
        START + 5,
        ["n/1"],
        START + 200,
        "no GPU fits: 2 of 2 have too little memory",
    )


def test_row_names_the_card_that_fits_when_there_is_room_now() -> None:
    """10 of 14 units are held of card 0, which the first reserves, and 4 of card 1."""
    holders = holder("h0", 0, 10), holder("h1", 1, 4)
    first, second = rows(*holders, pending("a", 12, 1), pending("b", 4, 2))
    assert (first.name, first.reserved, first.starts_by) == ("a", ["n/0"], None)
    assert (second.name, second.reserved, second.starts_by) == ("b", ["n/1"], None)
    assert second.why.startswith("there is room now")


def gang(name: str, **given: Any) -> Pod:
    """Return a pod of the gang g of three."""
    return make(name, 14, labels=gang_labels("g", 3), **given)


@pytest.mark.parametrize(
    ("third", "shown"),
    [
        # a member that exists, placed or not, or has succeeded is not missing
        ([gang("c")], True),
        ([gang("c", node="n", annotations=on_card(0, 14))], True),
        ([gang("c", node="n", phase="Succeeded")], True),
        # one that has failed or is about to go is
        ([gang("c", node="n", phase="Failed")], False),
        ([], False),
    ],
)
def test_gang_is_in_the_queue_when_as_many_pods_as_it_needs_are_present(
    third: list[Pod], shown: bool
) -> None:
    """The scheduler counts members in the same way (gang_members.py)."""
    pods = [pending(name, 14, labels=gang_labels("g", 3)) for name in "ab"]
    (row,) = rows(*pods, *third)
    assert (row.name, row.position) == ("g", int(shown))


def test_gang_is_below_the_queue_when_a_member_is_about_to_go() -> None:
    """Its successor does not exist yet."""
    going = gang("c", node="n", annotations=on_card(0, 14))
    going.metadata.deletion_timestamp = "2026-01-01T00:01:30Z"
    pods = [pending(name, 14, labels=gang_labels("g", 3)) for name in "ab"]
    (row,) = rows(*pods, going)
    assert (row.position, row.why) == (0, "gang g is incomplete: 2 of its 3 pods exist")


def test_request_of_a_gang_is_the_sum_of_its_pods_when_they_differ() -> None:
    """2 + 3 units."""
    pods = [pending(f"p{units}", units, labels=gang_labels("g", 2)) for units in (2, 3)]
    (row,) = rows(*pods)
    assert (row.name, row.asks) == ("g", f"2 pods: 5 {MEMORY}")


def test_namespace_shows_its_use_when_it_has_used_cards() -> None:
    """All of card 0 and 1 of 14 units of card 1 since START, at 100; the half-life is an hour."""
    holders = holder("h0", 0, 14, namespace="default"), holder("h1", 1, 1, namespace="default")
    (row,) = rows(*holders, pending("p", 14, 50))
    assert row.used_s == pytest.approx(100 * (1 + 1 / 14), rel=0.02)


def test_row_names_the_card_of_an_instance_that_does_not_exist_yet() -> None:
    """The pod that comes first fits; the other one starves and has the least taken place reserved."""
    made = [
        mig_pod_json(name, profile, uid=name)
        for name, profile in (("a", "4g.20gb"), ("b", "7g.40gb"))
    ]
    for pod in made:
        pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        pod["status"] |= UNSCHEDULABLE
    pods = [msgspec.convert(pod, Pod) for pod in made]
    snapshot = ClusterSnapshot.of([mig_node("n", "A100")], pods)
    rows = cluster_queue(snapshot, SchedulerOptions(fairness=Fairness(0)), START)
    assert [(row.name, row.reserved) for row in rows] == [("a", ["n/0"]), ("b", ["n/0"])]
    assert rows[1].why == "no card has room for 7g.40gb: 0/0 4g.20gb is held by a pod before it"
