"""When the queue is scheduled: by the background, by a request, or not yet."""

from fenka.scheduler.queue_controller import MIN_INTERVAL_S, REQUEST_INTERVAL_S
from tests.builders import T4_MIB, node_json
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import UNSCHEDULABLE, make


def changed_queue() -> ExtenderHarness:
    """Return a cluster whose queue was scheduled at 0, and has changed since."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 8)
    cluster.set(make("head", 12, 1, said=UNSCHEDULABLE))
    assert len(cluster.queue.refreshed().entries()) == 1
    cluster.gone("h")
    return cluster


def was_scheduled(cluster: ExtenderHarness, *, by_request: bool) -> bool:
    """Return whether a look at the queue schedules it."""
    before = cluster.queue.state.snapshot
    if by_request:
        cluster.queue.constraints(make("later", 4, 2))
    else:
        cluster.queue.refreshed()
    return cluster.queue.state.snapshot is not before


def test_background_schedules_the_queue_when_it_has_changed_and_rested() -> None:
    """Before any request would, so that none waits for it."""
    cluster = changed_queue()
    cluster.now = MIN_INTERVAL_S - 0.01
    assert not was_scheduled(cluster, by_request=False)
    cluster.now = MIN_INTERVAL_S + 0.01
    assert was_scheduled(cluster, by_request=False)
    cluster.now += 1
    assert not was_scheduled(cluster, by_request=False)


def test_request_schedules_the_queue_when_the_background_has_not() -> None:
    """As when the loop is busy."""
    cluster = changed_queue()
    cluster.now = REQUEST_INTERVAL_S - 0.01
    assert not was_scheduled(cluster, by_request=True)
    cluster.now = REQUEST_INTERVAL_S + 0.01
    assert was_scheduled(cluster, by_request=True)


def test_queue_is_scheduled_at_once_when_a_pod_would_be_rejected_otherwise() -> None:
    """The snapshot may be older than the last change."""
    cluster = changed_queue()
    before = cluster.queue.state.snapshot
    cluster.queue.constraints(make("later", 4, 2), final=True)
    assert cluster.queue.state.snapshot is not before
