"""Cards that fail, on the real cluster: who learns of it, and how a card comes back."""

import json
import re
from collections.abc import Iterator

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.containers import agent, cap, pod, settle
from e2e.scenarios.installation import MEMORY, Installation


def cards(installation: Installation, node: str) -> str:
    """The pod that keeps the simulated cards of a node."""
    (name,) = [
        pod["metadata"]["name"]
        for pod in installation.cluster.list("pods", "fenka")
        if pod["metadata"]["name"].startswith("fenka-cards") and pod["spec"]["nodeName"] == node
    ]
    return str(name)


def simulate(installation: Installation, node: str, act: str) -> None:
    """Have something happen to the node's only card."""
    program = (
        "from pathlib import Path; from fenka.hardware.simulated import SimulatedNode; "
        f"SimulatedNode(Path('/run/fenka/simulated')).{act}"
    )
    monitor = cards(installation, node)
    installation.cluster.kubectl("-n", "fenka", "exec", monitor, "--", "python3", "-c", program)


def healthy(installation: Installation, node: str) -> list[bool]:
    """What the extender reads of each card."""
    text = installation.cluster.get("node", node)["metadata"]["annotations"]["fenka.io/cards"]
    return [card["healthy"] for card in json.loads(text)["cards"]]


def restart_agent(installation: Installation, node: str) -> None:
    """As an upgrade does."""
    before = agent(installation, node)
    installation.cluster.kubectl(
        "-n", "fenka", "delete", "pod", before, "--force", "--grace-period=0"
    )
    wait_until("another agent", lambda: agent(installation, node) not in ("", before), 60)


@pytest.fixture
def well(installation: Installation, node: str) -> Iterator[str]:
    """The sharing node; afterwards its card is well again, whatever happened."""
    yield node
    simulate(installation, node, "recover(0)")
    installation.cluster.kubectl("annotate", "--overwrite", "node", node, "fenka.io/reset=0")
    installation.cluster.kubectl("annotate", "node", node, "fenka.io/cordoned-")
    installation.wait_for_allocatable(node, MEMORY, 14)


def test_an_xid_withdraws_the_card_until_somebody_resets_it(
    installation: Installation, well: str
) -> None:
    """The kubelet, the extender and the node's events say so; a restart of the agent changes nothing."""
    installation.cluster.apply(pod("runs", "x=4:"))
    installation.cluster.wait_for_pod("runs")
    simulate(installation, well, "raise_xid(0, 31)")
    simulate(installation, well, "raise_xid(0, 48)")
    installation.wait_for_allocatable(well, MEMORY, 0)
    wait_until("the inventory", lambda: healthy(installation, well) == [False], 30)
    wait_until(
        "the node's event",
        lambda: any(
            "is not used: XID 48" in message for message in installation.cluster.events(well)
        ),
        30,
    )
    assert cap(installation, "runs", "x") == 4308
    installation.cluster.apply(pod("waits", "x=4:"))
    installation.wait_for_event("waits", "Insufficient aliyun.com/gpu-mem")

    restart_agent(installation, well)
    settle(installation, well, 0)
    assert healthy(installation, well) == [False]

    installation.cluster.kubectl("annotate", "node", well, "fenka.io/reset=0")
    installation.wait_for_allocatable(well, MEMORY, 14)
    assert healthy(installation, well) == [True]
    assert "fenka.io/reset" not in installation.cluster.get("node", well)["metadata"]["annotations"]
    installation.cluster.wait_for_pod("waits", seconds=90)


def test_a_card_that_is_lost_at_the_start_is_not_forgotten(
    installation: Installation, well: str
) -> None:
    """The extender goes on to say why nothing fits, and it is used again once it is back."""
    simulate(installation, well, "lose(0)")
    installation.wait_for_allocatable(well, MEMORY, 0)
    restart_agent(installation, well)
    settle(installation, well, 0)
    assert healthy(installation, well) == [False]
    simulate(installation, well, "recover(0)")
    installation.wait_for_allocatable(well, MEMORY, 14)
    assert healthy(installation, well) == [True]
    installation.cluster.apply(pod("after", "x=4:"))
    installation.cluster.wait_for_pod("after")
    assert cap(installation, "after", "x") == 4308


def test_a_cordoned_card_takes_nobody_new(installation: Installation, well: str) -> None:
    """Its pods stay; the node itself is not cordoned."""
    installation.cluster.apply(pod("stays", "x=4:"))
    installation.cluster.wait_for_pod("stays")
    installation.cluster.kubectl("annotate", "node", well, "fenka.io/cordoned=0")
    installation.wait_for_allocatable(well, MEMORY, 4)
    installation.cluster.apply(pod("new", "x=2:"))
    installation.wait_for_event("new", "0/2 nodes are available")
    assert re.search(
        "Insufficient aliyun.com/gpu-mem|cordoned", " ".join(installation.cluster.events("new"))
    )
    assert cap(installation, "stays", "x") == 4308
    assert not installation.cluster.get("node", well)["spec"].get("unschedulable")
    installation.cluster.kubectl("annotate", "node", well, "fenka.io/cordoned-")
    installation.cluster.wait_for_pod("new")


def test_a_card_has_one_owner(installation: Installation, node: str) -> None:
    """The agent's lock is where a workstation's daemon of the machine looks, in the machine's own network."""
    text = installation.cluster.get("node", node)["metadata"]["annotations"]["fenka.io/cards"]
    (card,) = json.loads(text)["cards"]
    machine = installation.cluster.node(node)
    assert f"@fenka/card/{card['uuid']}" in machine.run("cat", "/proc/net/unix")
    program = f"import socket; socket.socket(socket.AF_UNIX).bind('\\0fenka/card/{card['uuid']}')"
    with pytest.raises(ClusterError, match="Address already in use"):
        machine.run("python3", "-c", program)
