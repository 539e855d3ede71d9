"""Test leases on a real kubelet and containerd: which container gets which slice, and restarts."""

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.containers import (
    BYPASS_LIBRARY,
    PRINT_VISIBLE_MIB,
    agent_name,
    escape_single_quotes,
    inject_fault,
    pod,
    visible_mib,
)
from e2e.scenarios.installation import MEMORY, Installation, deployment


@pytest.mark.versions
@pytest.mark.usefixtures("node")
def test_each_container_has_its_own_slice_when_a_pod_has_several(
    installation: Installation,
) -> None:
    """An init container may use device IDs that an app container later gets again."""
    shown = f'python3 -c "{PRINT_VISIBLE_MIB}"'
    installation.cluster.apply(pod("many", f"init-a=4:{shown}\nx=4:\ny=2:"))
    installation.cluster.wait_for_pod("many")
    assert [visible_mib(installation, "many", container) for container in ("x", "y")] == [
        4308,
        2154,
    ]
    assert installation.cluster.kubectl("logs", "many", "-c", "init-a").strip() == "4308"
    annotations = installation.cluster.get("pod", "many")["metadata"]["annotations"]
    assert annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true"


@pytest.mark.full
def test_pod_does_not_start_when_node_name_bypasses_the_scheduler(
    installation: Installation, node: str
) -> None:
    """The admission policy rejects spec.nodeName; for exempt users the pod's event gives the reason."""
    by_hand = pod("by-hand", "x=2:", nodeName=node)
    with pytest.raises(ClusterError, match="use nodeSelector or node affinity instead"):
        installation.cluster.apply(by_hand)
    former = ("--as=former-plugin", "--as-group=system:masters")
    installation.cluster.kubectl(*former, "create", "-f", "-", stdin=by_hand)
    installation.wait_for_event("by-hand", "not placed by fenka's scheduler extender")


@pytest.mark.usefixtures("node")
def test_container_keeps_its_slice_when_it_restarts(installation: Installation) -> None:
    """The lease is the same, without another Allocate call."""
    installation.cluster.apply(
        pod("again", f'x=4:python3 -c "{PRINT_VISIBLE_MIB}"; sleep 1; exit 1')
    )

    def restarted() -> bool:
        status = installation.cluster.get("pod", "again")["status"]
        containers = status.get("containerStatuses", [])
        return any(container["restartCount"] > 0 for container in containers)

    wait_until("the container's restart", restarted)
    assert installation.cluster.kubectl("logs", "again", "--previous").strip() == "4308"
    wait_until("its limit again", lambda: "4308" in installation.cluster.kubectl("logs", "again"))


@pytest.mark.versions
def test_pods_keep_their_slices_when_kubelet_and_agent_restart(
    installation: Installation, node: str
) -> None:
    """Running pods keep their slices, and new pods start."""
    installation.cluster.apply(pod("stays", "x=4:"))
    installation.cluster.wait_for_pod("stays")
    installation.cluster.node(node).restart_kubelet()
    installation.wait_for_allocatable(node, MEMORY, 14)
    installation.cluster.apply(pod("second", "x=4:"))
    installation.cluster.wait_for_pod("second")
    before = agent_name(installation, node)
    installation.cluster.kubectl(
        "-n", "fenka", "delete", "pod", before, "--force", "--grace-period=0"
    )

    def back() -> bool:
        now = agent_name(installation, node)
        return now not in ("", before) and "is registered" in installation.cluster.kubectl(
            "-n", "fenka", "logs", now
        )

    # Without a registered plugin the kubelet would fail a pod that is still scheduled there.
    wait_until("another agent", back)
    installation.wait_for_allocatable(node, MEMORY, 14)
    installation.cluster.apply(pod("third", "x=4:"))
    installation.cluster.wait_for_pod("third")
    assert [visible_mib(installation, name, "x") for name in ("stays", "second", "third")] == [
        4308,
        4308,
        4308,
    ]


def test_every_pod_starts_when_fourteen_are_created_at_once(
    installation: Installation, node: str
) -> None:
    """A lost race with the runtime's cache would appear as a repeated start."""
    installation.cluster.apply(deployment("crowd", MEMORY, 1, replicas=14))
    pods = installation.wait_for_running("crowd", 14)
    assert {pod["spec"]["nodeName"] for pod in pods} == {node}


def test_allocatable_follows_the_card_when_it_is_lost_and_recovers(
    installation: Installation, node: str
) -> None:
    """The kubelet's count changes when the card is lost, and again when it returns."""
    inject_fault(installation, node, "lose(0)")
    installation.wait_for_allocatable(node, MEMORY, 0)
    inject_fault(installation, node, "recover(0)")
    installation.wait_for_allocatable(node, MEMORY, 14)


@pytest.mark.usefixtures("node")
def test_process_is_killed_when_it_bypasses_the_library(installation: Installation) -> None:
    """It uses its own dynamic linker and loads the driver by its path; the agent detects it from outside."""
    installation.cluster.apply(pod("cheat", "x=2:"))
    installation.cluster.wait_for_pod("cheat")
    output = installation.cluster.kubectl(
        "exec",
        "cheat",
        "--",
        "sh",
        "-c",
        f"python3 -c '{escape_single_quotes(BYPASS_LIBRARY)}'; echo ended $?",
        timeout=40,
    )
    assert output.split() == ["0", "0", "0", "0", "ended", "137"]
    installation.wait_for_event("cheat", "without fenka's library")
