"""The queue's state by its events alone: which pods are pending, and when the snapshot is out of date."""

from collections.abc import Callable

import pytest

from fenka.cluster.objects import QUEUE_GATE, Pod
from fenka.cluster.queue_snapshot import POSITION
from fenka.cluster.queue_state import RESERVATION_TTL_S
from fenka.core.backfill import complete
from fenka.core.request import Placement
from tests.builders import Json, gang_labels, on_card
from tests.core.builders import piece
from tests.fakes.queue import START, UNSCHEDULABLE, QueueByEvents, make, pending

GATED: Json = {"schedulingGates": [{"name": QUEUE_GATE}]}


class Queue(QueueByEvents):
    """A queue, and whether its snapshot is out of date."""

    def scheduled(self) -> list[tuple[str, bool]]:
        """Schedule the queue. Return its entries in order, and whether each fits."""
        complete(self.state.schedule(self.gangs, START + self.now))
        return [(it.pending.id, bool(it.placements)) for it in self.state.entries()]

    @property
    def stale(self) -> bool:
        """Return whether the snapshot may differ from what scheduling would make now."""
        return self.state.is_stale(self.gangs, START + self.now)


def holder(units: int = 10) -> Pod:
    """Return a pod that runs on node n."""
    return make("h", units, node="n", annotations=on_card(0, units), started=0)


def test_pods_are_forgotten_when_they_are_not_listed_any_more() -> None:
    """A relist replaces all that was known, gated pods included."""
    queue = Queue(holder())
    gated = make("gated", 10, 2, spec=GATED)
    queue.set(pending("p"), pending("q", at=1), gated)
    assert queue.scheduled() == [("p", False), ("q", False), ("gated", False)]
    queue.state.replace_pods([pending("q", at=1)], START)
    assert queue.scheduled() == [("q", False)]
    assert queue.state.pods_to_ungate(9) == []
    queue.state.replace_pods([], START)
    assert queue.state.is_empty
    assert (queue.scheduled(), queue.state.entries()) == ([], ())


def test_pod_is_pending_when_kube_scheduler_has_found_no_node() -> None:
    """Before that it is only known; an unknown pod is pending once the API server shows it."""
    queue, new = Queue(holder()), make("new", 10)
    queue.set(new)
    assert (queue.state.is_empty, queue.scheduled()) == (True, [])
    queue.state.reject(new, ["n"], START)
    assert (queue.state.is_empty, queue.scheduled()) == (False, [("new", False)])
    late = make("late", 10, 5)
    queue.state.reject(late, ["n"], START)
    assert queue.scheduled() == [("new", False)]
    queue.set(late)
    assert queue.scheduled() == [("new", False), ("late", False)]


@pytest.mark.parametrize(
    "pod",
    [
        make("p", 0, said=UNSCHEDULABLE),
        make("p", 10, said=UNSCHEDULABLE, phase="Failed"),
        make("p", 10, node="n", annotations=on_card(0, 10)),
        make("p", 10, said=UNSCHEDULABLE, spec={"schedulingGates": [{"name": "team/quota"}]}),
    ],
)
def test_pod_leaves_the_queue_when_it_is_not_open_any_more(pod: Pod) -> None:
    """It has ended, has a node, has a foreign gate, or requests no card."""
    queue = Queue(holder(2))
    queue.set(pending("p"))
    assert queue.scheduled() == [("p", True)]
    queue.set(pod)
    assert (queue.state.is_empty, queue.scheduled()) == (True, [])


def gang_reserved(queue: Queue) -> None:
    """Reserve a slice for a gang."""
    queue.gangs = {"default/g": (Placement("n", (piece(0, 100, name="n"),)),)}


EVENTS: list[tuple[Callable[[Queue], object], bool]] = [
    (lambda _: None, False),
    # a pod that kube-scheduler has not tried changes nothing, unless its gang may be complete now
    (lambda queue: queue.set(make("new", 4)), False),
    (lambda queue: queue.set(make("new", 4, labels=gang_labels("g", 2))), True),
    (lambda queue: queue.set(pending("q")), True),
    (lambda queue: queue.state.reject(make("unknown", 4), ["n"], START), False),
    (lambda queue: queue.end("p"), True),
    (lambda queue: queue.end("unknown"), False),
    (lambda queue: queue.end("h"), True),
    (lambda queue: queue.cluster.set_unhealthy("n", frozenset({0})), True),
    (gang_reserved, True),
]


@pytest.mark.parametrize(("event", "expected"), EVENTS)
def test_snapshot_is_stale_when_an_event_may_change_it(
    event: Callable[[Queue], object], expected: bool
) -> None:
    """Pod p waits for the card that h holds."""
    queue = Queue(holder())
    queue.set(pending("p"))
    assert queue.stale
    assert queue.scheduled() == [("p", False)]
    assert not queue.stale
    event(queue)
    assert queue.stale is expected
    queue.scheduled()
    assert not queue.stale


def test_next_entry_gets_the_card_in_the_same_pass_when_a_reservation_expires() -> None:
    """p fits, and kube-scheduler has not tried it for 15 s: q has the card, and the snapshot is current."""
    queue = Queue()
    queue.set(pending("p"), pending("q", at=1))
    assert queue.scheduled() == [("p", True), ("q", False)]
    queue.now = RESERVATION_TTL_S - 0.1
    assert not queue.stale
    queue.now = RESERVATION_TTL_S
    assert queue.stale
    assert queue.scheduled() == [("q", True)]
    assert not queue.stale
    # The reservation of q was made now.
    queue.now = 2 * RESERVATION_TTL_S - 0.1
    assert not queue.stale
    queue.now = 2 * RESERVATION_TTL_S
    assert queue.stale
    assert queue.scheduled() == []


def test_pass_changes_nothing_when_not_all_its_steps_are_taken() -> None:
    """The next one starts again."""
    queue = Queue(holder())
    queue.set(pending("p"))
    steps = queue.state.schedule({}, START)
    next(steps)
    steps.close()
    assert (queue.state.entries(), queue.stale) == ((), True)
    assert queue.scheduled() == [("p", False)]


def test_snapshot_is_stale_when_an_event_comes_between_the_steps() -> None:
    """It belongs to some state since the first step, so the queue is scheduled again."""
    queue = Queue(holder())
    queue.set(pending("p"))
    steps = queue.state.schedule({}, START)
    next(steps)
    queue.set(pending("q", at=1))
    complete(steps)
    assert queue.stale
    assert queue.scheduled() == [("p", False), ("q", False)]


# ---- what is reserved for others ----


def test_pod_is_answered_by_what_entries_before_it_hold_or_reserve() -> None:
    """p fits and holds its slice until it is bound; r waits for the card; x would come last."""
    queue = Queue()
    fits, waits, last = pending("p"), pending("r", 12, 1), make("x", 1, 2)
    queue.set(fits, waits, last)
    assert queue.scheduled() == [("p", True), ("r", False)]

    def answer(pod: Pod) -> tuple[list[str], int, int, int]:
        constraints = queue.state.constraints(pod, START)
        held = [it.entry_id for it in constraints.held.get("n", ())]
        return held, len(constraints.reserved), constraints.position, constraints.total

    assert answer(fits) == ([], 0, 1, 2)
    assert answer(waits) == (["p"], 0, 2, 2)
    assert answer(last) == (["p"], 1, 3, 3)
    constraints = queue.state.constraints(last, START)
    assert constraints.nodes == {"n"}
    # What is being bound counts as allocated: nothing is held for it any more.
    (entry, _) = queue.state.entries()
    queue.cluster.assume(fits, entry.placements)
    assert answer(last) == ([], 1, 3, 3)
    assert queue.state.without_served(constraints).held == {"n": ()}
    queue.cluster.forget_assumed("p")
    assert queue.state.without_served(constraints) == constraints
    queue.end("r")
    assert answer(last) == (["p"], 0, 3, 3)


@pytest.mark.parametrize(
    ("runs", "reserved"),
    [
        # h has ended at 100, so whoever ends by then may use the card that p waits for
        (None, 1),
        (100, 0),
        (101, 1),
    ],
)
def test_reserved_card_is_open_to_pods_that_end_before_it_is_needed(
    runs: int | None, reserved: int
) -> None:
    """p needs 10 units, of which 14 - 10 = 4 are free until h ends."""
    queue = Queue(make("h", 10, node="n", annotations=on_card(0, 10), started=0, runs=100))
    short = make("short", 4, 5, runs=runs)
    queue.set(pending("p"), short)
    assert queue.scheduled() == [("p", False)]
    assert len(queue.state.constraints(short, START).reserved) == reserved


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (pending("p"), "; position 1 of 2 in the queue"),
        (pending("q", at=1), "; position 2 of 2 in the queue"),
        (make("new", 4, 2), "; position 3 of 3 in the queue"),
        (make("early", 4, -1), "; position 1 of 3 in the queue"),
        (make("vip", 4, 2, priority=5), "; position 1 of 3 in the queue"),
        # no node could ever hold it: the queue is not what it waits for
        (make("large", 15, 2), ""),
    ],
)
def test_position_is_where_the_pod_is_or_would_be(pod: Pod, expected: str) -> None:
    """By priority, then by time."""
    queue = Queue(holder())
    queue.set(pending("p"), pending("q", at=1))
    queue.scheduled()
    assert queue.state.position(pod, START) == expected


def saying(name: str, message: str, at: float = 0) -> Pod:
    """Return a pod of which kube-scheduler says this."""
    condition = {**UNSCHEDULABLE["conditions"][0], "message": message}
    return make(name, 10, at, said={"conditions": [condition]})


def reserving() -> Queue:
    """Return a queue whose card is reserved for pod p, and pod q behind it."""
    queue = Queue()
    queue.set(make("p", 10), make("q", 10, at=1))
    for name in ("p", "q"):
        queue.set(pending(name, at=float(name == "q")))
    assert queue.scheduled() == [("p", True), ("q", False)]
    return queue


def test_reservation_ends_at_once_when_kube_scheduler_finds_no_node_without_asking() -> None:
    """The pod lacks CPU, for example; the next one gets the card."""
    queue = reserving()
    queue.set(saying("p", "0/1 nodes are available: 1 Insufficient cpu."))
    assert queue.state.urgent
    assert queue.scheduled() == [("q", True)]
    # It is asked about once the CPU is free.
    queue.state.ask(saying("p", ""), ["n"])
    queue.state.reject(saying("p", ""), ["n"], START)
    assert ("p", True) in queue.scheduled()


def test_pod_that_waits_for_something_else_reserves_nothing_when_a_card_is_free_later() -> None:
    """kube-scheduler does not say the same again."""
    queue = Queue(holder())
    queue.set(make("p", 10), pending("q", at=1))
    queue.set(saying("p", "0/1 nodes are available: 1 Insufficient cpu."))
    assert queue.scheduled() == [("p", False), ("q", False)]
    queue.end("h")
    assert queue.scheduled() == [("q", True)]


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.", None),
        ("0/1 nodes are available: 1 Insufficient GPU Memory in one device.", ["n"]),
    ],
)
def test_reservation_stays_when_kube_scheduler_reports_that_cards_are_lacking(
    message: str, asked: list[str] | None
) -> None:
    """Its view is a moment older than the reservation."""
    queue = reserving()
    if asked is not None:
        queue.state.ask(pending("p"), asked)
        queue.state.reject(pending("p"), asked, START)
    queue.set(saying("p", message))
    assert queue.scheduled() == [("p", True), ("q", False)]


def test_node_is_excluded_at_once_when_kube_scheduler_asks_about_others_only() -> None:
    """Another rule keeps the pod from the node: the card goes to the next one until it is offered."""
    queue = reserving()
    queue.state.ask(pending("p"), ["other"])
    queue.set(saying("p", "0/2 nodes are available: 1 Insufficient cpu, 1 not for GPU share."))
    assert queue.scheduled() == [("q", True)]
    queue.state.ask(pending("p"), ["other", "n"])
    queue.state.reject(pending("p"), ["other", "n"], START)
    assert queue.scheduled() == [("p", True), ("q", False)]


def positions(queue: Queue) -> list[tuple[str, int | None]]:
    """Return which pods are to get which positions."""
    state = queue.state
    return [
        (pod.metadata.name, state.published_position(pod)) for pod in state.pods_to_position(99)
    ]


def test_positions_are_published_of_gated_pods_and_of_the_first() -> None:
    """A pod without the gate is retried when it changes, so only the first four of these change."""
    queue = Queue(holder())
    queue.set(*(pending(f"p{number}", at=number) for number in range(6)))
    queue.scheduled()
    assert positions(queue) == [("p0", 1), ("p1", 2), ("p2", 3), ("p3", 4)]
    assert [pod.metadata.name for pod in queue.state.pods_to_position(1)] == ["p0"]
    queue.set(make("p5", 10, 5, spec=GATED))
    queue.scheduled()
    assert positions(queue)[-1] == ("p5", 6)


@pytest.mark.parametrize("published", ["5", "x", "-1", "²", "9" * 5000])
def test_position_is_corrected_when_users_write_it(published: str) -> None:
    """Also of a pod that is not in the queue any more: then it is removed."""
    queue = Queue(holder())
    queue.set(make("p", 10, annotations={POSITION: published}, said=UNSCHEDULABLE))
    queue.scheduled()
    assert positions(queue) == [("p", 1)]
    queue.set(make("p", 10, annotations={POSITION: "1"}, said=UNSCHEDULABLE))
    queue.scheduled()
    assert positions(queue) == []
