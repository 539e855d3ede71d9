"""Pauses of entries that another program refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.refusals import FIRST_PAUSE_S, MAX_PAUSE_S, MAX_TEXT, RefusedEntries
from fenka.core.backfill import complete
from tests.builders import gang_labels
from tests.fakes.queue import START, QueueByEvents, make, pending


def refused(refusals: RefusedEntries, times: int) -> list[float]:
    """Return the length of the pause after each refusal; each comes when the last pause has ended."""
    now, pauses = 0.0, []
    for _ in range(times):
        refusal = refusals.refuse("p", "its binding", "policy", now)
        pauses.append(max(refusal.until - now, 0.0))
        now = max(refusal.until, now + 1)
    return pauses


def test_pause_doubles_when_refusals_go_on() -> None:
    """The first refusal may be an accident; the last pause is ten minutes."""
    assert refused(RefusedEntries(), 8) == [0.0, 30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


def test_pause_stays_finite_when_a_pod_is_refused_for_years() -> None:
    """A power of the number of refusals would overflow."""
    assert refused(RefusedEntries(), 2000)[-1] == MAX_PAUSE_S


def test_refusal_counts_once_when_several_members_of_a_gang_are_refused() -> None:
    """They are bound in one attempt."""
    refusals = RefusedEntries()
    for now in (0.0, 1.0, 1.0, 1.0):
        refusal = refusals.refuse("g", "its binding", "policy", now)
    assert (refusal.count, refusal.until) == (2, 1.0 + FIRST_PAUSE_S)


def test_message_is_shortened_when_it_is_long() -> None:
    """Another program wrote it."""
    assert len(RefusedEntries().refuse("p", "its binding", "x" * 10_000, 0.0).why) == MAX_TEXT


@given(st.lists(st.floats(0.1, 1000), max_size=30))
def test_entry_is_resumed_exactly_once_when_its_pause_has_ended(gaps: list[float]) -> None:
    """Whatever the times of the refusals."""
    refusals, now = RefusedEntries(), 0.0
    for gap in gaps:
        refusal, now = refusals.refuse("p", "its binding", "policy", now), now + gap
        ended = 0 < refusal.until <= now
        assert refusals.resume(now) == (["p"] if ended else [])
        assert refusals.resume(now) == []
        assert (refusals.pause("p", now) is not None) == (now < refusal.until)


def fitting(queue: QueueByEvents) -> list[str]:
    """Return the names of the pods for which cards are held, once the queue is scheduled."""
    complete(queue.state.schedule({}, START + queue.now))
    return [entry.pending.name for entry in queue.state.entries() if entry.placements]


def test_pod_reserves_nothing_when_it_was_refused_twice() -> None:
    """The card is another's meanwhile. After the pause it is reserved again, and the pod is retried."""
    queue = QueueByEvents()
    first, second = pending("p", 14, 0), pending("q", 14, 1)
    queue.set(first, second)
    assert fitting(queue) == ["p"]
    for _ in range(2):
        queue.state.refuse(first, "its binding", "policy", START)
    assert queue.state.is_stale({}, START)
    assert fitting(queue) == ["q"]
    ((entry, refusal),) = queue.state.paused_entries(START)
    assert entry.name == "p"
    assert "refused its binding 2 times" in refusal.sentence(START)
    queue.now = FIRST_PAUSE_S
    assert queue.state.is_stale({}, START + queue.now)
    assert fitting(queue) == ["p"]
    resumed = queue.state.pods_to_requeue(9, START + queue.now)
    assert [pod.metadata.name for pod in resumed] == ["p"]
    assert queue.state.paused_entries(START + queue.now) == []


@pytest.mark.parametrize("members", [1, 2])
def test_refusals_are_forgotten_when_the_last_pod_of_the_entry_is_gone(members: int) -> None:
    """A gang of which one member was replaced is still the same."""
    queue = QueueByEvents()
    pods = [make(f"g-{n}", 7, labels=gang_labels("g", members)) for n in range(members)]
    queue.set(*pods)
    for _ in range(2):
        queue.state.refuse(pods[0], "its binding", "policy", START)
    for pod in pods:
        assert queue.state.pause(pods[0], START) is not None
        queue.state.forget_pod(pod.metadata.uid, START)
    assert queue.state.pause(pods[0], START) is None
