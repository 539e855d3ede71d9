"""Stories of several pods, as the API server and kube-scheduler report them: in any order, and with gaps."""

import msgspec
import pytest

from fenka.cluster.explain import explain
from fenka.cluster.gang_placement import RESERVATION_TTL_S as GANG_TTL_S
from fenka.cluster.objects import Node, Pod
from fenka.cluster.queue_state import RESERVATION_TTL_S
from fenka.cluster.state import ClusterSnapshot, ClusterState
from fenka.core.request import Placement, Slice
from tests.builders import T4_MIB, a_node, a_pod, gang_labels, node_json, on_card
from tests.core.builders import device
from tests.fakes.extender import ExtenderHarness, freed_card, on_t4
from tests.fakes.queue import UNSCHEDULABLE, make

FULL = "too little memory"


def used(state: ClusterState, node: str = "n", card: int = 0) -> int:
    """Return the MiB that are held of a card."""
    return state.card_usage(node, device(card, node)).memory_mib


def on(name: str, units: int, card: int = 0, node: str = "n", uid: str = "") -> Pod:
    """Return a pod that runs there. 7 of 14 units of a T4 are 7,539 MiB, 4 are 4,308."""
    record = on_card(card, units)
    return a_pod(name, units, node=node, uid=uid or name, phase="Running", annotations=record)


# ---- two users ----


def test_two_users_fill_two_cards_and_the_third_pod_follows_the_first_that_ends() -> None:
    """ann has 10 + 4 on card 0, bob 10 on card 1: 4 are left there, and ann's next 8 wait."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB)])
    first = make("ann-1", 10, 1, namespace="ann")
    second = make("bob-1", 10, 2, namespace="bob")
    third = make("ann-2", 4, 3, namespace="ann")
    cluster.set(first, second, third)
    assert cluster.start(first) == "n/0"
    assert cluster.start(second) == "n/1"
    assert cluster.start(third) == "n/0"
    fourth = make("ann-3", 8, 4, namespace="ann")
    cluster.set(fourth)
    assert cluster.start(fourth) == (
        f"Insufficient GPU Memory in one device: no GPU fits: 2 of 2 have {FULL}; "
        "position 1 of 1 in the queue"
    )
    # 14 - 4 = 10 >= 8 on card 0; 14 - 10 = 4 < 8 on card 1
    cluster.gone("ann-1")
    assert cluster.start(fourth) == "n/0"
    # 4 + 8 of 14
    assert used(cluster.state) == 4308 + 8616
    cluster.gone("bob-1", "ann-2", "ann-3")
    assert [used(cluster.state, card=card) for card in (0, 1)] == [0, 0]


def test_small_pods_of_one_user_do_not_delay_the_large_one_of_another() -> None:
    """bob's 14 wait for card 0. ann's pods of 2 go to card 1 alone, however many there are."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB)])
    cluster.holds("h0", 0, 2, runs=100, started=0)
    cluster.holds("h1", 1, 2)
    cluster.now = 10
    cluster.wait(make("bob", 14, 1, namespace="bob"))
    small = [make(f"ann-{number}", 2, 2 + number, namespace="ann") for number in range(7)]
    cluster.set(*small)
    # 2 + 6 * 2 = 14
    assert [cluster.start(pod) for pod in small[:6]] == ["n/1"] * 6
    assert "1 is reserved for requests before it" in cluster.start(small[6])
    cluster.now = 100
    cluster.gone("h0")
    assert cluster.start(cluster.pods["bob"]) == "n/0"
    assert used(cluster.state) == T4_MIB


def test_pods_end_in_another_order_than_they_came() -> None:
    """Each pod is served as soon as what it needs is free: the first one last."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB)])
    cluster.holds("h0", 0, 9, runs=1000, started=0)
    cluster.holds("h1", 1, 14, runs=500, started=0)
    cluster.now = 10
    large, fits, medium = make("large", 14, 1), make("fits", 5, 2), make("medium", 6, 3)
    cluster.wait(large)
    # 14 - 9 = 5 units are left of card 0
    cluster.set(fits)
    assert cluster.start(fits) == "n/0"
    cluster.wait(medium)
    # card 1 is for `large`, which came first and starts there at 500
    assert cluster.queue.constraints(medium).reserved == {"GPU-n-1"}
    cluster.gone("h0")
    # 14 - 5 = 9 of card 0
    assert cluster.start(medium) == "n/0"
    cluster.gone("fits", "medium")
    # card 0 is empty before card 1
    assert cluster.start(large) == "n/0"
    cluster.gone("h1", "large")
    assert [used(cluster.state, card=card) for card in (0, 1)] == [0, 0]


# ---- one name, several pods ----


def test_pod_is_another_one_when_it_was_created_again_under_its_name() -> None:
    """The new one's event may come before the old one's end: each counts by its own UID."""
    state = ClusterState([a_node("n", T4_MIB, T4_MIB)], [on("web", 7, 0, uid="old")])
    state.set_pod(on("web", 4, 1, uid="new"))
    assert [used(state, card=card) for card in (0, 1)] == [7539, 4308]
    assert [held.pod.metadata.uid for held in state.allocations("n")] == ["old", "new"]
    state.forget_pod("old")
    assert [used(state, card=card) for card in (0, 1)] == [0, 4308]
    # the end of the old one is reported twice
    state.forget_pod("old")
    assert [used(state, card=card) for card in (0, 1)] == [0, 4308]


def test_pod_moves_when_the_server_shows_it_on_another_node_than_assumed() -> None:
    """Another scheduler has bound it meanwhile; nothing stays on the assumed node."""
    state = ClusterState([a_node("n", T4_MIB), a_node("m", T4_MIB)])
    pod = a_pod("p", 7, uid="p")
    state.assume(pod, (Placement("n", (Slice(0, device(0, "n"), 7539, 0),)),))
    assert (used(state, "n"), used(state, "m")) == (7539, 0)
    state.set_pod(on("p", 7, node="m"))
    assert (used(state, "n"), used(state, "m")) == (0, 7539)
    assert not state.is_assumed("p")
    # the binding to n fails now: it is nobody's assumption any more
    state.forget_assumed("p")
    assert used(state, "m") == 7539


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_assumption_ends_when_the_pod_ends_before_it_is_seen_to_run(phase: str) -> None:
    """A short pod: its next event is its last."""
    state = ClusterState([a_node("n", T4_MIB)])
    state.assume(a_pod("p", 7, uid="p"), (Placement("n", (Slice(0, device(0, "n"), 7539, 0),)),))
    ended = a_pod("p", 7, uid="p", node="n", phase=phase, annotations=on_card(0, 7))
    state.set_pod(ended)
    assert used(state) == 0
    assert not state.is_assumed("p")
    # a late event of an earlier version of it
    state.forget_assumed("p")
    assert used(state) == 0


# ---- nodes go and come back ----


def test_pods_count_again_when_their_node_is_back() -> None:
    """While it is away nothing can be placed there, and its pods hold nothing that anybody counts."""
    cluster = on_t4("n", "m")
    cluster.set(on("p", 10))
    cluster.state.forget_node("n")
    assert cluster.state.shared_node("n") is None
    assert cluster.state.allocations("n") == []
    assert cluster.filter(a_pod("q", 8), "n", "m") == ["m"]
    cluster.state.set_node(a_node("n", T4_MIB))
    assert used(cluster.state) == 10770
    # 14 - 10 = 4 units
    assert cluster.filter(a_pod("q", 8), "n", "m") == ["m"]
    assert cluster.filter(a_pod("r", 4), "n", "m") == ["n", "m"]


def test_pod_that_ended_while_its_node_was_away_does_not_count_when_it_is_back() -> None:
    """The events come in the order: node gone, pod gone, another pod bound, node back."""
    state = ClusterState([a_node("n", T4_MIB)], [on("old", 10)])
    state.forget_node("n")
    state.forget_pod("old")
    state.set_pod(on("new", 4))
    state.set_node(a_node("n", T4_MIB))
    assert used(state) == 4308
    assert [held.pod.metadata.name for held in state.allocations("n")] == ["new"]


def test_pod_counts_as_soon_as_its_node_is_known_when_it_was_known_first() -> None:
    """After a restart pods may be listed before nodes."""
    state = ClusterState([], [on("p", 7)])
    assert state.allocations("n") == []
    state.set_node(a_node("n", T4_MIB))
    assert used(state) == 7539


def test_cards_of_an_exchanged_machine_are_free_when_pods_name_the_old_ones() -> None:
    """A node of the same name with other cards: records name UUIDs that it does not have."""
    pod = on("p", 7)
    pod.metadata.annotations = {**pod.metadata.annotations, "fenka.io/cards": '{"0":"GPU-old"}'}
    state = ClusterState([a_node("n", T4_MIB)], [pod])
    held = state.allocation("p")
    assert held is not None
    assert held.error == "the pod's card 0 was 'GPU-old' and is now 'GPU-n-0'"
    # until it ends, what it requests counts on the first card
    assert used(state) == 7539


def test_entry_keeps_its_position_when_the_node_that_it_waits_for_is_away_for_a_while() -> None:
    """Without the node no node could hold it; once it is back, it is first again."""
    cluster = on_t4("n")
    cluster.holds("h", 0, 14)
    first, second = make("first", 10, 1, said=UNSCHEDULABLE), make("second", 10, 2)
    cluster.wait(first, second)
    assert cluster.queue.position(second) == "; position 2 of 2 in the queue"
    cluster.state.forget_node("n")
    cluster.now = 1
    assert cluster.queue.refreshed().entries() == ()
    assert cluster.queue.position(second) == ""
    cluster.state.set_node(a_node("n", T4_MIB))
    cluster.now = 2
    ids = [entry.pending.id for entry in cluster.queue.refreshed().entries()]
    assert ids == ["first", "second"]
    cluster.gone("h")
    cluster.now = 3
    assert cluster.start(first) == "n/0"


def test_reservation_of_a_queue_entry_ends_when_its_node_goes() -> None:
    """The other node's card is held for it instead."""
    cluster = on_t4("m", "n")
    cluster.holds("hm", 0, 4, "m")
    head = make("head", 8, 1, said=UNSCHEDULABLE)
    cluster.set(head)
    (entry,) = cluster.queue.refreshed().entries()
    # binpack: 4 of 14 are used there
    assert [it.node for it in entry.placements] == ["m"]
    cluster.state.forget_node("m")
    cluster.now = 1
    (entry,) = cluster.queue.refreshed().entries()
    assert [it.node for it in entry.placements] == ["n"]
    cluster.now = 2 * RESERVATION_TTL_S
    cluster.state.forget_node("n")
    assert cluster.queue.refreshed().entries() == ()


# ---- gangs ----


def test_gang_gets_nothing_when_a_single_pod_took_the_last_place_before() -> None:
    """Two of 10 need both nodes; the single one has half of b. Then all is free, and both get theirs."""
    cluster = on_t4("a", "b")
    single = cluster.put(make("single", 7, 0))
    assert cluster.start(single) in ("a/0", "b/0")
    pods = cluster.gang("g", 2, 10)
    assert "1 of the gang's 2 would fit together" in cluster.why(pods[0])
    assert cluster.gangs.reserved() == {}
    cluster.gone("single")
    assert len(cluster.filter(pods[1])) == 1
    assert len(cluster.gangs.reserved()["default/g"]) == 2


def test_reservation_outlives_a_node_s_absence_only_by_being_made_again() -> None:
    """A gang's reserved node goes: it is placed on the others, whole."""
    cluster = on_t4("a", "b", "c")
    pods = cluster.gang("g", 2, 10)
    (first,) = cluster.filter(pods[0])
    cluster.state.forget_node(first)
    left = [name for name in cluster.names if name != first]
    places = {tuple(cluster.filter(pod, *left)) for pod in pods}
    assert places == {(name,) for name in left}
    assert {it.node for it in cluster.gangs.reserved()["default/g"]} == set(left)


def test_two_gangs_take_turns_when_neither_is_bound_in_time() -> None:
    """Each pauses after its reservation has expired, so the other one gets both cards."""
    cluster = on_t4("a", "b")
    one, two = cluster.gang("one", 2, 10), cluster.gang("two", 2, 10)
    assert len(cluster.filter(one[0])) == 1
    assert "no room for all 2 pods of gang two" in cluster.why(two[0])
    cluster.now = GANG_TTL_S
    assert len(cluster.filter(two[0])) == 1
    assert set(cluster.gangs.reserved()) == {"default/two"}
    cluster.now = 2 * GANG_TTL_S
    assert len(cluster.filter(one[1])) == 1
    assert set(cluster.gangs.reserved()) == {"default/one"}


def test_gang_of_another_namespace_is_another_gang() -> None:
    """Both are called g, and have two pods; each has one so far."""
    cluster = on_t4("a", "b")
    labels = gang_labels("g", 2)
    ours = cluster.put(make("p", 4, labels=labels, namespace="ann"))
    cluster.put(make("q", 4, labels=labels, namespace="bob"))
    assert cluster.why(ours) == "gang g is incomplete: 1 of its 2 pods exist"
    assert cluster.gangs.reserved() == {}


# ---- what users see ----


def test_freed_card_is_shown_to_be_the_next_ones_by_filter_and_queue() -> None:
    """`head` came first and has not been asked about again: its card is not `later`'s."""
    cluster, head, later = freed_card(12, 4)
    (entry,) = [it for it in cluster.queue.refreshed().entries() if it.placements]
    assert entry.pending.name == "head"
    assert "reserved for requests before it" in cluster.start(later)
    assert cluster.queue.position(later) == "; position 2 of 2 in the queue"
    assert cluster.start(head) == "n/0"
    # 14 - 12 = 2 are left, and are for `later`, which needs 4
    assert "reserved for requests before it" in cluster.start(make("tiny", 2, 3))


def test_why_follows_the_life_of_a_pod() -> None:
    """Pending, starting, running, gone: one sentence each."""
    nodes = msgspec.convert([node_json("n", T4_MIB)], list[Node])
    blocker = on("blocker", 14)

    def why(pod: Pod, *others: Pod) -> tuple[str, list[str]]:
        held = [it for it in (pod, *others) if it.spec.node_name]
        explanation = explain(pod, ClusterSnapshot.of(nodes, held), ())
        return explanation.state, explanation.hints or explanation.slices

    pod = a_pod("p", 4, uid="p")
    hint = "it starts when default/blocker ends (14 units on card 0 of n)"
    assert why(pod, blocker) == ("pending", [hint])
    state, (hint,) = why(pod)
    assert (state, hint.partition(" by ")[0]) == ("pending", "n has room")
    slices = ["4 units (4308 MiB) of card 0 on n, GPU-n-0"]
    bound = a_pod("p", 4, uid="p", node="n", phase="Pending", annotations=on_card(0, 4))
    assert why(bound) == ("starting", slices)
    assert why(on("p", 4)) == ("running", slices)
    assert why(a_pod("p", 4, uid="p", node="n", phase="Succeeded")) == ("succeeded", [])
