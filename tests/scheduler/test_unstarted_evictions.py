"""Pods that hold a card without starting are evicted if the chart says so; never after a container ran."""

from typing import Any

import msgspec
import pytest

from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterState
from fenka.scheduler.replica import Settings
from fenka.scheduler.unstarted_evictions import UNSTARTED, UnstartedEvictions
from tests.builders import GIB, T4_MIB, a_node, node_json, on_card, pod_json, unschedulable
from tests.fakes.api_server import FakeApiServer, api_server
from tests.scheduler.test_descheduler import MADE_AGAIN, Told
from tests.scheduler.test_growth_reclaimer import replica
from tests.waiting import until

STARTED_AT, AFTER_S = 1_767_225_600.0, 1800.0
PULLING = {"name": "c0", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
RAN = {"name": "i0", "containerID": "containerd://a"}


def unstarted(**status: Any) -> dict[str, Any]:
    """Return a pod of eight units whose image does not come."""
    known = {"startTime": "2026-01-01T00:00:00Z", "containerStatuses": [PULLING], **status}
    return pod_json("p", 8, node="n", uid="u", annotations=on_card(0, 8), status=known)


def evictions(server: FakeApiServer) -> list[str]:
    """Return the evictions that were requested."""
    return [request for request in server.requests if request.endswith("/eviction")]


async def look(
    made: dict[str, Any], *, age_s: float = AFTER_S, served: dict[str, Any] | None = None
) -> tuple[list[str], Told]:
    """Look twice at a pod of this age. served: what the API server has by then."""
    async with api_server() as server, server.api() as api:
        server.put("pods", served or made)
        pod = msgspec.convert(made, Pod)
        told = Told()
        evicting = UnstartedEvictions(
            api,
            ClusterState([a_node("n", T4_MIB)], [pod]),
            lambda: {"u": pod},
            AFTER_S,
            told,
            lambda: True,
            now=lambda: STARTED_AT + age_s,
        )
        await evicting.evict_due()
        await evicting.evict_due()
        return evictions(server), told


@pytest.mark.parametrize(
    ("owners", "after"),
    [([], "no controller makes another"), (MADE_AGAIN, "its controller makes another")],
)
async def test_pod_is_evicted_once_when_it_has_not_started_in_time(owners: Any, after: str) -> None:
    """An event says why, and whether another pod follows."""
    made = unstarted()
    made["metadata"]["ownerReferences"] = owners
    requested, told = await look(made)
    assert len(requested) == 1
    ((reason, note),) = told.events
    assert reason == UNSTARTED
    assert "since 2026-01-01T00:00:00Z without starting (ImagePullBackOff)" in note
    assert note.endswith(after)


@pytest.mark.parametrize(
    "status",
    [{"phase": "Running"}, {"initContainerStatuses": [RAN]}, {"startTime": ""}],
)
async def test_pod_stays_when_anything_of_it_has_run_or_no_kubelet_has_it(
    status: dict[str, Any],
) -> None:
    """An init container may load a model for hours."""
    requested, told = await look(unstarted(**status))
    assert not requested
    assert not told.events


async def test_pod_stays_when_it_is_younger() -> None:
    """Large images take minutes."""
    requested, _ = await look(unstarted(), age_s=AFTER_S - 1)
    assert not requested


async def test_pod_stays_when_its_node_owns_it() -> None:
    """The kubelet would show it again, from its file."""
    made = unstarted()
    made["metadata"]["ownerReferences"] = [
        {"kind": "Node", "name": "n", "uid": "n", "controller": True}
    ]
    requested, _ = await look(made)
    assert not requested


@pytest.mark.parametrize("change", [{"phase": "Running"}, {"uid": "other"}])
async def test_pod_stays_when_the_server_has_another_state_by_then(change: dict[str, Any]) -> None:
    """What the scheduler knows is some moments old."""
    served = unstarted()
    served["metadata"] |= {name: text for name, text in change.items() if name == "uid"}
    served["status"] |= {name: text for name, text in change.items() if name == "phase"}
    requested, _ = await look(unstarted(), served=served)
    assert not requested


@pytest.mark.parametrize(
    ("after_s", "waits", "evicted"), [(60, True, True), (0, True, False), (60, False, False)]
)
async def test_card_is_given_back_when_the_option_says_so_and_a_pod_waits(
    after_s: float, waits: bool, evicted: bool
) -> None:
    """The whole replica: without the option, or without anybody who waits, nothing is evicted."""
    async with api_server() as server, server.api() as api:
        server.put("nodes", node_json("n", 16 * GIB))
        server.put("pods", unstarted())
        if waits:
            server.put("pods", pod_json("w", 12, uid="w", status=unschedulable("no room")))
        async with replica(api, Settings(evict_unstarted_after=after_s)) as running:
            passes = iter(range(10))
            await until(lambda: bool(evictions(server)) or next(passes, None) is None)
            assert running.leadership.leading
    assert bool(evictions(server)) is evicted
