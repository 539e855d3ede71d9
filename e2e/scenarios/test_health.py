"""Test failing cards on the real cluster: where the failure is reported, and how a card returns."""

import json
import re
from collections.abc import Iterator

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.containers import agent_name, inject_fault, pod, visible_mib, wait_for_agent
from e2e.scenarios.installation import MEMORY, Installation


def card_health(installation: Installation, node: str) -> list[bool]:
    """Return the health of each card in the node's inventory annotation."""
    text = installation.cluster.get("node", node)["metadata"]["annotations"]["fenka.io/cards"]
    return [card["healthy"] for card in json.loads(text)["cards"]]


def restart_agent(installation: Installation, node: str) -> None:
    """Replace the agent's pod, as an upgrade does."""
    before = agent_name(installation, node)
    installation.cluster.kubectl(
        "-n", "fenka", "delete", "pod", before, "--force", "--grace-period=0"
    )
    wait_until("another agent", lambda: agent_name(installation, node) not in ("", before))


@pytest.fixture
def healthy_node(installation: Installation, node: str) -> Iterator[str]:
    """Provide the sharing node, and restore its card afterwards."""
    yield node
    inject_fault(installation, node, "recover(0)")
    installation.cluster.kubectl("annotate", "--overwrite", "node", node, "fenka.io/reset=0")
    installation.cluster.kubectl("annotate", "node", node, "fenka.io/cordoned-")
    installation.wait_for_allocatable(node, MEMORY, 14)


def test_card_is_withdrawn_until_reset_when_a_fatal_xid_occurs(
    installation: Installation, healthy_node: str
) -> None:
    """Kubelet, extender and node events report it, also after a restart of the agent."""
    installation.cluster.apply(pod("runs", "x=4:"))
    installation.cluster.wait_for_pod("runs")
    inject_fault(installation, healthy_node, "raise_xid(0, 31)")
    inject_fault(installation, healthy_node, "raise_xid(0, 48)")
    installation.wait_for_allocatable(healthy_node, MEMORY, 0)
    wait_until("the inventory", lambda: card_health(installation, healthy_node) == [False])
    wait_until(
        "the node's event",
        lambda: any(
            "is not used: XID 48" in message
            for message in installation.cluster.events(healthy_node)
        ),
    )
    assert visible_mib(installation, "runs", "x") == 4308
    installation.cluster.apply(pod("waits", "x=4:"))
    installation.wait_for_event("waits", "Insufficient aliyun.com/gpu-mem")

    restart_agent(installation, healthy_node)
    wait_for_agent(installation, healthy_node, 0)
    assert card_health(installation, healthy_node) == [False]

    installation.cluster.kubectl("annotate", "node", healthy_node, "fenka.io/reset=0")
    installation.wait_for_allocatable(healthy_node, MEMORY, 14)
    assert card_health(installation, healthy_node) == [True]
    assert (
        "fenka.io/reset"
        not in installation.cluster.get("node", healthy_node)["metadata"]["annotations"]
    )
    installation.cluster.wait_for_pod("waits", seconds=90)


def test_card_stays_in_the_inventory_when_it_is_lost_at_agent_start(
    installation: Installation, healthy_node: str
) -> None:
    """The extender still gives the reason, and the card is used again after its return."""
    inject_fault(installation, healthy_node, "lose(0)")
    installation.wait_for_allocatable(healthy_node, MEMORY, 0)
    restart_agent(installation, healthy_node)
    wait_for_agent(installation, healthy_node, 0)
    assert card_health(installation, healthy_node) == [False]
    inject_fault(installation, healthy_node, "recover(0)")
    installation.wait_for_allocatable(healthy_node, MEMORY, 14)
    assert card_health(installation, healthy_node) == [True]
    installation.cluster.apply(pod("after", "x=4:"))
    installation.cluster.wait_for_pod("after")
    assert visible_mib(installation, "after", "x") == 4308


def test_card_accepts_no_new_pod_when_cordoned(
    installation: Installation, healthy_node: str
) -> None:
    """Its pods keep running, and the node itself is not cordoned."""
    installation.cluster.apply(pod("stays", "x=4:"))
    installation.cluster.wait_for_pod("stays")
    installation.cluster.kubectl("annotate", "node", healthy_node, "fenka.io/cordoned=0")
    installation.wait_for_allocatable(healthy_node, MEMORY, 4)
    installation.cluster.apply(pod("new", "x=2:"))
    installation.wait_for_event("new", "0/2 nodes are available")
    assert re.search(
        "Insufficient aliyun.com/gpu-mem|cordoned", " ".join(installation.cluster.events("new"))
    )
    assert visible_mib(installation, "stays", "x") == 4308
    assert not installation.cluster.get("node", healthy_node)["spec"].get("unschedulable")
    installation.cluster.kubectl("annotate", "node", healthy_node, "fenka.io/cordoned-")
    installation.cluster.wait_for_pod("new")


def test_card_lock_is_visible_to_other_programs_when_the_agent_owns_the_card(
    installation: Installation, node: str
) -> None:
    """The lock is an abstract socket in the machine's network, where a workstation's daemon also looks."""
    text = installation.cluster.get("node", node)["metadata"]["annotations"]["fenka.io/cards"]
    (card,) = json.loads(text)["cards"]
    machine = installation.cluster.node(node)
    assert f"@fenka/card/{card['uuid']}" in machine.run("cat", "/proc/net/unix")
    program = f"import socket; socket.socket(socket.AF_UNIX).bind('\\0fenka/card/{card['uuid']}')"
    with pytest.raises(ClusterError, match="Address already in use"):
        machine.run("python3", "-c", program)
