"""Pending pods for MIG instances in the queue: their order, what is held for them, and what is reserved."""

from typing import Any

import msgspec

from fenka.cluster.objects import Pod
from fenka.cluster.pending_queue import PendingQueue
from fenka.cluster.placement import PodEvaluator
from fenka.cluster.queue_snapshot import QueueEntry
from fenka.cluster.queue_state import queue_state
from fenka.cluster.state import ClusterState
from fenka.core.backfill import complete
from fenka.core.queue import Fairness
from tests.builders import Json, gang_labels
from tests.fakes.queue import START, UNSCHEDULABLE, pending, stamp
from tests.mig_builders import inside_pod_json, mig_node, mig_pod_json

BY_TIME = Fairness(penalty_per_request_s=0)


def waits(made: Json, at: float) -> Pod:
    """Return a pod for which kube-scheduler has found no node."""
    made["metadata"] |= {"creationTimestamp": stamp(at), "uid": made["metadata"]["name"]}
    made["status"] |= UNSCHEDULABLE
    return msgspec.convert(made, Pod)


def mig(name: str, *profiles: str, at: float = 0, **given: Any) -> Pod:
    """Return a pending pod for instances."""
    return waits(mig_pod_json(name, *profiles, **given), at)


def entries(
    cluster: ClusterState, *pods: Pod, fairness: Fairness = BY_TIME, now: float = 100
) -> dict[str, QueueEntry]:
    """Schedule the queue; return its entries in order, by name."""
    queue = PendingQueue(cluster, "binpack", fairness)
    snapshot = complete(queue.schedule(pods, START + now))
    return {entry.pending.name: entry for entry in snapshot.entries}


def on(entry: QueueEntry) -> list[str]:
    """Return where an entry fits now."""
    return [piece.uuid for it in entry.placements for piece in it.slices]


def test_pods_are_placed_on_what_earlier_pods_leave() -> None:
    """4g and 3g fill the card; the 1g that came in between has nothing left to it."""
    cluster = ClusterState([mig_node("n", "A100")])
    found = entries(
        cluster, mig("c", "1g.5gb", at=3), mig("a", "4g.20gb", at=1), mig("b", "3g.20gb", at=2)
    )
    assert list(found) == ["a", "b", "c"]
    assert [on(entry) for entry in found.values()] == [
        ["GPU-n-0/0/4g.20gb"],
        ["GPU-n-0/4/3g.20gb"],
        [],
    ]
    assert found["c"].why == (
        "no card has room for 1g.5gb: 0/0 4g.20gb is held by a pod before it, "
        "0/4 3g.20gb is held by a pod before it"
    )


def test_pods_for_cards_are_served_as_if_there_were_no_others() -> None:
    """Order, placements, reservations and reasons, on a node that has both kinds of cards."""
    nodes = [mig_node("n", "A100", "T4"), mig_node("m", "T4")]
    cards = [pending("x", 10, 1), pending("y", 10, 3), pending("z", 10, 5), pending("w", 99, 7)]
    alone = entries(ClusterState(nodes), *cards)
    instances = [mig("a", "7g.40gb", at=0), mig("b", "1g.5gb", at=2), mig("c", "1g.5gb", at=6)]
    both = entries(ClusterState(nodes), *cards, *instances)
    assert list(both) == ["a", "x", "b", "y", "z", "c"]
    for name, entry in alone.items():
        assert both[name].placements == entry.placements
        assert both[name].reservation == entry.reservation
        assert both[name].why == entry.why


def test_pod_is_no_entry_when_no_node_could_ever_hold_it() -> None:
    """No such profile; more instances than the cards have; a gang; no divided card that it may use."""
    cluster = ClusterState([mig_node("n", "A30")])
    labels = gang_labels("g", 2)
    assert not entries(
        cluster,
        mig("a", "1g.5gb"),
        mig("b", "5x1g.6gb"),
        mig("g1", "1g.6gb", labels=labels),
        mig("g2", "1g.6gb", labels=labels),
        mig("c", "1g.6gb", spec={"nodeSelector": {"zone": "x"}}),
    )


def test_place_is_held_for_a_pod_until_it_is_bound() -> None:
    """Others get different places at filter; the last slice in the own namespace shares."""
    cluster = ClusterState([mig_node("n", "A100")])
    state = queue_state(cluster, fairness=BY_TIME)
    first = waits(inside_pod_json("a", 4), 1)
    cluster.set_pod(first)
    state.set_pod(first, START)
    complete(state.schedule({}, START))
    judge = PodEvaluator(cluster, "binpack")

    def place(pod: Pod) -> object:
        placements = judge.placements(pod, "n", state.constraints(pod, START))
        return [it.slices[0].uuid for it in placements] if isinstance(placements, tuple) else None

    assert place(mig("b", "7g.40gb", at=2)) is None
    assert place(mig("b", "4g.20gb", at=2)) == ["GPU-n-0/0/4g.20gb"]
    assert place(waits(inside_pod_json("c", 4), 2)) == ["GPU-n-0/4/3g.20gb"]
    assert place(waits(inside_pod_json("d", 4, namespace="x"), 2)) == ["GPU-n-0/0/4g.20gb"]
    assert place(first) == ["GPU-n-0/4/3g.20gb"]


def test_event_of_a_pod_says_what_holds_the_first_node() -> None:
    """Rather than a node that will never have room; and how many others there are."""
    nodes = [mig_node("a", "T4"), mig_node("b", "A30")]
    nodes += [mig_node(name, "A100") for name in "xyz"]
    cluster = ClusterState(nodes)
    judge = PodEvaluator(cluster, "binpack")
    for name in "xyz":
        placements = judge.placements(mig("h", "7g.40gb"), name)
        assert isinstance(placements, tuple)
        cluster.assume(mig(f"h{name}", "7g.40gb"), placements)
    assert judge.explain(mig("p", "1g.5gb")) == (
        "x: no card has room for 1g.5gb: 0/0 7g.40gb is held by default/hx; "
        "2 more nodes may have room later"
    )
    assert str(judge.explain(mig("p", "9g.5gb"))).startswith(
        "no card has a profile 9g.5gb: A30 has"
    )
    assert judge.explain(mig("p", "1g.6gb")) is None


def used(*profiles: str) -> ClusterState:
    """Return a cluster of one A100 with a pod for each of these profiles."""
    cluster = ClusterState([mig_node("n", "A100")])
    judge = PodEvaluator(cluster, "binpack")
    for number, profile in enumerate(profiles):
        pod = mig(f"h{number}", profile)
        placements = judge.placements(pod, "n")
        assert isinstance(placements, tuple)
        cluster.assume(pod, placements)
    return cluster


def test_place_is_reserved_for_a_pod_that_starves() -> None:
    """The upper half is taken by a 2g and the lower one by a 1g, of which less is taken."""
    cluster = used("2g.10gb", "1g.5gb", "1g.5gb", "1g.5gb")
    large, small = mig("large", "3g.20gb", at=0), mig("small", "1g.5gb", at=1)
    fair = Fairness(penalty_per_request_s=60, max_penalty_s=3600)
    waiting = entries(cluster, large, small, fairness=fair, now=3000)
    assert waiting["large"].reservation is None
    assert on(waiting["small"])
    # `large` is the first of its namespace, and has waited for an hour.
    starving = entries(cluster, large, small, fairness=fair, now=3600)
    reservation = starving["large"].reservation
    assert reservation is not None
    assert len(reservation.cards) == 1
    assert not on(starving["small"])
    assert starving["small"].why == "what is free is reserved for requests before it"
