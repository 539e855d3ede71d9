"""The queue of pods: which cards are reserved for whom, and for how long, on a virtual clock."""

import msgspec
import pytest

from fenka.cluster.objects import Node
from fenka.cluster.queue_state import REQUEUE_AFTER_S, RESERVATION_TTL_S
from fenka.dialects import gpushare
from tests.builders import GIB, T4_MIB, node_json
from tests.fakes.extender import ExtenderHarness, freed_card, two_cards
from tests.fakes.queue import START, UNSCHEDULABLE, gang, make, stamp


def test_nothing_is_reserved_when_no_pod_is_pending() -> None:
    """A rejected pod is the first of the queue."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    assert cluster.start(make("p", 12)) == "n/0"
    assert cluster.ask(make("q", 4)) == {
        "n": "Insufficient GPU Memory in one device: no GPU fits: 1 of 1 has too little memory; "
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
        "Insufficient GPU Memory in one device: no GPU fits: 1 of 2 has too little memory, "
        "1 is reserved for requests before it; position 2 of 2 in the queue"
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
    cluster.state.assume(small, cluster.extender.placements(small, "n"))  # type: ignore[arg-type]
    cluster.now = 11
    (place,) = cluster.queue.refreshed().entries()
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
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 10)
    cluster.wait(make("head", 12, 1))
    pod = make("p", 4, at, priority=priority)
    cluster.set(pod)
    assert expected in cluster.start(pod)


def test_card_is_held_when_a_pod_that_fits_is_in_backoff() -> None:
    """A later pod does not take it."""
    cluster, head, later = freed_card(12, 4)
    # 14 - 12 = 2 are left beside it
    tiny = make("tiny", 2, 3)
    cluster.set(tiny)
    assert cluster.start(tiny) == "n/0"
    assert cluster.start(later) == (
        "no GPU fits: 1 of 1 is reserved for requests before it; position 2 of 2 in the queue"
    )
    assert cluster.start(head) == "n/0"


def test_reservation_expires_when_the_pod_is_not_bound() -> None:
    """Something else blocks the head. After 15 s its card is free, until it is rejected again."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    head, later = make("head", 12, 1, said=UNSCHEDULABLE), make("later", 4, 2)
    cluster.set(head, later)
    assert "reserved" in cluster.start(later)
    cluster.now = RESERVATION_TTL_S - 0.1
    assert "reserved" in cluster.start(later)
    cluster.now = RESERVATION_TTL_S
    assert cluster.start(later) == "n/0"
    cluster.now += 1
    assert cluster.queue.refreshed().entries() == ()
    # It is asked about again, and 10 are left: it names the card.
    assert "too little memory" in cluster.ask(head)["n"]
    assert [it.pending.id for it in cluster.queue.refreshed().entries()] == ["head"]
    small = make("small", 2, 3)
    cluster.set(small)
    assert "reserved" in cluster.start(small)


def test_pod_is_requeued_when_room_comes_without_an_event() -> None:
    """The head is deleted: kube-scheduler would retry the next pod after minutes."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 8)
    cluster.wait(make("head", 12, 1), make("next", 4, 2))
    assert cluster.queue.refreshed().pods_to_requeue(9, cluster.queue.now()) == []
    cluster.now = 1
    cluster.gone("head")
    assert cluster.queue.refreshed().pods_to_requeue(9, cluster.queue.now()) == []
    cluster.now = 1 + REQUEUE_AFTER_S
    assert [
        it.metadata.name for it in cluster.queue.refreshed().pods_to_requeue(9, cluster.queue.now())
    ] == ["next"]
    # Once, while it fits.
    assert cluster.queue.refreshed().pods_to_requeue(9, cluster.queue.now()) == []
    cluster.holds("h2", 0, 4)
    cluster.now += 1
    assert cluster.queue.refreshed().pods_to_requeue(9, cluster.queue.now()) == []
    cluster.gone("h2")
    cluster.now += 1
    assert cluster.queue.refreshed().pods_to_requeue(9, cluster.queue.now()) == []
    cluster.now += REQUEUE_AFTER_S
    assert [
        it.metadata.name for it in cluster.queue.refreshed().pods_to_requeue(9, cluster.queue.now())
    ] == ["next"]


def test_node_is_excluded_when_kube_scheduler_does_not_offer_it() -> None:
    """b's card would fit the head, but only a is offered: after 15 s b is free."""
    cluster = ExtenderHarness([node_json("a", T4_MIB), node_json("b", T4_MIB)])
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
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
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
    cluster = ExtenderHarness(nodes)
    cluster.holds("ha", 0, 10, "a", runs=900, started=0)
    cluster.holds("hb", 0, 10, "b", runs=100, started=0)
    cluster.wait(make("head", 12, 1, spec={"nodeSelector": {"zone": "a"}}))
    cluster.set(make("lost", 12, 0, spec={"nodeSelector": {"zone": "c"}}, said=UNSCHEDULABLE))
    assert [it.pending.id for it in cluster.queue.refreshed().entries()] == ["head"]
    assert cluster.queue.constraints(make("s", 2, 2)).reserved == {"GPU-a-0"}
    # The node is cordoned: nothing is waited for there.
    nodes[0]["spec"]["unschedulable"] = True
    cluster.state.set_node(msgspec.convert(nodes[0], Node))
    cluster.now = 1
    assert cluster.queue.constraints(make("s", 2, 2)).reserved == frozenset()


def test_pod_is_not_queued_when_it_cannot_be_placed() -> None:
    """Gated, ending, finished, requesting nothing, too large for any card, or never rejected."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
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
    assert cluster.queue.refreshed().entries() == ()
    assert cluster.queue.position(make("huge", 20, said=UNSCHEDULABLE)) == ""


def test_card_is_held_by_the_nodes_policy_when_its_label_names_one() -> None:
    """2 of 14 units of card 0 are used: binpack would hold card 0 for the head, spread holds card 1."""
    node = node_json("n", T4_MIB, T4_MIB, labels={"ack.node.gpu.placement": "spread"})
    cluster = ExtenderHarness([node])
    cluster.holds("h", 0, 2)
    cluster.set(make("head", 10, 1, said=UNSCHEDULABLE))
    (entry,) = cluster.queue.refreshed().entries()
    assert [piece.card for piece in entry.placements[0].slices] == [1]


def test_queue_is_one_when_nodes_have_different_units() -> None:
    """a counts in GiB, b in MiB; 12 units are 12 GiB there and next to nothing here."""
    cluster = ExtenderHarness(
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
    assert [it.pending.id for it in cluster.queue.refreshed().entries()] == ["first", "second"]
    assert cluster.start(make("s", 2, 3)) in ("a/0", "c/0")
    cluster.gone("hb")
    cluster.now = 11
    assert cluster.start(first) == "b/0"
    assert cluster.start(second) == "b/0"


def test_gang_is_one_entry_when_its_members_are_pending() -> None:
    """Two of 8: both cards, when the later ends. A gang with a reservation is not pending."""
    cluster = two_cards()
    cluster.now = 10
    cluster.set(gang("g1", 8, 1), gang("g2", 8, 3))
    cluster.queue.reject(gang("g1", 8, 1), ["n"])
    (place,) = cluster.queue.refreshed().entries()
    assert (place.pending.id, place.pending.name, len(place.pending.pods)) == ("default/g", "g", 2)
    ahead = cluster.queue.constraints(make("s", 2, 4))
    assert (set(ahead.reserved), ahead.position) == ({"GPU-n-0", "GPU-n-1"}, 2)
    # For its own members nothing is reserved.
    assert cluster.queue.constraints(gang("g2", 8, 3)).reserved == frozenset()
    cluster.plans = {"default/g": ()}
    cluster.now = 11
    assert cluster.queue.refreshed().entries() == ()


def test_only_one_card_is_reserved_when_cards_have_no_uuid() -> None:
    """gpushare's own plugin publishes no UUIDs."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB, inventory=False)])
    cluster.holds("h0", 0, 10, runs=300, started=0)
    cluster.holds("h1", 1, 10, runs=200, started=0)
    cluster.wait(make("head", 12, 1))
    small = make("s", 4, 2)
    cluster.set(small)
    assert cluster.start(small) == "n/0"
    holding = cluster.state.allocation("s")
    assert holding is not None
    assert [it.uuid for it in holding.slices] == ["n/0"]
