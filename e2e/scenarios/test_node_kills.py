"""Kill the node program again and again while pods arrive, and count the pods that the kubelet fails."""

from collections.abc import Callable
from contextlib import suppress

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.containers import agent_name, pod, wait_for_agent
from e2e.scenarios.installation import Installation

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ROUNDS, PODS, UNITS = 17, 12, 14
"""204 pods in all. The node has 14 units."""
PER_AGENT = 2
"""Kills of one agent's pod. The kubelet delays a container's second restart by 10 s, the third by 20 s."""


def kill_container(installation: Installation, node: str, kind: str) -> None:
    """Kill a container of the agent's pod by SIGKILL, unless it is away already.

    kind: the field of the pod's status that has the container.
    """
    (status,) = installation.cluster.get("pod", agent_name(installation, node), "fenka")["status"][
        kind
    ]
    container = status["containerID"].removeprefix("containerd://")
    with suppress(ClusterError):
        installation.cluster.node(node).ctr("tasks", "kill", "--signal", "SIGKILL", container)


def count_failed(
    installation: Installation, node: str, kill: Callable[[], None], rounds: int = ROUNDS
) -> list[str]:
    """Create pods in rounds with a kill in each, and return the kubelet's sentences about failed ones."""
    cluster = installation.cluster
    failed: list[str] = []
    for number in range(rounds):
        if number % PER_AGENT == 0:
            cluster.kubectl("-n", "fenka", "delete", "pod", agent_name(installation, node))
            wait_for_agent(installation, node, UNITS)
        names = [f"k{number}-{place}" for place in range(PODS)]
        for place, name in enumerate(names):
            # Early and late, since a pod that is on its way and one that is not placed yet differ.
            if place == 1 + number % (PODS - 2):
                kill()
            cluster.apply(pod(name, "x=1:", nodeSelector={"kubernetes.io/hostname": node}))

        def decided(names: list[str] = names) -> bool:
            pods = {one["metadata"]["name"]: one["status"]["phase"] for one in cluster.list("pods")}
            return all(pods[name] in ("Running", "Failed") for name in names)

        wait_until("all pods of a round run or failed", decided, 400)
        for one in cluster.list("pods"):
            if (status := one["status"])["phase"] == "Failed":
                name = one["metadata"]["name"]
                failed.append(f"{name} {status.get('reason')}: {status.get('message')}")
        print(f"round {number}: {len(failed)} failed", flush=True)
        cluster.kubectl("delete", "pod", "--all", "--now")
        wait_for_agent(installation, node, UNITS)
    print(f"{len(failed)} of {rounds * PODS} pods failed", *failed, sep="\n", flush=True)
    return failed


def test_no_pod_is_failed_by_the_kubelet_when_the_node_program_is_killed_repeatedly(
    installation: Installation, node: str
) -> None:
    """Pods that arrive around each kill wait for the program, and every one runs."""
    failed = count_failed(
        installation, node, lambda: kill_container(installation, node, "containerStatuses")
    )
    assert not failed, failed


def test_later_pods_wait_when_the_plugin_relay_is_killed(
    installation: Installation, node: str
) -> None:
    """The kubelet fails what was on its way. The program has the scheduler send no more."""
    rounds = 8
    failed = count_failed(
        installation,
        node,
        lambda: kill_container(installation, node, "initContainerStatuses"),
        rounds,
    )
    assert len(failed) <= rounds, failed
