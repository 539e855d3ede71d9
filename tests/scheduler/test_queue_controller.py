"""When the queue is scheduled: by the background, by a request, or not yet."""

from collections.abc import Callable
from itertools import count

import pytest

from fenka.cluster.queue_state import RESERVATION_TTL_S
from fenka.core.backfill import complete
from fenka.core.queue import Fairness
from fenka.scheduler.queue_controller import (
    MAX_PAUSE_S,
    MIN_INTERVAL_S,
    PAUSE_S,
    REQUEST_INTERVAL_S,
    QueueController,
)
from tests.builders import T4_MIB, node_json
from tests.fakes.extender import PLAIN, ExtenderHarness
from tests.fakes.queue import START, UNSCHEDULABLE, make


def changed_queue(fairness: Fairness = PLAIN) -> ExtenderHarness:
    """Return a cluster whose queue was scheduled at 0, and has changed since."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)], fairness)
    cluster.holds("h", 0, 8)
    cluster.set(make("head", 12, 1, said=UNSCHEDULABLE))
    assert len(cluster.queue.refreshed().entries()) == 1
    cluster.gone("h")
    return cluster


async def was_scheduled(cluster: ExtenderHarness, *, by_request: bool) -> bool:
    """Return whether a request or the background schedules the queue now."""
    before = cluster.queue.state.snapshot
    if by_request:
        cluster.queue.constraints(make("later", 4, 2))
    else:
        await cluster.queue.refresh()
    return cluster.queue.state.snapshot is not before


async def test_background_schedules_the_queue_when_it_has_changed_and_rested() -> None:
    """Before any request would, so that none waits for it."""
    cluster = changed_queue()
    cluster.now = MIN_INTERVAL_S - 0.01
    assert not await was_scheduled(cluster, by_request=False)
    cluster.now = MIN_INTERVAL_S + 0.01
    assert await was_scheduled(cluster, by_request=False)
    cluster.now += 1
    assert not await was_scheduled(cluster, by_request=False)


def in_slices(cluster: ExtenderHarness, between: Callable[[int], None]) -> QueueController:
    """Return a controller of the cluster's queue that calls this after each step, with its number."""
    numbers = count()

    async def sleep(_: float) -> None:
        between(next(numbers))

    clock = count()
    return QueueController(
        cluster.queue.state,
        now=lambda: START + cluster.now,
        stopwatch=lambda: float(next(clock)),
        sleep=sleep,
    )


async def test_queue_is_the_same_when_it_is_scheduled_in_slices() -> None:
    """Two entries reserve or get cards; a third one waits behind them."""
    cluster = changed_queue()
    for number, units in enumerate((14, 2, 13), start=2):
        cluster.set(make(f"w{number}", units, number, said=UNSCHEDULABLE))
    slices = list[int]()
    await in_slices(cluster, slices.append).refresh()
    sliced = cluster.queue.state.snapshot
    complete(cluster.queue.state.schedule({}, START))
    assert len(slices) >= len(sliced.entries) == 4
    assert [(it.pending.id, it.placements, it.reservation, it.why) for it in sliced.entries] == [
        (it.pending.id, it.placements, it.reservation, it.why)
        for it in cluster.queue.state.snapshot.entries
    ]


async def test_background_stops_when_a_request_has_scheduled_the_queue() -> None:
    """Otherwise an older snapshot would replace a newer one."""
    cluster = changed_queue()
    by_request = list[object]()

    def schedule(number: int) -> None:
        if number == 1:
            cluster.set(make("second", 2, 2, said=UNSCHEDULABLE))
            by_request.append(controller.refreshed(0.0).snapshot)

    controller = in_slices(cluster, schedule)
    await controller.refresh()
    assert by_request == [cluster.queue.state.snapshot]
    assert len(cluster.queue.state.snapshot.entries) == 2


async def test_long_queue_is_scheduled_in_steps_when_a_request_needs_it() -> None:
    """Tenants make it long, and the leader renews its lease on the same event loop."""
    cluster, slices = changed_queue(), list[int]()
    controller = in_slices(cluster, slices.append)
    await controller.refresh()
    before, steps = cluster.queue.state.snapshot, len(slices)
    cluster.set(make("first", 2, 0, said=UNSCHEDULABLE))
    assert cluster.queue.state.urgent
    assert controller.refreshed(0.0).snapshot is before
    assert len(slices) == steps
    await controller.prepare()
    assert [entry.pending.name for entry in controller.refreshed(0.0).entries()] == [
        *("first", "head")
    ]
    assert len(slices) > steps


async def test_queue_is_scheduled_again_when_a_pod_changes_between_two_slices() -> None:
    """Also when the snapshot already counts the change."""
    cluster = changed_queue()
    cluster.set(make("second", 2, 2, said=UNSCHEDULABLE))
    await in_slices(cluster, lambda number: None if number else cluster.gone("second")).refresh()
    assert cluster.queue.state.is_stale({}, START)
    complete(cluster.queue.state.schedule({}, START))
    assert not cluster.queue.state.is_stale({}, START)


async def test_pod_is_not_charged_when_it_was_bound_between_two_slices() -> None:
    """The time for which its card was held would be over in the same pass."""
    cluster = changed_queue(Fairness())
    await in_slices(cluster, lambda _: None).refresh()
    assert cluster.queue.constraints(make("later", 4, 2)).nodes == {"n"}
    cluster.now += RESERVATION_TTL_S + 1
    cluster.set(make("second", 2, 2, said=UNSCHEDULABLE))
    await in_slices(cluster, lambda number: cluster.gone("head") if number == 2 else None).refresh()
    # What its predecessor on the card used is all.
    assert cluster.queue.state.usage(START + cluster.now).get("default", 0.0) == pytest.approx(0.0)


async def test_background_pauses_longer_when_a_request_is_being_answered() -> None:
    """But not for ever: a request may wait for its caller."""
    cluster = changed_queue()
    sleeps = list[float]()

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    clock = count()
    controller = QueueController(
        cluster.queue.state,
        now=lambda: START + cluster.now,
        stopwatch=lambda: float(next(clock)),
        sleep=sleep,
    )
    await controller.refresh()
    alone = len(sleeps)
    cluster.set(make("second", 12, 2, said=UNSCHEDULABLE))
    cluster.now += 1
    with controller.answering():
        await controller.refresh()
    pauses = (len(sleeps) - alone) / round(MAX_PAUSE_S / PAUSE_S)
    assert pauses >= alone >= 1
    assert not cluster.queue.state.is_stale({}, START)


async def test_request_uses_the_snapshot_when_the_background_is_scheduling() -> None:
    """Its pass would be done twice otherwise, the second time at once. A rejection needs the newest."""
    cluster = changed_queue()
    cluster.now = 2 * REQUEST_INTERVAL_S
    before, seen = cluster.queue.state.snapshot, list[bool]()

    def ask(number: int) -> None:
        if number < 2:
            controller.constraints(make("later", 4, 2), final=number == 1)
            seen.append(cluster.queue.state.snapshot is before)

    controller = in_slices(cluster, ask)
    await controller.refresh()
    assert seen == [True, False]


async def test_request_schedules_the_queue_when_the_background_does_so_because_it_is_urgent() -> (
    None
):
    """The entry for which it is urgent would not be counted in the answer otherwise."""
    cluster = changed_queue()
    cluster.set(make("first", 2, 0, said=UNSCHEDULABLE))
    seen = list[int]()

    def ask(number: int) -> None:
        if not number:
            controller.constraints(make("later", 4, 2))
            seen.append(len(cluster.queue.state.snapshot.entries))

    controller = in_slices(cluster, ask)
    assert cluster.queue.state.urgent
    await controller.refresh()
    assert seen == [2]


async def test_positions_are_settled_when_the_queue_has_been_scheduled_with_all_pods() -> None:
    """Not while that is going on, nor before; asking for a position schedules nothing."""
    cluster = changed_queue()
    settled = list[bool]()
    controller = in_slices(cluster, lambda _: settled.append(controller.is_settled))
    second = cluster.put(make("second", 10, 2, said=UNSCHEDULABLE))
    before = cluster.queue.state.snapshot
    assert cluster.queue.state.urgent
    assert not controller.is_settled
    assert controller.position(second) == "; position 2 of 2 in the queue"
    assert cluster.queue.state.snapshot is before
    await controller.refresh()
    assert settled
    assert not any(settled)
    assert controller.is_settled
    cluster.set(make("third", 10, 3, said=UNSCHEDULABLE))
    cluster.gone("head", "second", "third")
    assert controller.is_settled


async def test_request_schedules_the_queue_when_the_background_has_not() -> None:
    """As when the loop is busy. A pod that has come frees no card."""
    cluster = changed_queue()
    cluster.queue.refreshed(0)
    cluster.holds("new", 0, 1)
    cluster.now = REQUEST_INTERVAL_S - 0.01
    assert not await was_scheduled(cluster, by_request=True)
    cluster.now = REQUEST_INTERVAL_S + 0.01
    assert await was_scheduled(cluster, by_request=True)


def test_queue_is_scheduled_at_once_when_a_pod_would_be_rejected_otherwise() -> None:
    """The snapshot may be older than the last change."""
    cluster = changed_queue()
    before = cluster.queue.state.snapshot
    cluster.queue.constraints(make("later", 4, 2), final=True)
    assert cluster.queue.state.snapshot is not before


def test_later_pod_does_not_take_a_card_that_has_just_become_free() -> None:
    """14 units, of which a pod that waits needs 12; 4 on the other card. It was told so before."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB)])
    cluster.holds("stays", 0, 10)
    cluster.holds("old", 1, 14)
    head, later = make("head", 12, 1), make("later", 5, 2)
    cluster.wait(head, later)
    cluster.queue.refreshed(0)
    cluster.gone("old")
    assert cluster.filter(later) == []
    assert cluster.filter(head) == ["n"]
