"""Pods that their node refuses are evicted if a controller replaces them, and never while they run."""

from typing import Any

import msgspec
import pytest

from fenka.cluster.gang_placement import GangMembers, GangScheduler
from fenka.cluster.objects import Pod
from fenka.cluster.pod_groups import GangPods
from fenka.cluster.state import ClusterState
from fenka.dialects import lease_records
from fenka.dialects.lease_records import LeaseReport, Refusal
from fenka.scheduler.controllers import EVICTED, LEASE_DENIED, Descheduler
from tests.builders import T4_MIB, a_node, on_card, pod_json
from tests.fakes.api_server import FakeApiServer, api_server
from tests.fakes.clock import Clock

SENTENCE = "fenka: card 0 has 15079 MiB, of which 8616 MiB are still held by team/there"
MADE_AGAIN = [{"kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}]


class Told:
    """Records events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def record_on_pod(self, _: Pod, reason: str, note: str) -> None:
        """Record an event."""
        self.events.append((reason, note))

    def record_on_node(self, *_: Any) -> None:
        """Ignore an event."""


async def look(
    *, owners: Any, movable: bool, phase: str = "Pending", node: str = "n"
) -> tuple[list[str], Told]:
    """Look twice at a refused pod. Return the evictions that were requested, and the events."""
    async with api_server() as server, server.api() as api:
        made = pod_json("p", 8, node=node, uid="u", annotations=on_card(0, 8), phase=phase)
        made["metadata"]["ownerReferences"] = owners
        server.put("pods", made)
        pod = msgspec.convert(made, Pod)
        text = lease_records.encode_report(LeaseReport(refused={"u": Refusal(SENTENCE, movable)}))
        world = ClusterState([a_node("n", T4_MIB, annotations={lease_records.REPORT: text})], [pod])
        told = Told()
        gangs = GangScheduler(GangMembers(world, GangPods, dict), world, "binpack", Clock())
        descheduler = Descheduler(api, world, lambda: {"u": pod}, gangs, told, lambda: True)
        await descheduler.evict_refused()
        await descheduler.evict_refused()
        return _evictions(server), told


def _evictions(server: FakeApiServer) -> list[str]:
    return [it for it in server.requests if it.endswith("/eviction")]


async def test_refused_pod_is_evicted_once_when_it_has_a_controller() -> None:
    """Its successor is placed by what is known by then."""
    evictions, told = await look(owners=MADE_AGAIN, movable=True)
    assert evictions
    ((reason, note),) = told.events
    assert reason == EVICTED
    assert SENTENCE in note


@pytest.mark.parametrize("owners", [[], [{"kind": "Node", "name": "n", "controller": True}]])
async def test_refused_pod_stays_when_it_has_no_controller(owners: Any) -> None:
    """An event says what its owner can do."""
    evictions, told = await look(owners=owners, movable=True)
    assert not evictions
    ((reason, note),) = told.events
    assert reason == LEASE_DENIED
    assert "delete it and create it again" in note


@pytest.mark.parametrize(
    "how",
    [{"movable": False}, {"movable": True, "phase": "Running"}, {"movable": True, "node": "m"}],
)
async def test_pod_is_not_evicted_when_that_would_not_help(how: Any) -> None:
    """Another node would refuse it too, or it runs, or it is on another node."""
    evictions, told = await look(owners=MADE_AGAIN, **how)
    assert not evictions
    assert not told.events
