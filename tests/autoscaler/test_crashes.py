"""Tests that nothing is bought twice, lost or left running, whenever what happens.

The replica that stops at a step is one that was killed there: its request was sent or not, answered or not.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fenka.autoscaler.stores import failed_order
from fenka.cloud.port import OfferKey, Order
from fenka.cloud.simulated_cloud import Fault
from fenka.cluster.autoscaling import ORDER, ORDERS_MAP, PIN, OrderRecord, Slot
from tests.autoscaler.harness import NAMESPACE, World, scenario, world
from tests.autoscaler.snapshots import NOW, config, elastic_node, group
from tests.builders import T4_MIB, Json, gang_labels
from tests.coroutines import synchronous

pytestmark = pytest.mark.slow

MOST_STEPS = 60
"""More than an order's life has."""

PARTS = 4
"""The loop is several tests, so that none takes long."""


@contextlib.asynccontextmanager
async def nodes_that_come(there: World) -> AsyncIterator[None]:
    """Let machines join, offer their cards once they are labelled, and have their planned pods bound."""

    async def live() -> None:
        while True:
            await asyncio.sleep(0.002)
            for machine in there.machines():
                _live(there, machine)

    task = asyncio.create_task(live())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _live(there: World, machine: str) -> None:
    if ("nodes", "", f"node-{machine}") not in there.server.objects:
        there.join(machine, zone=there.zone(machine))
        return
    node = there.server.get("nodes", f"node-{machine}")
    if ORDER not in node["metadata"]["labels"]:
        return
    if "fenka.io/cards" not in node["metadata"]["annotations"]:
        there.offer_cards(machine)
        return
    for record in there.orders().values():
        for slot in record.slots:
            if slot.instance != machine or slot.state != "offering":
                continue
            for pod in there.server.all("pods"):
                if pod["metadata"]["uid"] in slot.pods and not pod["spec"].get("nodeName"):
                    there.bind(pod, machine)


def is_settled(there: World) -> bool:
    """Whether every pod is bound, and nothing has to be remembered of any order."""
    bound = all(pod["spec"].get("nodeName") for pod in there.server.all("pods"))
    nodes = there.server.all("nodes")
    pinned = any(PIN in node["metadata"]["annotations"] for node in nodes)
    return bound and bool(nodes) and not pinned and not there.live()


async def lives_on_when_killed(folder: Path, step: int) -> bool:
    """Kill the replica at this step, and let another one take over. Return whether it came so far."""
    async with world(folder) as there, nodes_that_come(there):
        there.pending("a")
        there.stop_at = step
        async with there.replica("first"):
            await there.passes(900, lambda: there.stopped or is_settled(there), step=1)
            if not there.stopped:
                return False
        async with there.replica("second") as second:
            await there.takes_over(second)
            there.time.now += 1
            await there.passes(900, lambda: is_settled(there), step=1)
        assert there.most == len(there.machines()) == 1, (there.steps[step - 1], there.machines())
        return True


@pytest.mark.parametrize("first", range(1, PARTS + 1))
@synchronous
async def test_one_node_is_bought_when_the_leader_is_killed_at_any_step(
    tmp_path: Path, first: int
) -> None:
    """A loop over all steps of an order's life: each write to the API server, each call of the cloud."""
    for step in range(first, MOST_STEPS, PARTS):
        if not await lives_on_when_killed(tmp_path / str(step), step):
            break
    assert 10 < step < MOST_STEPS - PARTS


@synchronous
async def test_one_node_is_bought_when_two_replicas_lead(tmp_path: Path) -> None:
    """The second loses the write of the order, and takes the first one's for its own."""
    async with world(tmp_path) as there, nodes_that_come(there):
        async with there.replica("one", "a"), there.replica("two", "b"):
            for name in "abcd":
                there.pending(name, 14)
                wanted = len(there.server.all("pods"))
                await there.passes(60, lambda wanted=wanted: len(there.machines()) >= wanted)  # type: ignore[misc]
            await there.passes(600, lambda: is_settled(there))
        assert there.most == len(there.machines()) == 4


@synchronous
async def test_nodes_are_adopted_when_the_config_map_is_deleted(tmp_path: Path) -> None:
    """Their order is known by their tags; the pod is planned for the node that comes."""
    async with world(tmp_path) as there:
        pod = there.pending("a")
        async with there.replica("first"):
            await there.passes(
                60, lambda: any(it.state == "known" for it in there.orders().values())
            )
        (name,) = there.orders()
        there.server.remove("configmaps", ORDERS_MAP, NAMESPACE)
        async with there.replica("second") as second:
            await there.takes_over(second)
            await there.passes(60, lambda: pod["metadata"]["uid"] in str(there.orders()))
        assert set(there.orders()) == {name}
        assert len(there.machines()) == 1


@synchronous
async def test_orders_are_written_again_when_the_config_map_is_deleted_under_the_leader(
    tmp_path: Path,
) -> None:
    """The leader knows them still, or adopts what they have bought."""
    async with world(tmp_path) as there, there.replica():
        there.pending("a")
        await there.passes(60, lambda: any(it.state == "known" for it in there.orders().values()))
        there.server.remove("configmaps", ORDERS_MAP, NAMESPACE)
        there.pending("b", 14)
        await there.passes(60, lambda: len(there.machines()) == 2)
        await there.passes(60, lambda: len(there.orders()) == 2)


@synchronous
async def test_order_is_repeated_with_its_token_when_the_answer_is_lost(tmp_path: Path) -> None:
    """The cloud has done it, and nobody knows: twice lost, once done."""
    faults = (Fault("launch", 1, done=True), Fault("launch", 2, done=False))
    async with world(tmp_path, scenario(faults=faults)) as there, there.replica():
        there.pending("a")
        # The machine is found by its tag meanwhile, or the third answer arrives.
        await there.passes(60, lambda: any(it.state == "known" for it in there.orders().values()))
        assert len(there.machines()) == 1
        assert list(there.cloud().orders) == [f"demo-{next(iter(there.orders()))}-0"]


@synchronous
async def test_order_has_its_token_still_when_the_cloud_was_throttling(tmp_path: Path) -> None:
    """The call before may have been done."""
    faults = (Fault("launch", 1, error="throttled"),)
    async with world(tmp_path, scenario(faults=faults)) as there, there.replica():
        there.pending("a")
        await there.passes(60, there.machines)
        assert list(there.cloud().orders) == [f"demo-{next(iter(there.orders()))}-0"]


@synchronous
async def test_rest_is_planned_anew_when_half_of_an_order_comes(tmp_path: Path) -> None:
    """Two nodes are wanted, and of each zone one can be had."""
    settings = config(group(zones=("a", "b")))
    async with world(tmp_path, scenario(1, 1), settings) as there:
        there.hides_stock = True
        async with there.replica():
            for name in "ab":
                there.pending(name, 14)
            await there.passes(60, lambda: len(there.machines()) == 2)
        assert {there.zone(each) for each in there.machines()} == {"a", "b"}
        assert there.most == 2


@synchronous
async def test_next_offer_is_tried_when_a_node_never_joins(tmp_path: Path) -> None:
    """After 15 minutes it is ended, its offer pauses, and zone b is next."""
    settings = config(group(zones=("a", "b")))
    async with world(tmp_path, scenario(None, None), settings) as there, there.replica():
        there.pending("a")
        await there.passes(60, there.machines)
        there.time.now += 901
        await there.passes(60, lambda: there.machines() == ["i-000002"])
        assert there.zone("i-000002") == "b"
        await there.passes(60, lambda: there.notes("FenkaNeverJoined"))
        assert "has not joined the cluster" in there.notes("FenkaNeverJoined")[0]
        await there.passes(60, lambda: there.status().offers[0].state == "never joined")
        assert there.most == 1


@synchronous
async def test_node_that_offers_no_cards_is_ended_with_its_node(tmp_path: Path) -> None:
    """Its event says that it has joined, and what is missing."""
    async with world(tmp_path) as there, there.replica():
        there.pending("a")
        await there.passes(60, there.machines)
        there.join("i-000001")
        await there.passes(60, lambda: ORDER in there.node("i-000001")["labels"])
        there.time.now += 901
        await there.passes(120, lambda: not there.server.all("nodes"))
        assert "offers no cards" in there.notes("FenkaNeverJoined")[0]


@synchronous
async def test_cloud_is_asked_once_a_pause_when_everything_is_out_of_stock(tmp_path: Path) -> None:
    """The market says so only when it is asked: stock is not known before."""
    made = msgspec.structs.replace(scenario(), quota={"t4": 0})
    async with world(tmp_path, made) as there, there.replica():
        there.pending("a")
        await there.passes(60, lambda: there.notes("FenkaNoScaleOut"))
        (note,) = there.notes("FenkaNoScaleOut")
        assert "the next try is at" in note
        # A quota pauses for 30 minutes.
        there.time.now = there.began + 1700
        listed = there.cloud().calls["instances"]
        await there.passes(60, lambda: there.cloud().calls["instances"] > listed, step=1)
        assert there.cloud().calls["launch"] == 1
        await there.passes(200, lambda: there.cloud().calls["launch"] == 2)


@synchronous
async def test_node_is_deleted_when_its_instance_was_ended_by_hand(tmp_path: Path) -> None:
    """Not before the cloud has listed everything without it twice."""
    async with world(tmp_path) as there, nodes_that_come(there), there.replica():
        there.pending("a")
        await there.passes(600, lambda: is_settled(there))
        await there.provider().end(["i-000001"])
        there.server.remove("pods", "a", "default")
        there.stop_answering("i-000001")
        await there.passes(300, lambda: not there.server.all("nodes"))


@synchronous
async def test_instance_without_order_is_ended_when_it_never_joins(tmp_path: Path) -> None:
    """Its tag says that it is this cluster's, and nothing remembers why."""
    async with world(tmp_path) as there:
        key = OfferKey("t4", "t4.x", "a", "on-demand")
        await there.provider().launch(Order("demo-t4-lost-0", key, 1))
        async with there.replica():
            await there.passes(60, lambda: "t4-lost" in there.orders())
            assert there.machines() == ["i-000001"]
            there.time.now += 901
            await there.passes(60, lambda: not there.machines())


@synchronous
async def test_node_is_labelled_when_its_group_was_scaled_by_hand(tmp_path: Path) -> None:
    """It is used, and not ended for being over max."""
    settings = config(group(max=0))
    async with world(tmp_path, settings=settings) as there, nodes_that_come(there), there.replica():
        key = OfferKey("t4", "t4.x", "a", "on-demand")
        await there.provider().launch(Order("", key, 1))
        await there.passes(600, lambda: "t4-i-000001" in there.orders())
        await there.passes(600, lambda: is_settled(there))
        assert there.node("i-000001")["labels"][ORDER] == "t4-i-000001"
        assert there.machines() == ["i-000001"]


@synchronous
async def test_nothing_is_bought_when_a_gang_cannot_be_whole(tmp_path: Path) -> None:
    """Four pods of a card each, stock for three."""
    async with world(tmp_path, scenario(3)) as there, there.replica():
        for name in "abcd":
            there.pending(name, 14, labels=gang_labels("g", 4))
        await there.passes(60, lambda: len(there.notes("FenkaNoScaleOut")) == 4)
        assert "gang default/g starts whole or not at all" in there.notes("FenkaNoScaleOut")[0]
        assert there.machines() == []


@synchronous
async def test_no_refusal_is_posted_when_a_gangs_members_come_one_after_the_other(
    tmp_path: Path,
) -> None:
    """Half of the gang is refused for less than REFUSAL_SETTLES_S."""
    async with world(tmp_path) as there, there.replica():
        for name in "ab":
            there.pending(name, 14, labels=gang_labels("g", 4))
        await there.passes(1, lambda: there.status().unserved)
        for name in "cd":
            there.pending(name, 14, labels=gang_labels("g", 4))
        await there.passes(60, lambda: there.notes("FenkaScaleOut"))
        await there.passes(60, lambda: not there.status().unserved)
        assert there.notes("FenkaNoScaleOut") == []


@synchronous
async def test_nothing_is_bought_when_the_cloud_cannot_be_read(tmp_path: Path) -> None:
    """What cannot be read is never none: there may be nodes already."""
    faults = tuple(Fault("instances", call) for call in range(1, 6))
    async with world(tmp_path, scenario(faults=faults)) as there, there.replica() as replica:
        there.pending("a")
        await there.passes(10, lambda: replica.loop.problem)
        assert not there.machines()
        await there.passes(300, there.machines)
        assert there.cloud().calls["instances"] > 5


@synchronous
async def test_half_of_a_gang_ends_when_the_rest_cannot_be_had(tmp_path: Path) -> None:
    """Zone a had one, and zone b has none. Five minutes later there is nothing."""
    settings = config(group(zones=("a", "b")))
    async with world(tmp_path, scenario(1, 0), settings) as there:
        pods = [there.pending(name, 14, labels=gang_labels("g", 2)) for name in "ab"]
        there.server.put("configmaps", half_order(pods))
        await there.provider().launch(Order("demo-t4-half-0", OFFER, 1))
        async with there.replica():
            await there.passes(60, lambda: there.orders()["t4-half"].slots[0].state == "known")
            there.join("i-000001")
            await there.passes(60, lambda: ORDER in there.node("i-000001")["labels"])
            there.offer_cards("i-000001")
            await there.passes(60, lambda: there.orders()["t4-half"].state == "offering")
            there.time.now += 290
            await there.passes(120, lambda: not there.machines())
            assert not there.notes("FenkaMisfit")


OFFER = OfferKey("t4", "t4.x", "a", "on-demand")


def half_order(pods: list[Json]) -> Json:
    """The orders of a gang: a node for its first pod; the one for the second has failed."""
    record = OrderRecord(
        group="t4",
        type="t4.x",
        zone="a",
        capacity="on-demand",
        slots=(Slot(pods=(pods[0]["metadata"]["uid"],), cards=((0,),)),),
        state="written",
        price=4.0,
        written_at=NOW,
    )
    failed = failed_order(replace(OFFER, zone="b"), "out of stock", "", NOW)
    full = failed_order(OFFER, "out of stock", "", NOW)
    data = {"t4-half": record, "t4-b": failed, "t4-a": full}
    return {
        "metadata": {"name": ORDERS_MAP, "namespace": NAMESPACE},
        "data": {name: msgspec.json.encode(each).decode() for name, each in data.items()},
    }


@synchronous
async def test_misfit_is_bought_once(tmp_path: Path) -> None:
    """The pod is still pending when its node is not pinned any more: it is told so, and nothing is bought."""
    async with world(tmp_path) as there, there.replica():
        there.pending("a")
        await there.passes(60, there.machines)
        there.join("i-000001")
        await there.passes(60, lambda: ORDER in there.node("i-000001")["labels"])
        there.offer_cards("i-000001")
        await there.passes(120, lambda: there.notes("FenkaMisfit"))
        # The node has room, so the next pod of this kind needs none; a larger one of another kind does.
        there.pending("b", 14)
        await there.passes(600, lambda: len(there.machines()) == 2)
        assert len(there.notes("FenkaMisfit")) == 1


@synchronous
async def test_instance_has_time_to_join_again_when_its_node_was_deleted_by_hand(
    tmp_path: Path,
) -> None:
    """It was launched long ago. It ends after start.timeout, not at once."""
    async with world(tmp_path) as there, there.replica() as replica:
        pod = there.pending("a")
        await there.passes(60, there.machines)
        there.join("i-000001")
        await there.passes(60, lambda: ORDER in there.node("i-000001")["labels"])
        there.offer_cards("i-000001")
        there.bind(pod, "i-000001")
        await there.passes(600, lambda: not there.orders())
        there.time.now += 2000
        there.server.remove("nodes", "node-i-000001")
        there.server.remove("pods", "a", "default")
        await there.passes(60, there.orders)
        assert not there.notes("FenkaNeverJoined")
        again = elastic_node("again", T4_MIB, provider_id="simulated:///a/i-000001")
        there.server.put("nodes", again)
        await there.passes(
            60, lambda: ORDER in there.server.get("nodes", "again")["metadata"]["labels"]
        )
        assert there.machines() == ["i-000001"]
        assert not replica.loop.problem
