"""Entries of the queue, and where a pod that is not in it would be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.objects import Pod
from fenka.cluster.pending_queue import DEPTH, PendingQueue
from fenka.cluster.queue_snapshot import PendingEntry, QueueSnapshot
from fenka.cluster.state import ClusterState
from fenka.core.backfill import complete
from fenka.core.queue import Fairness
from tests.builders import T4_MIB, a_node, on_card
from tests.fakes.queue import START, gang, make, pending

NOW = START + 10_000


def snapshot(*pods: Pod, fairness: Fairness | None = None, cards: int = 1) -> QueueSnapshot:
    """Schedule these pods on node n, whose cards are full."""
    held = [
        make(f"h{card}", 14, node="n", annotations=on_card(card, 14), started=0)
        for card in range(cards)
    ]
    cluster = ClusterState([a_node("n", *[T4_MIB] * cards)], held)
    queue = PendingQueue(cluster, "binpack", fairness or Fairness(penalty_per_request_s=0))
    return complete(queue.schedule(pods, NOW))


# ---- entries ----


@pytest.mark.parametrize(
    ("created", "expected"),
    [
        ([5], 5),
        # a gang is as old as its first pod
        ([5, 3, 9], 3),
    ],
)
def test_entry_was_requested_when_its_first_pod_was_created(
    created: list[float], expected: float
) -> None:
    """The creation time is the API server's."""
    pods = tuple(pending(f"p{number}", at=at) for number, at in enumerate(created))
    assert PendingEntry("default/g", pods).request(NOW).requested_at == START + expected


@pytest.mark.parametrize("text", ["", "yesterday", "9999999999"])
def test_entry_was_requested_now_when_its_time_cannot_be_read(text: str) -> None:
    """It does not precede others by that."""
    pod = pending("p")
    pod.metadata.creation_timestamp = text
    assert PendingEntry("p", (pod,)).request(NOW).requested_at == NOW


def test_entry_has_the_gangs_name_when_its_id_is_its_key() -> None:
    """A gang that is named like a UID is a gang."""
    member, single = gang("g1", 4, 0), pending("p", namespace="team")
    assert PendingEntry("default/g", (member,)).name == "g"
    assert PendingEntry("default/u/v", (member,)).name == "u/v"
    assert PendingEntry("p", (single,)).name == "p"
    assert PendingEntry("p", (single,)).namespace == "team"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [([None], None), ([60], 60), ([60, 90], 90), ([60, None], None), ([0], 0), ([0, 0], 0)],
)
def test_entry_ends_when_the_last_of_its_pods_has(
    limits: list[int | None], expected: float | None
) -> None:
    """Without a limit of each pod there is none."""
    pods = tuple(pending(f"p{number}", runs=runs) for number, runs in enumerate(limits))
    assert PendingEntry("default/g", pods).time_limit_s == expected


@pytest.mark.parametrize(
    ("priorities", "expected"), [([None], 0), ([5, None], 0), ([5, 3], 3), ([-1, 0], -1)]
)
def test_entry_has_the_lowest_priority_of_its_pods(
    priorities: list[int | None], expected: int
) -> None:
    """One important member does not bring the others forward."""
    pods = tuple(pending(f"p{number}", priority=each) for number, each in enumerate(priorities))
    assert PendingEntry("default/g", pods).priority == expected


# ---- snapshots ----


def test_snapshot_is_empty_before_the_queue_was_scheduled() -> None:
    """Every pod would be the first, and could reserve cards."""
    empty = QueueSnapshot()
    key = empty.sort_key(PendingEntry("p", (pending("p"),)).request(NOW))
    assert empty.rank(key) == 0
    assert empty.can_reserve
    assert "p" not in empty
    assert empty.holders == ()


def test_holders_are_the_entries_that_reserve_with_their_rank() -> None:
    """The first four of six reserve cards; the fifth and sixth only wait."""
    made = snapshot(*(pending(f"p{number}", at=number) for number in range(DEPTH + 2)), cards=6)
    assert [entry.pending.id for entry in made.entries] == [f"p{n}" for n in range(DEPTH + 2)]
    assert [(rank, entry.pending.id) for rank, entry in made.holders] == [
        (number, f"p{number}") for number in range(DEPTH)
    ]
    assert not made.can_reserve
    assert snapshot(pending("p")).can_reserve


def test_entries_say_why_they_do_not_fit() -> None:
    """Of an entry that fits there is nothing to say."""
    cluster = ClusterState([a_node("n", T4_MIB)])
    queue = PendingQueue(cluster, "binpack", Fairness(penalty_per_request_s=0))
    first, second = complete(queue.schedule([pending("p"), pending("q", at=1)], NOW)).entries
    assert (first.why, bool(first.placements)) == ("", True)
    # 14 - 10 = 4 units are left
    assert (second.why, second.placements) == ("no GPU fits: 1 of 1 has too little memory", ())
    assert (first.requested_at, second.requested_at) == (START, START + 1)


PODS = st.lists(
    st.tuples(
        st.integers(0, 9_000), st.sampled_from([0, 0, 5]), st.sampled_from("ab"), st.booleans()
    ),
    min_size=1,
    max_size=7,
)
FAIRNESS = st.sampled_from(
    [
        Fairness(penalty_per_request_s=0),
        Fairness(),
        Fairness(penalty_per_request_s=10, max_penalty_s=100),
        Fairness(penalty_per_request_s=3600, max_penalty_s=7200),
    ]
)


@settings(max_examples=80)
@given(PODS, FAIRNESS, st.data())
def test_rank_of_a_pod_is_where_it_is_once_it_is_in_the_queue(
    described: list[tuple[int, int, str, bool]], fairness: Fairness, data: st.DataObject
) -> None:
    """A pod is answered by the rank that it would have, before the queue is scheduled with it."""
    pods = [
        pending(f"p{number}", at=at, priority=priority, namespace=namespace)
        for number, (at, priority, namespace, _) in enumerate(described)
    ]
    new = data.draw(st.sampled_from(pods))
    without = snapshot(*(pod for pod in pods if pod is not new), fairness=fairness)
    uid = new.metadata.uid
    assert uid not in without
    key = without.sort_key(PendingEntry(uid, (new,)).request(NOW))
    complete_queue = snapshot(*pods, fairness=fairness)
    ids = [entry.pending.id for entry in complete_queue.entries]
    assert without.rank(key) == ids.index(uid)
    known = complete_queue.sort_key(PendingEntry(uid, (new,)).request(NOW))
    assert key == pytest.approx(known)


@settings(max_examples=60)
@given(PODS, FAIRNESS)
def test_ranks_are_consistent_with_the_order(
    described: list[tuple[int, int, str, bool]], fairness: Fairness
) -> None:
    """Each entry's rank is its index; priorities never increase, times increase for one user."""
    pods = [
        pending(f"p{number}", at=at, priority=priority, namespace=namespace)
        for number, (at, priority, namespace, _) in enumerate(described)
    ]
    made = snapshot(*pods, fairness=fairness)
    assert sorted(entry.pending.id for entry in made.entries) == sorted(
        pod.metadata.uid for pod in pods
    )
    for number, entry in enumerate(made.entries):
        assert entry.pending.id in made
        assert made.rank(entry.sort_key) == number
    for namespace in "ab":
        own = [entry for entry in made.entries if entry.pending.namespace == namespace]
        order = [(-entry.pending.priority, entry.requested_at) for entry in own]
        assert order == sorted(order)
