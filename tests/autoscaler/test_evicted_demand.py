"""Pods of nodes that are taken back are planned for until their successors exist."""

from dataclasses import replace

from fenka.autoscaler.demand import pending_demand
from fenka.autoscaler.reclaim import evicted_demand
from fenka.autoscaler.snapshot import Snapshot
from fenka.cluster.autoscaling import RECLAIMED
from tests.autoscaler.snapshots import elastic_node, snapshot
from tests.builders import T4_MIB, Json, gang_labels, on_card, pod_json

TAINT = {"key": RECLAIMED, "effect": "NoSchedule"}


def job(name: str, on: str = "", *, of: str = "r", ends: bool = False, **given: object) -> Json:
    """A pod with 4 units; it runs on a node, or is pending."""
    made = pod_json(
        name,
        4,
        node=on,
        annotations=on_card(0, 4) if on else {},
        phase="Running" if on else "Pending",
        uid=name,
        **given,  # type: ignore[arg-type]
    )
    if of:
        owner = {"kind": "Job", "name": of, "uid": name, "controller": True}
        made["metadata"]["ownerReferences"] = [owner]
    if ends:
        made["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    return made


def seen(*pods: Json) -> Snapshot:
    """The snapshot of node n, which is taken back, and node m."""
    made = snapshot(nodes=(elastic_node("n", T4_MIB, taints=[TAINT]), elastic_node("m")), pods=pods)
    return replace(made, evicted=evicted_demand(made))


def test_pods_of_a_node_that_is_taken_back_are_displaced() -> None:
    """Those that end already, too; others, and those that nobody makes anew, are not."""
    pods = job("a", "n"), job("b", "n", ends=True), job("c", "m"), job("d", "n", of="")
    assert seen(*pods).evicted == {"a", "b"}


def test_each_successor_stands_for_one_displaced_pod() -> None:
    """Otherwise two nodes would be bought for it. Other controllers' pods do not count."""
    pods = job("a", "n"), job("b", "n"), job("new"), job("other", of="x")
    assert seen(*pods).evicted == {"b"}
    assert seen(*pods, job("new2")).evicted == set()


def test_members_elsewhere_are_displaced_when_they_end_with_their_gang() -> None:
    """The gang ends whole, and is planned for whole; a new member that runs already is not."""
    labels = gang_labels("g", 2)
    here = job("here", "n", ends=True, labels=labels)
    assert seen(here, job("there", "m", ends=True, labels=labels)).evicted == {"here", "there"}
    assert seen(here, job("there", "m", labels=labels)).evicted == {"here"}


def test_displaced_pods_are_in_the_demand_as_if_they_were_pending() -> None:
    """Their gang is complete, although its members end."""
    labels = gang_labels("g", 2)
    pods = job("a", "n", ends=True, labels=labels), job("b", "m", ends=True, labels=labels)
    demand = pending_demand(seen(*pods, job("alone", "n"), job("stays", "m")))
    assert set(demand.requests) == {"a", "b", "alone"}
    assert not demand.unserved
    assert demand.requests["a"].gang == demand.requests["b"].gang == "default/g"
