"""Test that a grown pod is asked once to shrink to its first size, by the annotation of a resize."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from fenka.cluster.growth import GrownPod, GrowthReclaim
from fenka.cluster.objects import Pod
from fenka.core.request import Placement, Slice
from fenka.dialects.lease_records import REPORT, LeaseReport, encode_report
from fenka.dialects.resize_records import REQUEST
from fenka.scheduler.controllers import TAKEN_BACK, GrowthReclaimer
from fenka.scheduler.replica import SchedulerReplica, Settings
from tests.builders import GIB, a_pod, node_json, on_card, pod_json, unschedulable
from tests.core.builders import device
from tests.fakes.api_server import FakeApiServer, api_server
from tests.scheduler.harness import briefly
from tests.scheduler.test_descheduler import Told
from tests.waiting import until

TAKEN = "gpu-mem=4096MiB"


@contextlib.asynccontextmanager
async def replica(api: Any, settings: Settings) -> AsyncIterator[SchedulerReplica]:
    """Run a replica that leads."""
    found = SchedulerReplica(api, settings, "one", sleep=briefly)
    task = asyncio.create_task(found.run())
    try:
        await until(lambda: found.leadership.leading)
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def put_grown_pod(server: FakeApiServer) -> None:
    """Put a pod of 4 GiB that has grown to 12 of 16, and one that waits for 8."""
    held = LeaseReport({"g": (Slice(0, device(0, "n"), 12 * GIB, 0),)})
    server.put("nodes", node_json("n", 16 * GIB, annotations={REPORT: encode_report(held)}))
    annotations = {**on_card(0, 4, 16), REQUEST: "gpu-mem=12"}
    server.put(
        "pods", pod_json("g", 4, uid="g", node="n", phase="Running", annotations=annotations)
    )
    server.put("pods", pod_json("w", 8, uid="w", status=unschedulable("no room")))


def request_of(server: FakeApiServer) -> str:
    """Return the grown pod's request."""
    found: str = server.get("pods", "g", "default")["metadata"]["annotations"][REQUEST]
    return found


async def test_grown_pod_is_asked_to_shrink_when_a_pod_waits() -> None:
    """By the annotation that users write; an event on it says for whom."""
    async with api_server() as server, server.api() as api:
        put_grown_pod(server)
        async with replica(api, Settings(take_growth_back=True)):
            await until(lambda: request_of(server) == TAKEN)
            await until(lambda: events(server))
    pod, note = events(server)[0]
    assert pod == "g"
    assert "because pod default/w waits and would fit then" in note


@pytest.mark.parametrize(("requested", "written"), [("gpu-mem=12", TAKEN), (TAKEN, None)])
async def test_grown_pod_is_asked_once(requested: str, written: str | None) -> None:
    """Not again while its node has not done it."""
    pod = a_pod("g", 4, uid="g", node="n", annotations={REQUEST: requested})
    told = Told()
    async with api_server() as server, server.api() as api:
        server.put("pods", pod_json("g", 4, uid="g", node="n"))
        reclaim = Due(GrownPod(pod, Placement("n", ()), TAKEN))
        reclaimer = GrowthReclaimer(api, reclaim, dict, told, lambda: True, now=lambda: 0.0)
        await reclaimer.reclaim()
    assert server.get("pods", "g", "default")["metadata"]["annotations"].get(REQUEST) == written
    assert len(told.events) == (written is not None)


async def test_pod_of_the_same_name_is_not_asked_when_the_grown_one_is_gone() -> None:
    """Then nothing is reported either."""
    pod = a_pod("g", 4, uid="former", node="n")
    told = Told()
    async with api_server() as server, server.api() as api:
        server.put("pods", pod_json("g", 4, uid="g", node="n"))
        reclaim = Due(GrownPod(pod, Placement("n", ()), TAKEN))
        await GrowthReclaimer(api, reclaim, dict, told, lambda: True, now=lambda: 0.0).reclaim()
    assert REQUEST not in server.get("pods", "g", "default")["metadata"]["annotations"]
    assert not told.events


class Due(GrowthReclaim):
    """Has this pod shrink."""

    def __init__(self, grown: GrownPod) -> None:
        self.grown = grown

    def due(self, _pods: Mapping[str, Pod], _now: float) -> tuple[Pod | None, list[GrownPod]]:
        """Return the pod, and one that waits."""
        return a_pod("w", 8), [self.grown]


async def test_grown_pod_keeps_its_size_when_the_option_is_off() -> None:
    """That is the default."""
    async with api_server() as server, server.api() as api:
        put_grown_pod(server)
        async with replica(api, Settings()) as one:
            await until(lambda: one.queue.refreshed(0.0).entries())
    assert request_of(server) == "gpu-mem=12"
    assert not events(server)


def events(server: FakeApiServer) -> list[tuple[str, str]]:
    """Return name of the pod and note of each event about growth."""
    return [
        (it["regarding"]["name"], it["note"])
        for it in server.all("events")
        if it["reason"] == TAKEN_BACK
    ]
