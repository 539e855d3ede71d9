"""Test that scheduler and node program together give a grown pod its first size back."""

from pathlib import Path

from fenka.dialects.resize_records import REFUSED, REQUEST
from fenka.scheduler.replica import Settings
from tests.builders import T4_MIB, node_json, pod_json, unschedulable
from tests.node.pod_kit import annotations_of, granted, path, ready_node, request, running
from tests.node.test_resize import hold, page
from tests.scheduler.test_growth_reclaimer import replica
from tests.waiting import until

FIRST_MIB = 4308
NODE = "/api/v1/nodes/n1"


async def test_grown_pod_shrinks_once_its_programs_use_less(library: Path) -> None:
    """Before that it keeps all of what it has, while another pod waits."""
    async with ready_node(library) as node:
        await running(node, "a")
        request(node, "a", "gpu-mem=12")
        await granted(node, "a", "gpu-mem=12")
        grown = page(node, "a")
        hold(node, "a", 6000)
        # As its kubelet reports it.
        whole = node.api.objects[NODE]
        node.api.put(NODE, {**whole, "status": node_json("n1", T4_MIB)["status"]})
        node.api.put(path("w"), pod_json("w", 8, uid="w", status=unschedulable("no room")))
        async with replica(node.api, Settings(take_growth_back=True)):
            await until(lambda: annotations_of(node, "a")[REQUEST] == f"gpu-mem={FIRST_MIB}MiB")
            await until(lambda: REFUSED in annotations_of(node, "a"))
            assert page(node, "a") == grown
            hold(node, "a", FIRST_MIB)
            await until(lambda: page(node, "a")[0][0] == FIRST_MIB)
            await until(lambda: REFUSED not in annotations_of(node, "a"))
