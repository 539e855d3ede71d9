"""The cases of a lease on a real kubelet and containerd: whose slice it is, and what outlives what."""

import textwrap

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.kit import MEMORY, World, deployment
from e2e.scenarios.lease_kit import CAP, CHEAT, agent, cap, pod, quoted


@pytest.mark.usefixtures("node")
def test_several_containers_and_init_containers(world: World) -> None:
    """Each has its own slice, and an init container may use the ids that an app container gets again."""
    shown = f'python3 -c "{CAP}"'
    world.cluster.apply(pod("many", f"init-a=4:{shown}\nx=4:\ny=2:"))
    world.cluster.wait_for_pod("many")
    assert [cap(world, "many", it) for it in ("x", "y")] == [4308, 2154]
    assert world.cluster.kubectl("logs", "many", "-c", "init-a").strip() == "4308"
    annotations = world.cluster.get("pod", "many")["metadata"]["annotations"]
    assert annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true"


def test_nobody_starts_who_was_not_placed(world: World, node: str) -> None:
    """A node chosen by hand: the API server says so, and where it does not, the pod's event."""
    by_hand = pod("by-hand", "x=2:", nodeName=node)
    with pytest.raises(ClusterError, match="use nodeSelector or node affinity instead"):
        world.cluster.apply(by_hand)
    former = ("--as=former-plugin", "--as-group=system:masters")
    world.cluster.kubectl(*former, "create", "-f", "-", stdin=by_hand)
    world.wait_for_event("by-hand", "not placed by fenka's scheduler extender")


@pytest.mark.usefixtures("node")
def test_a_container_that_restarts_keeps_its_slice(world: World) -> None:
    """The same lease, without a new Allocate."""
    world.cluster.apply(pod("again", f'x=4:python3 -c "{CAP}"; sleep 1; exit 1'))

    def restarted() -> bool:
        status = world.cluster.get("pod", "again")["status"]
        return any(it["restartCount"] > 0 for it in status.get("containerStatuses", []))

    wait_until("a second life", restarted, 60)
    assert world.cluster.kubectl("logs", "again", "--previous").strip() == "4308"
    wait_until("its limit again", lambda: "4308" in world.cluster.kubectl("logs", "again"), 30)


def test_kubelet_and_agent_come_and_go(world: World, node: str) -> None:
    """Pods go on with what they have, and the next one starts."""
    world.cluster.apply(pod("stays", "x=4:"))
    world.cluster.wait_for_pod("stays")
    world.cluster.node(node).restart_kubelet()
    world.wait_for_allocatable(node, MEMORY, 14)
    world.cluster.apply(pod("second", "x=4:"))
    world.cluster.wait_for_pod("second")
    before = agent(world, node)
    world.cluster.kubectl("-n", "fenka", "delete", "pod", before, "--force", "--grace-period=0")

    def back() -> bool:
        now = agent(world, node)
        return now not in ("", before) and "is registered" in world.cluster.kubectl(
            "-n", "fenka", "logs", now
        )

    # Without its plugin the kubelet fails a pod at once that the scheduler still sends.
    wait_until("another agent", back, 60)
    world.wait_for_allocatable(node, MEMORY, 14)
    world.cluster.apply(pod("third", "x=4:"))
    world.cluster.wait_for_pod("third")
    assert [cap(world, it, "x") for it in ("stays", "second", "third")] == [4308, 4308, 4308]


def test_fourteen_at_once(world: World, node: str) -> None:
    """A lost race with the runtime's cache would show as a start that is tried again."""
    world.cluster.apply(deployment("crowd", MEMORY, 1, replicas=14))
    pods = world.wait_for_running("crowd", 14)
    assert {it["spec"]["nodeName"] for it in pods} == {node}


def test_a_lost_card(world: World, node: str) -> None:
    """The kubelet hears of it, and of its return."""
    (cards,) = [
        it["metadata"]["name"]
        for it in world.cluster.list("pods", "fenka")
        if it["metadata"]["name"].startswith("fenka-cards") and it["spec"]["nodeName"] == node
    ]

    def fault(act: str) -> None:
        program = textwrap.dedent(f"""\
            from pathlib import Path
            from fenka.hardware.simulated import SimulatedNode
            SimulatedNode(Path("/run/fenka/simulated")).{act}(0)
            """)
        world.cluster.kubectl("-n", "fenka", "exec", cards, "--", "python3", "-c", program)

    fault("lose")
    world.wait_for_allocatable(node, MEMORY, 0)
    fault("recover")
    world.wait_for_allocatable(node, MEMORY, 14)


@pytest.mark.usefixtures("node")
def test_who_leaves_the_library_out_is_ended(world: World) -> None:
    """A dynamic linker of its own, and the driver by its own path: told from outside within 15 s."""
    world.cluster.apply(pod("cheat", "x=2:"))
    world.cluster.wait_for_pod("cheat")
    told = world.cluster.kubectl(
        "exec",
        "cheat",
        "--",
        "sh",
        "-c",
        f"python3 -c '{quoted(CHEAT)}'; echo ended $?",
        timeout=40,
    )
    assert told.split() == ["0", "0", "0", "0", "ended", "137"]
    world.wait_for_event("cheat", "without fenka's library")
