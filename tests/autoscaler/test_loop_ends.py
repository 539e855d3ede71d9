"""Tests the program where nodes end: by scale-in, and because the cloud takes them back."""

from pathlib import Path
from typing import Any

import pytest

from fenka.autoscaler.main import Autoscaler
from fenka.autoscaler.orders import OrderKeeper
from fenka.cloud.config import ScaleIn, SpotRules
from fenka.cloud.port import Unknown
from fenka.cloud.simulated_cloud import Prices, Scenario, SimulatedOffer
from fenka.cluster.autoscaling import (
    CAPACITY,
    ENDING,
    INTERRUPTIBLE,
    ORDER,
    PLANNED,
    PROTECTED_UNTIL,
    RECLAIM_AT,
    RECLAIMED,
    SPOT_ADMIT,
    encode_time,
)
from tests.autoscaler.harness import World, scenario, world
from tests.autoscaler.snapshots import config, group
from tests.builders import T4_MIB, Json
from tests.coroutines import synchronous
from tests.waiting import until

pytestmark = pytest.mark.slow

NODE = "node-i-000001"


def owned(there: World, pod: Json) -> Json:
    """Give a pod a controller, which makes it anew."""
    owner = {"kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}
    return there.server.put(
        "pods", {**pod, "metadata": {**pod["metadata"], "ownerReferences": [owner]}}
    )


async def joined(there: World, replica: Autoscaler, **fields: Any) -> Json:
    """Return a pod that runs on a node that was bought for it."""
    pod = owned(there, there.pending("a", **fields))
    # Time that passes before the program has seen the pod would be lost.
    await until(
        lambda: (
            replica.leadership.leading and pod["metadata"]["uid"] in replica.loop.snapshot().pods
        )
    )
    await there.passes(1000, there.machines)
    there.join("i-000001", T4_MIB)
    await there.passes(800, lambda: ORDER in there.node("i-000001")["labels"])
    there.bind(pod, "i-000001")
    return pod


async def bought(there: World, replica: Autoscaler) -> Json:
    """Return a pod that runs on a node whose order is forgotten."""
    pod = await joined(there, replica)
    await there.passes(1000, lambda: not there.orders())
    return pod


async def is_displaced(there: World, replica: Autoscaler) -> None:
    """Wait until the program knows that the pods of the node need another one."""
    await there.passes(20, lambda: RECLAIMED in taints(there))
    await until(lambda: replica.loop.snapshot().evicted)


def taints(there: World) -> list[str]:
    """The keys of the node's taints."""
    return [taint["key"] for taint in there.server.get("nodes", NODE)["spec"].get("taints", [])]


@synchronous
async def test_node_ends_when_its_last_pod_has_ended(tmp_path: Path) -> None:
    """After the delay; instance and Node are gone, and events say why."""
    settings = config(scale_in=ScaleIn(delay=100, cooldown=50))
    async with world(tmp_path, settings=settings) as there, there.replica() as replica:
        pod = await bought(there, replica)
        await there.passes(50, lambda: there.status().nodes[NODE].state == "in use")
        there.server.put("pods", {**pod, "status": {"phase": "Succeeded"}})
        await there.passes(20, lambda: there.status().nodes[NODE].state == "idle")
        idle = there.status().nodes[NODE]
        assert idle.until == idle.since + 100
        await there.passes(90, lambda: there.time.now >= idle.since + 90)
        assert there.machines() == ["i-000001"]
        await there.passes(10_000, lambda: not there.machines())
        await there.passes(20, lambda: not there.server.all("nodes"))
        await there.passes(20, lambda: len(there.notes("FenkaScaleIn")) == 2)


@synchronous
async def test_cloud_is_asked_again_when_the_last_node_has_ended(tmp_path: Path) -> None:
    """Also while its order is remembered. Else the node would count for its group's max for a minute."""
    settings = config(scale_in=ScaleIn(delay=10, cooldown=0))
    async with world(tmp_path, settings=settings) as there, there.replica():
        pod = there.pending("a")
        await there.passes(5, there.machines)
        there.join("i-000001", T4_MIB)
        await there.passes(10, lambda: "fenka.io/order" in there.node("i-000001")["labels"])
        there.bind(pod, "i-000001")
        await there.passes(20, lambda: NODE in there.status().nodes)
        there.server.put("pods", {**pod, "status": {"phase": "Succeeded"}})
        await there.passes(40, lambda: not there.machines())
        await there.passes(10, lambda: not there.server.all("nodes"))
        assert there.orders()
        await there.passes(10, lambda: sum(each.nodes for each in there.status().offers) == 0)


@synchronous
async def test_pods_leave_when_their_node_is_taken_back(tmp_path: Path) -> None:
    """The taint, the event and the evictions follow the annotation, and a replacement is bought at once.

    The offer is backed off, so that comes from zone b.
    """
    settings = config(group(zones=("a", "b")))
    async with world(tmp_path, scenario(None, None), settings) as there, there.replica() as replica:
        pod = await bought(there, replica)
        node = there.server.get("nodes", NODE)
        node["metadata"]["annotations"][RECLAIM_AT] = encode_time(there.time.now + 300)
        there.server.put("nodes", node)
        await is_displaced(there, replica)
        await there.passes(20, lambda: there.status().nodes[NODE].state == "taken back")
        name = pod["metadata"]["name"]
        evicted = f"POST /api/v1/namespaces/default/pods/{name}/eviction"
        await there.passes(20, lambda: evicted in there.server.requests)
        await there.passes(20, lambda: there.notes("FenkaReclaim"))
        assert all("spot instance is taken back at" in note for note in there.notes("FenkaReclaim"))
        await there.passes(100, lambda: len(there.machines()) == 2)
        assert ENDING not in taints(there)
        # Its controller has made another, for which the new node is coming: no third one is bought.
        there.server.remove("pods", name, "default")
        successor = owned(there, there.pending("b"))
        await until(lambda: successor["metadata"]["uid"] in replica.loop.snapshot().pods)
        await there.passes(1000, lambda: PLANNED in there.annotations("pods", "b"))
        assert successor["metadata"]["uid"] in str(there.orders())
        assert len(there.machines()) == 2


@synchronous
async def test_pods_leave_in_time_when_the_cloud_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass ends with the cloud's error, after what the notice requires."""
    async with world(tmp_path) as there, there.replica() as replica:
        pod = await bought(there, replica)

        async def fails(*_: object) -> None:
            raise Unknown("the cloud does not answer")

        monkeypatch.setattr(OrderKeeper, "act", fails)
        node = there.server.get("nodes", NODE)
        node["metadata"]["annotations"][RECLAIM_AT] = encode_time(there.time.now + 300)
        there.server.put("nodes", node)
        evicted = f"POST /api/v1/namespaces/default/pods/{pod['metadata']['name']}/eviction"
        await there.passes(20, lambda: evicted in there.server.requests)


@synchronous
async def test_job_moves_to_an_on_demand_node_when_the_market_exceeds_its_cap(
    tmp_path: Path,
) -> None:
    """The cloud's own notice: after an hour it checks every 5 minutes, and ends the node 5 minutes later."""
    market = Prices(3.0), Prices(8.0, at=4000)
    made = Scenario(
        (
            SimulatedOffer("spot", "t4.x", "a", market, capacity="spot"),
            SimulatedOffer("t4", "t4.x", "a", (Prices(9.0),)),
        )
    )
    spot = group("spot", capacity="spot", spot=SpotRules(cap=5.0, protection=3600))
    settings = config(spot, group(price=9.0))
    async with world(tmp_path, made, settings) as there, there.replica() as replica:
        await joined(there, replica, annotations={INTERRUPTIBLE: "true"})
        assert there.node("i-000001")["labels"][CAPACITY] == "spot"
        await there.passes(20, lambda: NODE in there.status().nodes)
        protected = there.status().nodes[NODE].protected_until
        assert protected is not None
        assert 3500 < protected - there.time.now <= 3600
        await there.passes(20, lambda: SPOT_ADMIT in there.node("i-000001")["annotations"])
        annotations = there.node("i-000001")["annotations"]
        assert annotations[SPOT_ADMIT] == "marked"
        assert annotations[PROTECTED_UNTIL] == encode_time(protected)
        there.time.now += 4100
        await there.passes(250, lambda: RECLAIMED in taints(there))
        await is_displaced(there, replica)
        evicted = "POST /api/v1/namespaces/default/pods/a/eviction"
        await there.passes(20, lambda: evicted in there.server.requests)
        await there.passes(100, lambda: len(there.machines()) == 2)
        assert [each.group for each in there.live().values()] == ["t4"]
        until_ = there.status().nodes[NODE].until
        assert until_ is not None
        there.time.now = until_ - 41
        await there.passes(10, lambda: not there.server.all("pods"))
        there.server.put("nodes", {**there.server.get("nodes", NODE), "status": {}})
        await there.passes(1000, lambda: "i-000001" not in there.machines())
        await there.passes(1000, lambda: not there.server.all("nodes"))
