"""What the queue's state answers after events: urgency, bypassed requests, pods to requeue and to ungate."""

from collections.abc import Callable

import pytest

from fenka.cluster.objects import QUEUE_GATE, Pod
from fenka.cluster.pending_queue import DEPTH
from fenka.cluster.queue_state import REQUEUE_AFTER_S, RESERVATION_TTL_S, entry_id
from fenka.core.backfill import complete
from fenka.core.queue import Fairness
from tests.builders import T4_MIB, Json, a_node, gang_labels, on_card
from tests.fakes.queue import START, QueueByEvents, gang, make, pending

GATED: Json = {"schedulingGates": [{"name": QUEUE_GATE}]}


class Queue(QueueByEvents):
    """A queue, and what it answers."""

    def scheduled(self, now: float | None = None) -> list[str]:
        """Schedule the queue, and return the entries in order."""
        self.now = self.now if now is None else now
        complete(self.state.schedule(self.gangs, START + self.now))
        return [entry.pending.id for entry in self.state.entries()]

    def requeued(self, now: float, limit: int = 9) -> list[str]:
        """Return the pods that kube-scheduler is asked to try."""
        self.scheduled(now)
        return [pod.metadata.name for pod in self.state.pods_to_requeue(limit, START + now)]


def holder(units: int = 14, card: int = 0) -> Pod:
    """Return a pod that runs on a card of node n."""
    return make(f"h{card}", units, node="n", annotations=on_card(card, units), started=0)


# ---- what is in the queue ----


def test_listed_pods_are_in_the_queue_when_they_were_not_known() -> None:
    """After a reconnection a pod may be listed of which no event came."""
    queue = Queue(holder())
    queue.state.replace_pods([pending("p"), pending("q", at=1)], START)
    assert queue.scheduled() == ["p", "q"]
    queue.state.replace_pods([pending("q", at=1), pending("r", at=2)], START)
    assert queue.scheduled() == ["q", "r"]


def test_nothing_is_shown_when_the_last_pod_has_gone() -> None:
    """The last snapshot still has it until the queue is scheduled again."""
    queue = Queue(holder())
    queue.set(pending("p"))
    queue.scheduled()
    queue.end("p")
    assert queue.state.snapshot.entries
    assert queue.state.entries() == ()


def test_use_of_a_namespace_is_shown_while_its_pods_run() -> None:
    """One whole card since 0, and half of one since 100: 1 * 300 + 0.5 * 200."""
    queue = Queue(fairness=Fairness(half_life_s=1e12))
    queue.set(make("a", 14, node="n", annotations=on_card(0, 14), started=0))
    queue.now = 100
    queue.set(make("b", 7, 100, node="n", annotations=on_card(0, 7), started=100))
    assert queue.state.usage(START + 300)["default"] == pytest.approx(400, abs=0.1)
    queue.now = 300
    queue.end("a")
    assert queue.state.usage(START + 400)["default"] == pytest.approx(450, abs=0.1)


def test_pods_use_counts_after_its_node_is_known() -> None:
    """Scheduling the queue looks for them: 14 of 14 units from 0 to 100."""
    queue = Queue(fairness=Fairness(half_life_s=1e12))
    away = make("p", 14, node="late", annotations=on_card(0, 14), started=0)
    queue.set(away)
    queue.cluster.set_node(a_node("late", T4_MIB))
    queue.scheduled(100)
    assert queue.state.usage(START + 100)["default"] == pytest.approx(100)


def test_entry_is_the_gang_of_a_pod_or_the_pod() -> None:
    """By namespace and name, or by UID."""
    assert entry_id(pending("p")) == "p"
    assert entry_id(gang("g1", 4, 0)) == "default/g"


# ---- urgency ----


@pytest.mark.parametrize(
    ("before", "new", "expected"),
    [
        # the first four reserve cards: a fifth need not be scheduled at once if it is behind them
        (0, pending("new", at=9), True),
        (DEPTH - 1, pending("new", at=9), True),
        (DEPTH, pending("new", at=9), False),
        # unless it comes before one of them
        (DEPTH, pending("new", at=0.5), True),
        (DEPTH, pending("new", at=9, priority=5), True),
        # no node could hold it
        (0, pending("new", 15), False),
    ],
)
def test_queue_is_urgent_when_a_new_entry_would_reserve_cards(
    before: int, new: Pod, expected: bool
) -> None:
    """Another pod could take them otherwise, before the queue is scheduled the next time."""
    queue = Queue(*(holder(card=card) for card in range(6)), cards=6)
    queue.set(*(pending(f"p{number}", at=1 + number) for number in range(before)))
    queue.scheduled()
    assert not queue.state.urgent
    queue.set(new)
    assert queue.state.urgent is expected
    queue.scheduled()
    assert not queue.state.urgent


def test_queue_stays_urgent_when_another_event_would_not_make_it_so() -> None:
    """Until it is scheduled."""
    queue = Queue(holder())
    queue.scheduled()
    queue.set(pending("p"))
    assert queue.state.urgent
    queue.set(pending("never", 15))
    assert queue.state.urgent


# ---- bypassed requests ----


@pytest.mark.parametrize(
    ("waiting", "served", "expected"),
    [
        # it came 40 s later than the one that still waits
        (pending("w", 14, 10, namespace="a"), make("s", 4, 50, namespace="b"), 40),
        # it came before
        (pending("w", 14, 50, namespace="a"), make("s", 4, 10, namespace="b"), 0),
        # of a higher priority, or of a lower one
        (pending("w", 14, 10, namespace="a"), make("s", 4, 50, namespace="b", priority=5), 0),
        (pending("w", 14, 10, namespace="a", priority=5), make("s", 4, 50, namespace="b"), 0),
        # a namespace that waits for its own pods
        (pending("w", 14, 10, namespace="a"), make("s", 4, 50, namespace="a"), 0),
    ],
)
def test_bypass_is_the_time_between_the_requests(
    waiting: Pod, served: Pod, expected: float
) -> None:
    """b has nothing and a holds a slice, so b's later request is before a's."""
    held = make("h", 10, node="n", annotations=on_card(0, 10), started=0, namespace="a")
    queue = Queue(held, fairness=Fairness(penalty_per_request_s=60))
    queue.set(waiting, served)
    queue.scheduled(100)
    assert queue.state.max_bypass_s() == 0
    queue.set(
        make("s", 4, 50, node="n", annotations=on_card(0, 4), namespace=served.metadata.namespace)
    )
    assert queue.state.max_bypass_s() == expected
    assert queue.state.max_bypass_bound_s == 3600
    # forgotten with the entry
    queue.end("w")
    assert queue.state.max_bypass_s() == 0


# ---- pods to requeue ----


def test_pods_are_requeued_up_to_a_limit_in_order() -> None:
    """Three fit since 0; a gang counts with all of its pods, and each entry only once."""
    queue = Queue(cards=3)
    queue.set(pending("a", at=1), gang("g1", 10, 2), gang("g2", 10, 2), pending("b", 4, at=3))
    queue.state.reject(gang("g1", 10, 2), [], START)
    assert queue.requeued(0) == []
    assert queue.requeued(REQUEUE_AFTER_S, limit=1) == ["a"]
    assert queue.requeued(REQUEUE_AFTER_S, limit=1) == ["g1", "g2"]
    assert queue.requeued(REQUEUE_AFTER_S) == ["b"]
    assert queue.requeued(REQUEUE_AFTER_S) == []


def test_gated_pod_is_not_requeued_before_its_gate_is_removed() -> None:
    """kube-scheduler does not try it; it is ungated instead."""
    queue = Queue()
    queue.set(make("p", 4, spec=GATED))
    assert queue.requeued(0) == []
    assert queue.requeued(REQUEUE_AFTER_S) == []
    assert [pod.metadata.name for pod in queue.state.pods_to_ungate(9)] == ["p"]


@pytest.mark.parametrize(
    "event",
    [
        lambda queue: queue.end("p"),
        lambda queue: queue.set(make("p", 4, node="n", annotations=on_card(0, 4))),
        lambda queue: queue.cluster.assume(pending("p", 4), queue.state.entries()[0].placements),
    ],
)
def test_served_pod_is_not_requeued(event: Callable[[Queue], object]) -> None:
    """It is deleted or bound, or its binding is on its way, since the queue was scheduled."""
    queue = Queue()
    queue.set(pending("p", 4), pending("q", 4, at=1))
    queue.scheduled(0)
    queue.scheduled(REQUEUE_AFTER_S)
    event(queue)
    names = [pod.metadata.name for pod in queue.state.pods_to_requeue(9, START + REQUEUE_AFTER_S)]
    assert names == ["q"]


# ---- expiry ----


def test_stalled_pod_is_ungated_and_leaves_its_card_to_the_next() -> None:
    """15 s after its reservation; its namespace has used the card meanwhile."""
    queue = Queue(fairness=Fairness(half_life_s=1e12, penalty_per_request_s=0))
    queue.set(pending("p", 14, namespace="a"), pending("q", 14, 1, namespace="b"))
    assert queue.scheduled(0) == ["p", "q"]
    assert queue.scheduled(RESERVATION_TTL_S) == ["q"]
    assert queue.state.usage(START + RESERVATION_TTL_S) == {"a": pytest.approx(RESERVATION_TTL_S)}
    # q's own reservation begins now
    assert queue.scheduled(2 * RESERVATION_TTL_S - 1) == ["q"]
    assert queue.scheduled(2 * RESERVATION_TTL_S) == []


def test_message_of_another_kind_does_not_bring_a_stalled_pod_back() -> None:
    """kube-scheduler must report that a GPU resource is lacking."""
    queue = Queue()
    queue.set(pending("p", 4))
    queue.scheduled(0)
    assert queue.scheduled(RESERVATION_TTL_S) == []
    condition: Json = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    for message, expected in (
        ("1 node(s) had untolerated taints", []),
        ("1 Insufficient cpu", []),
        ("1 Insufficient aliyun.com/gpu-mem", ["p"]),
    ):
        queue.set(make("p", 4, said={"conditions": [{**condition, "message": message}]}))
        assert queue.scheduled() == expected


# ---- ungating ----


def test_gang_that_lacks_pods_has_one_ungated() -> None:
    """Its events say how many are missing; another namespace's gang of that name is another one."""
    queue = Queue(holder())
    labels = gang_labels("g", 3)
    queue.set(
        *(make(f"g{number}", 4, number, labels=labels, spec=GATED) for number in range(2)),
        make("other", 4, 5, labels=labels, spec=GATED, namespace="team"),
    )
    queue.scheduled()
    assert [pod.metadata.name for pod in queue.state.pods_to_ungate(9)] == ["g0", "other"]
    assert [pod.metadata.name for pod in queue.state.pods_to_ungate(1)] == ["g0"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"spec": GATED}, ["p"]),
        # a quota's controller has not agreed yet
        ({"spec": {"schedulingGates": [{"name": QUEUE_GATE}, {"name": "team/quota"}]}}, []),
        ({"spec": {"schedulingGates": [{"name": "team/quota"}]}}, []),
        ({"spec": GATED, "phase": "Failed"}, []),
        ({}, []),
    ],
)
def test_pod_is_ungated_when_only_fenkas_gate_is_left(given: Json, expected: list[str]) -> None:
    """The card is free."""
    queue = Queue()
    queue.set(make("p", 4, **given))
    queue.scheduled()
    assert [pod.metadata.name for pod in queue.state.pods_to_ungate(9)] == expected


def test_gated_pod_is_not_ungated_when_it_is_being_deleted() -> None:
    """Nobody waits for it."""
    queue = Queue()
    pod = make("p", 4, spec=GATED)
    pod.metadata.deletion_timestamp = "2026-01-01T00:00:00Z"
    queue.set(pod)
    queue.scheduled()
    assert queue.state.pods_to_ungate(9) == []


def test_pods_to_ungate_are_found_again_when_the_queue_or_its_pods_change() -> None:
    """Nothing to do is remembered for one snapshot and one number of gated pods."""
    queue = Queue(*(holder(card=card) for card in range(6)), cards=6)
    gated = [make(f"p{number}", 14, number, spec=GATED) for number in range(2 * DEPTH + 1)]
    queue.set(*gated)
    queue.scheduled()
    # those that reserve cards; all of them are among the first that do not fit
    assert [pod.metadata.name for pod in queue.state.pods_to_ungate(9)] == ["p0", "p1", "p2", "p3"]
    queue.set(*(pending(f"p{number}", 14, number) for number in range(DEPTH)))
    queue.scheduled()
    assert queue.state.pods_to_ungate(9) == []
    assert queue.state.pods_to_ungate(9) == []
    queue.end("p0")
    queue.scheduled()
    assert [pod.metadata.name for pod in queue.state.pods_to_ungate(9)] == ["p4"]


# ---- lists and rejections ----


def test_rejected_pod_stays_pending_when_the_list_does_not_show_its_rejection_yet() -> None:
    """kube-scheduler writes the pod's condition later; the extender has rejected it already."""
    queue = Queue(holder())
    pod = make("p", 10)
    queue.set(pod)
    queue.state.reject(pod, ["n"], START)
    queue.state.replace_pods([make("p", 10), pending("q", at=1)], START)
    assert queue.scheduled() == ["p", "q"]


def test_use_ends_when_a_list_does_not_have_the_pod_any_more() -> None:
    """Its deletion was missed: one card from 0 to 100."""
    queue = Queue(fairness=Fairness(half_life_s=1e12))
    queue.set(holder())
    queue.state.replace_pods([], START + 100)
    assert queue.state.usage(START + 300)["default"] == pytest.approx(100)


def test_first_rejection_makes_the_queue_urgent_and_the_second_does_not() -> None:
    """A pod is asked about again and again while it waits."""
    queue = Queue(holder())
    pod = make("p", 10)
    queue.set(pod)
    queue.scheduled()
    assert not queue.state.urgent
    queue.state.reject(pod, ["n"], START)
    assert queue.state.urgent
    assert queue.state.is_stale({}, START)
    queue.scheduled()
    queue.state.reject(pod, ["n"], START)
    assert not queue.state.urgent
    assert not queue.state.is_stale({}, START)


def test_rejection_brings_a_stalled_pod_back() -> None:
    """Its card is held for it again, at once."""
    queue = Queue()
    pod = pending("p", 4)
    queue.set(pod)
    queue.scheduled(0)
    assert queue.scheduled(RESERVATION_TTL_S) == []
    queue.state.reject(pod, ["n"], START + RESERVATION_TTL_S)
    assert queue.state.urgent
    assert queue.scheduled() == ["p"]


def test_deleted_pod_is_not_ungated_although_the_snapshot_still_has_it() -> None:
    """Its patch would fail."""
    queue = Queue()
    queue.set(make("p", 4, spec=GATED), make("q", 4, 1, spec=GATED))
    queue.scheduled()
    queue.end("p")
    assert [pod.metadata.name for pod in queue.state.pods_to_ungate(9)] == ["q"]


def test_gang_is_not_requeued_while_one_of_its_members_is_gated() -> None:
    """kube-scheduler would try a half of it."""
    queue = Queue()
    labels = gang_labels("g", 2)
    queue.set(pending("g1", 4, labels=labels), make("g2", 4, labels=labels, spec=GATED))
    assert queue.requeued(0) == []
    assert queue.requeued(REQUEUE_AFTER_S) == []
    queue.set(make("g2", 4, labels=labels))
    assert queue.requeued(2 * REQUEUE_AFTER_S) == ["g1", "g2"]
