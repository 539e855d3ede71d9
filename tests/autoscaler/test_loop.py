"""Tests the program beside an API server and a cloud that stand in."""

import json
from pathlib import Path

from fenka.cluster.autoscaling import CAPACITY, GROUP, ORDER, PIN, PLANNED, PLANNED_PODS, SLOT
from tests.autoscaler.harness import world
from tests.builders import T4_MIB
from tests.coroutines import synchronous


@synchronous
async def test_pod_gets_a_node_when_none_fits(tmp_path: Path) -> None:
    """From a pending pod to a node that offers its cards, and the end of its order."""
    async with world(tmp_path) as there, there.replica():
        pod = there.pending("a")
        await there.passes(5, there.machines)
        assert there.machines() == ["i-000001"]
        ((name, record),) = there.orders().items()
        assert record.slots[0].pods == (pod["metadata"]["uid"],)
        await there.passes(5, lambda: there.notes("FenkaScaleOut"))
        await there.passes(
            5,
            lambda: PLANNED in there.annotations("pods", "a"),
        )
        there.join("i-000001")
        await there.passes(10, lambda: ORDER in there.node("i-000001")["labels"])
        assert there.node("i-000001")["labels"][ORDER] == name
        assert there.node("i-000001")["labels"][GROUP] == "t4"
        assert there.node("i-000001")["labels"][CAPACITY] == "on-demand"
        assert there.node("i-000001")["annotations"][SLOT] == "0"
        assert there.node("i-000001")["annotations"][PIN] == "60"
        planned = json.loads(there.node("i-000001")["annotations"][PLANNED_PODS])
        assert planned == {pod["metadata"]["uid"]: [0]}
        there.offer_cards("i-000001", T4_MIB)
        await there.passes(10, lambda: there.orders()[name].state == "offering")
        there.bind(pod, "i-000001")
        await there.passes(200, lambda: not there.orders())
        assert PIN not in there.node("i-000001")["annotations"]
        assert there.machines() == ["i-000001"]
