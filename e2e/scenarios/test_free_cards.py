"""Pods without cards go where no card is free: the node program keeps a taint, which kube-scheduler reads."""

import json
from functools import partial

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.containers import agent_name
from e2e.scenarios.installation import MEMORY, WORKLOAD, Installation, deployment

TAINT = {"key": "fenka.io/free-cards", "effect": "PreferNoSchedule"}
OTHER = {"key": "example.com/other", "effect": "PreferNoSchedule"}

ADD_TAINT = """
import asyncio
from fenka.cluster.objects import Node, node_path
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.eviction import add_taint

async def main():
    async with await Api.connect() as api:
        node = await api.get(node_path("NODE"), Node)
        await add_taint(api, node, "KEY")

asyncio.run(main())
"""


def taints(installation: Installation, node: str) -> list[dict[str, str]]:
    """Return the taints of a node, without those of its conditions."""
    spec = installation.cluster.get("node", node)["spec"]
    return [taint for taint in spec.get("taints", ()) if "kubernetes.io/" not in taint["key"]]


def marked(installation: Installation, node: str) -> bool:
    """Return whether the node has fenka's taint."""
    return TAINT in taints(installation, node)


def without_cards(name: str) -> str:
    """Return a pod that requests some CPU and no card."""
    container = {
        "name": "c",
        "image": WORKLOAD,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "exec sleep 100000"],
        "resources": {"requests": {"cpu": "10m", "memory": "8Mi"}},
    }
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
        }
    )


def test_pods_without_cards_leave_the_free_card_its_host(shared: Installation) -> None:
    """One of two nodes has its card in use: all pods without cards go there. Other taints stay."""
    names = [node.name for node in shared.cluster.nodes]
    for name in names:
        wait_until("the taint", partial(marked, shared, name))
    shared.cluster.kubectl("taint", "node", *names, "example.com/other:PreferNoSchedule")
    try:
        shared.cluster.apply(deployment("busy", MEMORY, 2))
        (busy,) = shared.wait_for_running("busy", 1)
        used = busy["spec"]["nodeName"]
        (idle,) = {*names} - {used}
        wait_until("no taint where the card is used", lambda: taints(shared, used) == [OTHER])
        assert marked(shared, idle)
        for number in range(4):
            shared.cluster.apply(without_cards(f"host-{number}"))
        for number in range(4):
            shared.cluster.wait_for_pod(f"host-{number}")
            placed = shared.cluster.get("pod", f"host-{number}")
            assert placed["spec"]["nodeName"] == used
        shared.cluster.kubectl("delete", "deployment", "busy", "--now")
        wait_until("the taint's return", partial(marked, shared, used))
        assert OTHER in taints(shared, used)
        # Nothing of it stays where nobody would remove it.
        shared.label(idle, "gpushare-")
        wait_until("the taint's end", lambda: taints(shared, idle) == [OTHER])
    finally:
        shared.cluster.kubectl("delete", "pods", "--all", "--now")
        shared.cluster.kubectl("taint", "node", *names, "example.com/other-")
        shared.label(names[0], "gpushare=true")
        shared.label(names[1], "gpushare=true")


def test_node_program_cannot_write_other_taints(installation: Installation, node: str) -> None:
    """A stolen token of it closes no node."""
    agent = agent_name(installation, node)

    def add(key: str) -> None:
        program = ADD_TAINT.replace("NODE", node).replace("KEY", key)
        installation.cluster.kubectl("-n", "fenka", "exec", agent, "--", "python3", "-c", program)

    with pytest.raises(ClusterError, match=r"may not write the taint fenka\.io/ending"):
        add("fenka.io/ending")
    assert all(taint["key"] == TAINT["key"] for taint in taints(installation, node))
