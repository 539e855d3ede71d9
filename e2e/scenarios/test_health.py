"""Cards that fail, on the real cluster: who learns of it, and how a card comes back."""

import json
import re
from collections.abc import Iterator

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.kit import MEMORY, World
from e2e.scenarios.lease_kit import agent, cap, pod, settle


def cards(world: World, node: str) -> str:
    """The pod that keeps the simulated cards of a node."""
    (found,) = [
        it["metadata"]["name"]
        for it in world.cluster.list("pods", "fenka")
        if it["metadata"]["name"].startswith("fenka-cards") and it["spec"]["nodeName"] == node
    ]
    return str(found)


def simulate(world: World, node: str, act: str) -> None:
    """Have something happen to the node's only card."""
    program = (
        "from pathlib import Path; from fenka.hardware.simulated import SimulatedNode; "
        f"SimulatedNode(Path('/run/fenka/simulated')).{act}"
    )
    keeper = cards(world, node)
    world.cluster.kubectl("-n", "fenka", "exec", keeper, "--", "python3", "-c", program)


def healthy(world: World, node: str) -> list[bool]:
    """What the extender reads of each card."""
    text = world.cluster.get("node", node)["metadata"]["annotations"]["fenka.io/cards"]
    return [it["healthy"] for it in json.loads(text)["cards"]]


def restart_agent(world: World, node: str) -> None:
    """As an upgrade does."""
    before = agent(world, node)
    world.cluster.kubectl("-n", "fenka", "delete", "pod", before, "--force", "--grace-period=0")
    wait_until("another agent", lambda: agent(world, node) not in ("", before), 60)


@pytest.fixture
def well(world: World, node: str) -> Iterator[str]:
    """The sharing node; afterwards its card is well again, whatever happened."""
    yield node
    simulate(world, node, "recover(0)")
    world.cluster.kubectl("annotate", "--overwrite", "node", node, "fenka.io/reset=0")
    world.cluster.kubectl("annotate", "node", node, "fenka.io/cordoned-")
    world.wait_for_allocatable(node, MEMORY, 14)


def test_an_xid_withdraws_the_card_until_somebody_resets_it(world: World, well: str) -> None:
    """The kubelet, the extender and the node's events say so; a restart of the agent changes nothing."""
    world.cluster.apply(pod("runs", "x=4:"))
    world.cluster.wait_for_pod("runs")
    simulate(world, well, "raise_xid(0, 31)")
    simulate(world, well, "raise_xid(0, 48)")
    world.wait_for_allocatable(well, MEMORY, 0)
    wait_until("the inventory", lambda: healthy(world, well) == [False], 30)
    wait_until(
        "the node's event",
        lambda: any("is not used: XID 48" in it for it in world.cluster.events(well)),
        30,
    )
    assert cap(world, "runs", "x") == 4308
    world.cluster.apply(pod("waits", "x=4:"))
    world.wait_for_event("waits", "Insufficient aliyun.com/gpu-mem")

    restart_agent(world, well)
    settle(world, well, 0)
    assert healthy(world, well) == [False]

    world.cluster.kubectl("annotate", "node", well, "fenka.io/reset=0")
    world.wait_for_allocatable(well, MEMORY, 14)
    assert healthy(world, well) == [True]
    assert "fenka.io/reset" not in world.cluster.get("node", well)["metadata"]["annotations"]
    world.cluster.wait_for_pod("waits", seconds=90)


def test_a_card_that_is_lost_at_the_start_is_not_forgotten(world: World, well: str) -> None:
    """The extender goes on to say why nothing fits, and it is used again once it is back."""
    simulate(world, well, "lose(0)")
    world.wait_for_allocatable(well, MEMORY, 0)
    restart_agent(world, well)
    settle(world, well, 0)
    assert healthy(world, well) == [False]
    simulate(world, well, "recover(0)")
    world.wait_for_allocatable(well, MEMORY, 14)
    assert healthy(world, well) == [True]
    world.cluster.apply(pod("after", "x=4:"))
    world.cluster.wait_for_pod("after")
    assert cap(world, "after", "x") == 4308


def test_a_cordoned_card_takes_nobody_new(world: World, well: str) -> None:
    """Its pods stay; the node itself is not cordoned."""
    world.cluster.apply(pod("stays", "x=4:"))
    world.cluster.wait_for_pod("stays")
    world.cluster.kubectl("annotate", "node", well, "fenka.io/cordoned=0")
    world.wait_for_allocatable(well, MEMORY, 4)
    world.cluster.apply(pod("new", "x=2:"))
    world.wait_for_event("new", "0/2 nodes are available")
    assert re.search(
        "Insufficient aliyun.com/gpu-mem|cordoned", " ".join(world.cluster.events("new"))
    )
    assert cap(world, "stays", "x") == 4308
    assert not world.cluster.get("node", well)["spec"].get("unschedulable")
    world.cluster.kubectl("annotate", "node", well, "fenka.io/cordoned-")
    world.cluster.wait_for_pod("new")


def test_a_card_has_one_owner(world: World, node: str) -> None:
    """The agent's lock is where a workstation's daemon of the machine looks, in the machine's own network."""
    text = world.cluster.get("node", node)["metadata"]["annotations"]["fenka.io/cards"]
    (card,) = json.loads(text)["cards"]
    machine = world.cluster.node(node)
    assert f"@fenka/card/{card['uuid']}" in machine.run("cat", "/proc/net/unix")
    program = f"import socket; socket.socket(socket.AF_UNIX).bind('\\0fenka/card/{card['uuid']}')"
    with pytest.raises(ClusterError, match="Address already in use"):
        machine.run("python3", "-c", program)
