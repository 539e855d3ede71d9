"""The order of pods: what is kept off whom, and for how long. Time is a number here."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.entry_lifecycle import REQUEUE_AFTER_S, RESERVATION_TTL_S
from fenka.cluster.gang_members import GangMembers
from fenka.cluster.gang_reservations import GangScheduler
from fenka.cluster.objects import Node, Pod
from fenka.cluster.pod_placement import Infeasible, PodEvaluator
from fenka.cluster.pod_preemption import PodPreemption
from fenka.cluster.queue_state import queue_state
from fenka.cluster.state import ClusterState
from fenka.core.fairness import Fairness
from fenka.core.request import Placement
from fenka.dialects import gpushare
from fenka.scheduler.extender import Extender
from fenka.scheduler.queue_controller import QueueController
from tests.builders import GIB, T4_MIB, Json, node_json, on_card, pod_json

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
PLAIN = Fairness(penalty_per_request_s=0)
UNSCHEDULABLE: Json = {
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
}


def stamp(at: float) -> str:
    """So many seconds after the start."""
    return datetime.fromtimestamp(START + at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make(
    name: str,
    units: int,
    at: float = 0,
    *,
    runs: int | None = None,
    started: float | None = None,
    spec: Json | None = None,
    namespace: str = "default",
    said: Json | None = None,
    **rest: Any,
) -> Pod:
    """A pod asked for at that time. runs: its deadline, with no grace."""
    made = pod_json(name, units, uid=name, **rest)
    made["metadata"] |= {"creationTimestamp": stamp(at), "namespace": namespace}
    made["spec"] |= {"terminationGracePeriodSeconds": 0, **(spec or {})}
    if runs is not None:
        made["spec"]["activeDeadlineSeconds"] = runs
    if started is not None:
        made["status"]["startTime"] = stamp(started)
    made["status"] |= said or {}
    return msgspec.convert(made, Pod)


@dataclass
class Cluster:
    """Nodes, what is on them, and the order; `now` in seconds after the start."""

    nodes: list[Json]
    fairness: Fairness = PLAIN
    now: float = 0
    plans: dict[str, tuple[Placement, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = ClusterState(msgspec.convert(it, Node) for it in self.nodes)
        self.queue = QueueController(
            queue_state(self.world, fairness=self.fairness),
            lambda: self.plans,
            now=lambda: START + self.now,
            stopwatch=lambda: 0.0,
        )
        self.pods: dict[str, Pod] = {}
        members = GangMembers(self.world, lambda: {}, dict)
        self.gangs = GangScheduler(members, self.world, "binpack", lambda: self.now)
        self.evaluator = PodEvaluator(self.world, "binpack")
        self.preemption = PodPreemption(self.world, "binpack")
        self.extender = Extender(
            lambda: self.pods, self.queue, self.evaluator, self.gangs, self.preemption
        )
        self.names = [it["metadata"]["name"] for it in self.nodes]

    def set(self, *pods: Pod) -> None:
        """The informer brings them."""
        for pod in pods:
            self.world.set_pod(pod)
            self.queue.set_pod(pod)

    def gone(self, *names: str) -> None:
        """The informer reports that they were deleted."""
        for name in names:
            self.world.forget_pod(name)
            self.queue.forget_pod(name)

    def holds(self, name: str, card: int, units: int, node: str = "n", **rest: Any) -> None:
        """A pod that is on this card."""
        self.set(make(name, units, node=node, annotations=on_card(card, units), **rest))

    def ask(self, pod: Pod, *names: str) -> dict[str, str]:
        """As kube-scheduler does: sentences of the nodes that refuse it, empty if any does."""
        self.pods[pod.metadata.uid] = pod
        found = self.extender.filter(pod, names or self.names)
        return {} if found.fitting else {**found.failed, **found.unresolvable}

    def start(self, pod: Pod) -> str:
        """Filter, prioritize, bind: node/card, or the first sentence."""
        if refused := self.ask(pod):
            return next(iter(refused.values()))
        fitting = self.extender.filter(pod, self.names).fitting
        node = max(self.extender.prioritize(pod, fitting), key=lambda it: it[1])[0]
        return self.bind(pod, node)

    def bind(self, pod: Pod, node: str) -> str:
        """The last of the three alone."""
        found = self.extender.placements(pod, node)
        if isinstance(found, Infeasible):
            return found.sentence
        self.world.assume(pod, found)
        return f"{node}/{found[0].slices[0].card}"

    def wait(self, *pods: Pod) -> list[dict[str, str]]:
        """They come and are refused."""
        self.set(*pods)
        refused = [self.ask(pod) for pod in pods]
        assert all(refused), refused
        return refused


def two_cards() -> Cluster:
    """14 units each; 10 of card 0 are held until 300, 10 of card 1 until 200."""
    cluster = Cluster([node_json("n", T4_MIB, T4_MIB)])
    cluster.holds("h0", 0, 10, runs=300, started=0)
    cluster.holds("h1", 1, 10, runs=200, started=0)
    return cluster


def test_nothing_is_reserved_when_no_pod_is_pending() -> None:
    """A rejected pod is the first of the queue."""
    cluster = Cluster([node_json("n", T4_MIB)])
    assert cluster.start(make("p", 12)) == "n/0"
    assert cluster.ask(make("q", 4)) == {
        "n": "Insufficient GPU Memory in one device: 0/1 GPUs fit: 1 too little memory; "
        "position 1 of 1 in the queue"
    }


def test_small_pods_use_the_other_card_when_one_is_reserved() -> None:
    """The head requests 12 units: card 1 at 200. 4 units are free on each; binpack alone could use either."""
    cluster = two_cards()
    cluster.now = 10
    cluster.wait(make("head", 12, 1))
    assert cluster.queue.constraints(make("s", 2, 2)).reserved == {"GPU-n-1"}
    small = [make(f"s{number}", 2, 2 + number) for number in range(3)]
    cluster.set(*small)
    assert [cluster.start(it) for it in small[:2]] == ["n/0", "n/0"]
    # card 0 is full now, 14 of 14; card 1 has 4 left, for the head
    assert cluster.start(small[2]) == (
        "Insufficient GPU Memory in one device: 0/2 GPUs fit: 1 too little memory, "
        "1 reserved for requests before it; position 2 of 2 in the queue"
    )
    cluster.now = 200
    cluster.gone("h1")
    assert cluster.start(make("head", 12, 1)) == "n/1"


@pytest.mark.parametrize(
    ("runs", "grace", "expected"),
    [
        # now is 10, the head's card will do at 200
        (190, 0, "n/1"),
        (191, 0, "no"),
        (160, 30, "n/1"),
        # Kubernetes' grace for who does not say: 170 + 30 is after 190
        (170, None, "no"),
        (None, 0, "no"),
    ],
)
def test_reserved_card_is_backfilled_when_a_pod_ends_in_time(
    runs: int | None, grace: int | None, expected: str
) -> None:
    """It must have ended by then, grace included."""
    cluster = two_cards()
    cluster.holds("h2", 0, 4)
    cluster.now = 10
    cluster.wait(make("head", 12, 1))
    small = make("s", 4, 5, runs=runs, spec={"terminationGracePeriodSeconds": grace})
    cluster.set(small)
    found = cluster.start(small)
    assert found == expected if expected != "no" else "reserved" in found


def test_deadline_counts_when_the_node_has_not_started_the_pod_yet() -> None:
    """Otherwise the head would reserve another card until the kubelet reports the start."""
    cluster = two_cards()
    cluster.now = 10
    cluster.wait(make("head", 12, 1))
    small = make("s", 4, 5, runs=100)
    cluster.set(small)
    cluster.world.assume(small, cluster.extender.placements(small, "n"))  # type: ignore[arg-type]
    cluster.now = 11
    (place,) = cluster.queue.entries()
    assert place.reservation is not None
    assert place.reservation.starts_by == START + 200


@pytest.mark.parametrize(
    ("priority", "at", "expected"),
    [(None, 2, "reserved"), (5, 2, "n/0"), (None, 0.5, "n/0"), (-1, 0.5, "reserved")],
)
def test_reservation_does_not_apply_when_a_pod_is_before_its_owner(
    priority: int | None, at: float, expected: str
) -> None:
    """By priority, then by time: the head came at 1, with priority 0."""
    cluster = Cluster([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 10)
    cluster.wait(make("head", 12, 1))
    pod = make("p", 4, at, priority=priority)
    cluster.set(pod)
    assert expected in cluster.start(pod)


def test_card_is_held_when_a_pod_that_fits_is_in_backoff() -> None:
    """A later pod does not take it."""
    cluster = Cluster([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 14)
    head, later = make("head", 12, 1), make("later", 4, 2)
    cluster.wait(head)
    cluster.set(later)
    cluster.gone("h")
    cluster.now = 1
    # 14 - 12 = 2 are left beside it
    tiny = make("tiny", 2, 3)
    cluster.set(tiny)
    assert cluster.start(tiny) == "n/0"
    assert cluster.start(later) == (
        "0/1 GPUs fit: 1 reserved for requests before it; position 2 of 2 in the queue"
    )
    assert cluster.start(head) == "n/0"


def test_reservation_expires_when_the_pod_is_not_bound() -> None:
    """Something else blocks the head. After 15 s its card is free, until it is rejected again."""
    cluster = Cluster([node_json("n", T4_MIB)])
    head, later = make("head", 12, 1, said=UNSCHEDULABLE), make("later", 4, 2)
    cluster.set(head, later)
    assert "reserved" in cluster.start(later)
    cluster.now = RESERVATION_TTL_S - 0.1
    assert "reserved" in cluster.start(later)
    cluster.now = RESERVATION_TTL_S
    assert cluster.start(later) == "n/0"
    cluster.now += 1
    assert cluster.queue.entries() == ()
    # It is asked about again, and 10 are left: it names the card.
    assert "too little memory" in cluster.ask(head)["n"]
    assert [it.pending.id for it in cluster.queue.entries()] == ["head"]
    small = make("small", 2, 3)
    cluster.set(small)
    assert "reserved" in cluster.start(small)


def test_pod_is_requeued_when_room_comes_without_an_event() -> None:
    """The head is deleted: kube-scheduler would retry the next pod after minutes."""
    cluster = Cluster([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 8)
    cluster.wait(make("head", 12, 1), make("next", 4, 2))
    assert cluster.queue.pods_to_requeue(9) == []
    cluster.now = 1
    cluster.gone("head")
    assert cluster.queue.pods_to_requeue(9) == []
    cluster.now = 1 + REQUEUE_AFTER_S
    assert [it.metadata.name for it in cluster.queue.pods_to_requeue(9)] == ["next"]
    # Once, while it fits.
    assert cluster.queue.pods_to_requeue(9) == []
    cluster.holds("h2", 0, 4)
    cluster.now += 1
    assert cluster.queue.pods_to_requeue(9) == []
    cluster.gone("h2")
    cluster.now += 1
    assert cluster.queue.pods_to_requeue(9) == []
    cluster.now += REQUEUE_AFTER_S
    assert [it.metadata.name for it in cluster.queue.pods_to_requeue(9)] == ["next"]


def test_node_is_excluded_when_kube_scheduler_does_not_offer_it() -> None:
    """b's card would fit the head, but only a is offered: after 15 s b is free."""
    cluster = Cluster([node_json("a", T4_MIB), node_json("b", T4_MIB)])
    cluster.holds("h", 0, 10, "a")
    head, later = make("head", 12, 1), make("later", 4, 2)
    cluster.set(head, later)
    assert "too little memory" in cluster.ask(head, "a")["a"]
    assert "reserved" in cluster.ask(later, "b")["b"]
    cluster.now = 8
    cluster.ask(head, "a")
    cluster.now = RESERVATION_TTL_S
    # Now it names a's, and waits there as before.
    assert cluster.ask(later, "b") == {}
    assert "reserved" in cluster.ask(later, "a")["a"]
    # Once b is among the nodes that it is asked about, it counts again.
    cluster.holds("h2", 0, 10, "b")
    cluster.ask(head, "a", "b")
    cluster.gone("h2")
    cluster.now += 1
    assert "reserved" in cluster.ask(later, "b")["b"]


def test_stalled_pod_is_queued_again_when_its_condition_reports_a_shortage() -> None:
    """kube-scheduler does not call filter then."""
    said = {"conditions": [{**UNSCHEDULABLE["conditions"][0], "message": "0/1: pending volume"}]}
    units = f"0/1 nodes are available: 1 Insufficient {gpushare.MEMORY}"
    lacking = {"conditions": [{**UNSCHEDULABLE["conditions"][0], "message": units}]}
    cluster = Cluster([node_json("n", T4_MIB)])
    cluster.set(make("head", 12, 1, said=said))
    later = make("later", 4, 2)
    cluster.set(later)
    cluster.ask(later)
    cluster.now = RESERVATION_TTL_S
    assert cluster.start(later) == "n/0"
    cluster.set(make("head", 12, 1, said=lacking))
    small = make("small", 2, 3)
    assert "reserved" in cluster.ask(small)["n"]


def test_cards_are_reserved_only_when_the_pod_is_eligible_for_the_node() -> None:
    """A pod that is eligible for none blocks no other."""
    nodes = [node_json("a", T4_MIB, labels={"zone": "a"}), node_json("b", T4_MIB)]
    cluster = Cluster(nodes)
    cluster.holds("ha", 0, 10, "a", runs=900, started=0)
    cluster.holds("hb", 0, 10, "b", runs=100, started=0)
    cluster.wait(make("head", 12, 1, spec={"nodeSelector": {"zone": "a"}}))
    cluster.set(make("lost", 12, 0, spec={"nodeSelector": {"zone": "c"}}, said=UNSCHEDULABLE))
    assert [it.pending.id for it in cluster.queue.entries()] == ["head"]
    assert cluster.queue.constraints(make("s", 2, 2)).reserved == {"GPU-a-0"}
    # The node is cordoned: nothing is waited for there.
    nodes[0]["spec"]["unschedulable"] = True
    cluster.world.set_node(msgspec.convert(nodes[0], Node))
    cluster.now = 1
    assert cluster.queue.constraints(make("s", 2, 2)).reserved == frozenset()


def test_pod_is_not_queued_when_it_cannot_be_placed() -> None:
    """Gated, ending, finished, requesting nothing, too large for any card, or never rejected."""
    cluster = Cluster([node_json("n", T4_MIB)])
    gone = make("gone", 4, said=UNSCHEDULABLE)
    gone.metadata.deletion_timestamp = stamp(0)
    cluster.set(
        make("gated", 4, spec={"schedulingGates": [{"name": "quota"}]}, said=UNSCHEDULABLE),
        make("done", 4, phase="Failed", said=UNSCHEDULABLE),
        make("nothing", 0, said=UNSCHEDULABLE),
        make("huge", 20, said=UNSCHEDULABLE),
        make("new", 4),
        gone,
    )
    assert cluster.queue.entries() == ()
    assert cluster.queue.position(make("huge", 20, said=UNSCHEDULABLE)) == ""


def test_card_is_held_by_the_nodes_policy_when_its_label_names_one() -> None:
    """2 of 14 units of card 0 are used: binpack would hold card 0 for the head, spread holds card 1."""
    node = node_json("n", T4_MIB, T4_MIB, labels={"ack.node.gpu.placement": "spread"})
    cluster = Cluster([node])
    cluster.holds("h", 0, 2)
    cluster.set(make("head", 10, 1, said=UNSCHEDULABLE))
    (entry,) = cluster.queue.entries()
    assert [piece.card for piece in entry.placements[0].slices] == [1]


def test_queue_is_one_when_nodes_have_different_units() -> None:
    """a counts in GiB, b in MiB; 12 units are 12 GiB there and next to nothing here."""
    cluster = Cluster(
        [node_json("a", T4_MIB), node_json("b", T4_MIB, unit_mib=1), node_json("c", T4_MIB)]
    )
    cluster.holds("ha", 0, 10, "a", runs=200, started=0)
    cluster.holds("hc", 0, 10, "c", runs=100, started=0)
    cluster.holds("hb", 0, T4_MIB - 4, "b", runs=50, started=0)
    first, second = make("first", 12, 1), make("second", 4 * GIB, 2)
    cluster.now = 10
    cluster.wait(first)
    # It would start on b at 50, the earliest of all: the others are nobody's.
    assert cluster.queue.constraints(make("s", 2, 3)).reserved == {"GPU-b-0"}
    # 4,096 units fit b alone, behind the first: 15,079 - 12 are more than enough.
    cluster.wait(second)
    assert [it.pending.id for it in cluster.queue.entries()] == ["first", "second"]
    assert cluster.start(make("s", 2, 3)) in ("a/0", "c/0")
    cluster.gone("hb")
    cluster.now = 11
    assert cluster.start(first) == "b/0"
    assert cluster.start(second) == "b/0"


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
    cluster = Cluster([node_json("n", T4_MIB)], fairness)
    cluster.holds("h", 0, 14, namespace="a")
    cluster.now = 60
    pods = [
        make("a1", 8, 1, namespace="a"),
        make("a2", 8, 2, namespace="a"),
        make("b1", 8, 50, namespace="b"),
    ]
    cluster.wait(*pods)
    cluster.now = 61
    assert [it.pending.id for it in cluster.queue.entries()] == expected
    for pod in pods:
        rank = expected.index(pod.metadata.name) + 1
        assert cluster.queue.position(pod) == f"; position {rank} of 3 in the queue"
        assert f"position {rank} of 3" in cluster.ask(pod)["n"]


MANY = 200


def heavy(number: int, **rest: Any) -> Pod:
    """One of many pods of the namespace heavy, all created at once, which take the whole card."""
    return make(f"h{number}", 14, 0, namespace="heavy", **rest)


def ran(cluster: Cluster, pod: Pod, since: float, until: float) -> None:
    """It starts, and ends, while the watch looks on."""
    name, status = pod.metadata.name, {"startTime": stamp(since)}
    cluster.now = since
    held: dict[str, Any] = {"node": "n", "annotations": on_card(0, 14)}
    cluster.set(make(name, 14, 0, namespace=pod.metadata.namespace, said=status, **held))
    cluster.now = until
    cluster.gone(name)


def firsts(cluster: Cluster, count: int = 2) -> list[str]:
    """Return the names of the first in line."""
    return [it.pending.name for it in cluster.queue.entries()[:count]]


def test_namespace_is_first_when_it_has_used_less() -> None:
    """A long queue of short pods does not block a namespace that comes later."""
    cluster = Cluster([node_json("n", T4_MIB)], Fairness())
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
    cluster = Cluster([node_json("n", T4_MIB)], Fairness())
    cluster.set(*(heavy(number, said=UNSCHEDULABLE) for number in range(MANY)))
    late = make("late", 14, 5, namespace="light")
    cluster.set(late)
    assert "reserved" in cluster.start(late)
    cluster.now = RESERVATION_TTL_S
    assert firsts(cluster) == ["late", "h1"]
    assert cluster.start(late) == "n/0"
    assert cluster.queue.usage() == pytest.approx({"heavy": RESERVATION_TTL_S})


def test_use_is_rebuilt_when_a_replica_starts() -> None:
    """From the pods that the API server shows, running and finished."""
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": stamp(400)}
    ended = {"startTime": stamp(100), "conditions": [ready], "phase": "Succeeded"}
    runs = {"startTime": stamp(950), "phase": "Running"}
    on: dict[str, Any] = {"node": "n", "annotations": on_card(0, 14)}
    cluster = Cluster([node_json("n", T4_MIB)], Fairness(half_life_s=1e9), now=1000)
    pods = [
        make("ended", 14, 0, namespace="a", said=ended, **on),
        make("runs", 14, 0, namespace="b", said=runs, **on),
    ]
    for _ in range(2):
        cluster.set(*pods)
        cluster.queue.replace_pods(pods)
    used = cluster.queue.usage()
    assert used == pytest.approx({"a": 300, "b": 50}, rel=1e-3)
    cluster.now = 1100
    cluster.queue.replace_pods([])
    cluster.now = 2000
    assert cluster.queue.usage() == pytest.approx({"a": 300, "b": 150}, rel=1e-3)


def test_condition_is_read_when_it_has_no_time() -> None:
    """The API server answers null for a time that the writer of a condition has not set."""
    condition = {"type": "Ready", "status": "False", "lastTransitionTime": None}
    pod = make("p", 4, said={"conditions": [condition]})
    assert pod.ended_at == ""
    made = node_json("n", T4_MIB)
    made["status"]["conditions"] = [condition]
    assert not msgspec.convert(made, Node).ready


def test_use_is_counted_when_the_node_comes_after_the_pod() -> None:
    """Pods may come by the watch before their node does."""
    cluster = Cluster([node_json("n", T4_MIB)], Fairness(half_life_s=1e9), now=100)
    cluster.world.forget_node("n")
    on: dict[str, Any] = {"node": "n", "annotations": on_card(0, 7)}
    cluster.set(make("p", 7, 0, namespace="a", said={"startTime": stamp(0)}, **on))
    assert cluster.queue.usage() == {}
    cluster.world.set_node(msgspec.convert(node_json("n", T4_MIB), Node))
    cluster.wait(make("q", 14, 0))
    assert firsts(cluster) == ["q"]
    assert cluster.queue.usage() == pytest.approx({"a": 50}, rel=1e-3)


def test_bypass_is_measured_when_a_later_request_is_served_first() -> None:
    """b1, of 50, goes before a1 of 1: 49 s. c, of 55, uses what a1 does not wait for: none."""
    cluster = Cluster([node_json("n", T4_MIB, T4_MIB, T4_MIB)], Fairness(60, 3600))
    cluster.holds("h2", 2, 12, namespace="c")
    cluster.holds("h0", 0, 10, namespace="x", runs=100, started=0)
    cluster.holds("k", 0, 4, namespace="a")
    cluster.holds("h1", 1, 12, namespace="c", runs=500, started=0)
    cluster.now = 60
    a1 = make("a1", 8, 1, namespace="a")
    b1 = make("b1", 8, 50, namespace="b")
    cluster.wait(a1, b1)
    assert cluster.queue.max_bypass_s == 0
    # b1: 0, a1: 60 and what it has had, c: 120
    c = make("c", 2, 55, namespace="c")
    cluster.set(c)
    # b1 has named card 0, a1 card 1
    assert cluster.start(c) == "n/2"
    cluster.set(make("c", 2, 55, namespace="c", node="n", annotations=on_card(2, 2)))
    assert cluster.queue.max_bypass_s == 0
    cluster.gone("h0")
    cluster.now = 61
    assert cluster.start(b1) == "n/0"
    cluster.set(make("b1", 8, 50, namespace="b", node="n", annotations=on_card(0, 8)))
    cluster.now = 62
    assert cluster.queue.max_bypass_s == 49
    assert cluster.queue.max_bypass_bound_s == 3600
    cluster.gone("a1")
    assert cluster.queue.max_bypass_s == 0


def gang(name: str, units: int, at: float) -> Pod:
    """One of the gang g."""
    return make(name, units, at, labels={"pod-group.scheduling.sigs.k8s.io/name": "g"})


def test_gang_is_one_entry_when_its_members_are_pending() -> None:
    """Two of 8: both cards, when the later ends. A gang with a reservation is not pending."""
    cluster = two_cards()
    cluster.now = 10
    cluster.set(gang("g1", 8, 1), gang("g2", 8, 3))
    cluster.queue.reject(gang("g1", 8, 1), ["n"])
    (place,) = cluster.queue.entries()
    assert (place.pending.id, place.pending.name, len(place.pending.pods)) == ("default/g", "g", 2)
    ahead = cluster.queue.constraints(make("s", 2, 4))
    assert (set(ahead.reserved), ahead.position) == ({"GPU-n-0", "GPU-n-1"}, 2)
    # For its own members nothing is reserved.
    assert cluster.queue.constraints(gang("g2", 8, 3)).reserved == frozenset()
    cluster.plans = {"default/g": ()}
    cluster.now = 11
    assert cluster.queue.entries() == ()


def test_only_one_card_is_reserved_when_cards_have_no_uuid() -> None:
    """gpushare's own plugin publishes no UUIDs."""
    cluster = Cluster([node_json("n", T4_MIB, T4_MIB, inventory=False)])
    cluster.holds("h0", 0, 10, runs=300, started=0)
    cluster.holds("h1", 1, 10, runs=200, started=0)
    cluster.wait(make("head", 12, 1))
    small = make("s", 4, 2)
    cluster.set(small)
    assert cluster.start(small) == "n/0"
    holding = cluster.world.allocation("s")
    assert holding is not None
    assert [it.uuid for it in holding.slices] == ["n/0"]


def test_pod_is_not_evicted_when_another_would_get_the_card() -> None:
    """Both of priority 5; low is on the card that the first has reserved, and on no other."""
    cluster = Cluster([node_json("n", T4_MIB)])
    cluster.holds("low", 0, 10, priority=1)
    first, second = make("first", 12, 1, priority=5), make("second", 8, 2, priority=5)
    cluster.wait(first, second)
    results = cluster.extender.preempt(first, {"n": ["low"]}, {})
    assert results["n"].uids == ("low",)
    assert cluster.extender.preempt(second, {"n": ["low"]}, {}) == {}


# ---- from filter to bind ----


def test_bind_uses_the_constraints_of_filter_when_another_pod_came_since() -> None:
    """In between another came to wait, and named the card: the pod that was let through has it."""
    cluster = Cluster([node_json("n", T4_MIB)])
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
    cluster = Cluster([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 14)
    head, later = make("head", 6, 1), make("later", 6, 2)
    cluster.wait(head)
    cluster.set(later)
    cluster.gone("h")
    cluster.now = 1
    assert cluster.ask(later) == {}
    assert cluster.start(head) == "n/0"
    cluster.wait(make("third", 12, 0.5))
    assert cluster.bind(later, "n") == "n/0"


# ---- whatever happens ----


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("come"),
            st.integers(1, 14),
            st.none() | st.integers(1, 30),
            st.integers(0, 1),
        ),
        st.tuples(st.just("ask"), st.integers(0, 20)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("time"), st.integers(1, 5)),
    ),
    min_size=5,
    max_size=40,
)


def units_on(cluster: Cluster) -> Iterable[int]:
    """MiB held of each card."""
    for share in cluster.world.shared_nodes():
        for card in share.node.cards:
            yield cluster.world.card_usage(share.node.name, card.uuid).memory_mib


@settings(deadline=None, max_examples=150)
@given(events=EVENTS)
def test_entry_is_not_bypassed_on_its_cards_when_events_are_random(
    events: list[tuple[Any, ...]],
) -> None:
    """But by who proves to end before; and no card is overcommitted. Whatever comes, in whatever order."""
    cluster = Cluster([node_json("a", T4_MIB), node_json("b", T4_MIB, T4_MIB)])
    pods: dict[str, Pod] = {}
    running = ["h0", "h1", "h2"]
    cluster.holds("h0", 0, 8, "a", runs=20, started=0)
    cluster.holds("h1", 0, 8, "b")
    cluster.holds("h2", 1, 11, "b", runs=30, started=0)
    for event in events:
        kind, value = event[:2]
        if kind == "come":
            name = f"p{len(pods):03}"
            pods[name] = make(name, value, cluster.now, runs=event[2], priority=event[3])
            cluster.set(pods[name])
        elif kind == "time":
            cluster.now += value
        elif kind == "end" and running:
            gone = running.pop(value % len(running))
            cluster.gone(gone)
        elif kind == "ask" and (
            open_ := [it for it in pods if cluster.world.allocation(it) is None]
        ):
            pod = pods[open_[value % len(open_)]]
            if pod.metadata.name not in cluster.queue._state._open:
                continue
            # The line may not have been served since one of them was given a card.
            places = cluster.queue.entries()
            before = [it for it in places if cluster.world.allocation(it.pending.id) is None]
            got = cluster.start(pod)
            if "/" not in got or "GPUs" in got:
                continue
            holding = cluster.world.allocation(pod.metadata.uid)
            assert holding is not None
            running.append(pod.metadata.uid)
            mine = -(pod.spec.priority or 0), pod.metadata.creation_timestamp, pod.metadata.uid
            runs = pod.spec.active_deadline_seconds
            ends_by = None if runs is None else START + cluster.now + runs
            for place in before:
                head = place.pending.pods[0]
                theirs = (
                    -(head.spec.priority or 0),
                    head.metadata.creation_timestamp,
                    head.metadata.uid,
                )
                if theirs < mine and place.reservation and place.reservation.blocks(ends_by):
                    assert {it.uuid for it in holding.slices}.isdisjoint(place.reservation.cards)
        assert all(used <= T4_MIB for used in units_on(cluster))


# ---- beside a kube-scheduler ----


@dataclass
class KubeScheduler:
    """As far as it matters here: one pod at a time by priority and time, and who is refused rests.

    Doubling from 1 s to 10 s; then it is tried again once a pod has ended since it was refused.
    """

    cluster: Cluster
    resting: dict[str, tuple[Pod, float, float, int]] = field(default_factory=dict)
    """Until when at least, how long the next time, and how many had ended when it was refused."""
    ended: int = 0

    def turn(self, new: list[Pod]) -> dict[str, str]:
        """All that are to be tried now; who starts, and where."""
        now = self.cluster.now
        woken = [
            it
            for it, until, _, ended in self.resting.values()
            if until <= now and ended < self.ended
        ]
        started = {}
        for pod in sorted(
            [*new, *woken],
            key=lambda it: (-(it.spec.priority or 0), it.metadata.creation_timestamp),
        ):
            uid = pod.metadata.uid
            got = self.cluster.start(pod)
            if got[1:2] == "/":
                started[uid] = got
                self.resting.pop(uid, None)
            else:
                _, _, rest, _ = self.resting.get(uid, (pod, 0, 1, 0))
                self.resting[uid] = pod, now + rest, min(2 * rest, 10), self.ended
        return started


@pytest.mark.parametrize("ordered", [True, False])
def test_large_pod_starts_when_small_pods_keep_coming(ordered: bool) -> None:
    """Each second one of 4 units comes and runs for 20 s, with no deadline; the large one wants 14 of 14.

    Four cards hold 12 of 4 units at most, and 20 at once are wanted: some always wait. 18 wait before the
    large one, who all have begun at 51 (12 at 20 to 31, the others from 40 on); 20 s later they have ended.
    Without an order it never starts, because whatever ends is used again at once.
    """
    cluster = Cluster([node_json("n", T4_MIB, T4_MIB), node_json("m", T4_MIB, T4_MIB)])
    kube, running = KubeScheduler(cluster), dict[str, float]()
    if not ordered:
        nobody_pending = QueueController(queue_state(cluster.world))
        cluster.extender = Extender(
            dict, nobody_pending, cluster.evaluator, cluster.gangs, cluster.preemption
        )
    begun: dict[str, int] = {}
    for second in range(300):
        cluster.now = second
        for name in [name for name, ends in running.items() if ends <= second]:
            cluster.gone(name)
            del running[name]
            kube.ended += 1
        new = [make(f"s{second:03}", 4, second)]
        if second == 30:
            new.append(make("large", 14, second))
        cluster.set(*new)
        for uid in kube.turn(new):
            begun[uid] = second
            running[uid] = second + 20
    assert 51 <= begun.get("large", 999) <= 71 if ordered else "large" not in begun
