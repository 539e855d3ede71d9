"""Test the extender on a real cluster: killed replicas and API servers, placement, upgrades, drains.

Most pods here are placed on nodes without a kubelet (virtual_nodes.py).
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from e2e.artifacts import CHART
from e2e.cluster import Cluster, wait_until
from e2e.scenarios.installation import (
    MEMORY,
    RELEASE,
    Installation,
    call_extender,
    deployment,
)
from e2e.scenarios.replicas import leader, replicas, wait_for_replicas
from e2e.scenarios.virtual_nodes import UNITS, Json, VirtualNodes, node_object
from fenka.dialects import gpushare


def delete_leader(cluster: Cluster) -> None:
    """Delete the leader's pod without a grace period."""
    name = leader(cluster)["metadata"]["name"]
    cluster.kubectl("-n", RELEASE, "delete", "pod", name, "--grace-period=0", "--force")


def kill_leader(cluster: Cluster) -> None:
    """Kill the leader's process, so that it cannot give up its lease."""
    pod = leader(cluster)
    script = """
        for process in /proc/[0-9]*; do
          grep -q "$1" $process/cgroup && tr '\\0' ' ' < $process/cmdline | grep -q 'fenka scheduler' &&
            kill -9 "${process##*/}"
        done 2> /dev/null; true
    """
    node = cluster.node(pod["spec"]["nodeName"])
    node.run("sh", "-c", script, "sh", pod["metadata"]["uid"])

    def restarted() -> bool:
        status = cluster.get("pod", pod["metadata"]["name"], RELEASE)["status"]
        before = pod["status"]["containerStatuses"][0]["restartCount"]
        return bool(status["containerStatuses"][0]["restartCount"] > before)

    wait_until("the restart of the killed leader", restarted)


def test_standby_forwards_calls_when_both_replicas_are_ready(virtual: VirtualNodes) -> None:
    """So the Service and a rollout need not distinguish the leader."""
    cluster = virtual.cluster
    wait_for_replicas(cluster)
    virtual.node("virtual-0", 1)
    pod = virtual.pod("p", 4)
    arguments = json.dumps({"Pod": pod, "Nodes": None, "NodeNames": ["virtual-0"]})
    leads = leader(cluster)["metadata"]["name"]
    answers = {}
    for replica in replicas(cluster):
        url = f"https://{replica['status']['podIP']}:12345"
        filtered = call_extender(cluster, f"{url}/gpushare-scheduler/filter", arguments)
        assert json.loads(filtered)["NodeNames"] == ["virtual-0"]
        answers[replica["metadata"]["name"]] = call_extender(cluster, f"{url}/metrics")
    assert len(answers) == 2
    for name, text in answers.items():
        assert f"fenka_scheduler_leading {float(name == leads)}" in text


@pytest.mark.parametrize(
    "inject_fault",
    [delete_leader, kill_leader, Cluster.restart_apiserver],
    ids=["leader-deleted", "leader-killed", "apiserver-killed"],
)
def test_no_pod_is_lost_or_overcommitted_when_a_component_is_killed(
    virtual: VirtualNodes, inject_fault: Callable[[Cluster], None]
) -> None:
    """All pods are bound, no card is overcommitted, and the extender's report equals the annotations."""
    cluster, total = virtual.cluster, 48
    wait_for_replicas(cluster)
    for number in range(2):
        virtual.node(f"virtual-{number}", 4)

    def stream() -> None:
        for number in range(total):
            while True:
                with contextlib.suppress(Exception):
                    virtual.create(virtual.pod(f"p{number}", 2 + number % 3 // 2))
                    break
                # The API server is unavailable, or it created the pod but the answer was lost.
                with contextlib.suppress(Exception):
                    cluster.get("pod", f"p{number}", virtual.namespace)
                    break
                time.sleep(0.2)

    thread = threading.Thread(target=stream)
    thread.start()
    wait_until("the stream runs", lambda: len(virtual.placed()) >= 6)
    inject_fault(cluster)
    thread.join(120)
    virtual.wait_for_placed(total, 90)
    held = virtual.units_by_annotations()
    assert sum(sum(cards.values()) for cards in held.values()) == sum(
        2 + number % 3 // 2 for number in range(total)
    )
    assert max(units for cards in held.values() for units in cards.values()) <= UNITS
    wait_until("the extender's report is the same", lambda: virtual.reported_units() == held)
    wait_for_replicas(cluster)


def test_invalid_record_is_reported_and_counted_once_when_a_pod_carries_one(
    virtual: VirtualNodes,
) -> None:
    """The event is on the pod, and other pods can use the other card."""
    virtual.node("virtual-0", 2)
    bad = virtual.pod("bad", 10, nodeName="virtual-0", annotations={gpushare.IDX: "x"})
    virtual.create(bad)
    virtual.wait_for_event("bad", "ALIYUN_COM_GPU_MEM_IDX is 'x'", "counted for what it requests")
    assert virtual.reported_units() == {"virtual-0": Counter({"0": 10})}
    virtual.create(virtual.pod("p", 7))
    wait_until(
        "its card",
        lambda: virtual.reported_units() == {"virtual-0": Counter({"0": 10, "1": 7})},
    )


def test_pod_stays_pending_when_free_units_are_spread_over_cards(virtual: VirtualNodes) -> None:
    """The node's sum is sufficient for kube-scheduler; the extender's reason is in the pod's event."""
    virtual.node("virtual-0", 2)
    virtual.create(virtual.pod("a", 10), virtual.pod("b", 10))
    assert {card for _, card in virtual.wait_for_placed(2).values()} == {"0", "1"}
    virtual.create(virtual.pod("p", 8))
    virtual.wait_for_event("p", "Insufficient GPU Memory in one device: no GPU fits")
    # It is placed without further action when another pod ends.
    virtual.cluster.kubectl("-n", virtual.namespace, "delete", "pod", "a")
    assert "p" in virtual.wait_for_placed(2)


def test_pod_is_placed_when_one_of_hundreds_of_nodes_has_room(
    virtual: VirtualNodes,
) -> None:
    """By kube-scheduler's count all have room; its configuration makes it evaluate every node."""
    nodes = []
    for number in range(300):
        node = node_object(f"virtual-{number}", 1, {})
        if number != 299:
            node["metadata"]["annotations"]["fenka.io/cordoned"] = "0"
        nodes.append(node)
    virtual.add_all(1, nodes)
    wait_until("the extender knows them", lambda: len(virtual.reported_units()) == 300)
    for number in range(3):
        virtual.create(virtual.pod(f"p{number}", 4))
        placed = virtual.wait_for_placed(number + 1, 30)
        assert placed[f"p{number}"] == ("virtual-299", "0")


def test_pods_are_spread_when_the_node_label_overrides_the_policy(virtual: VirtualNodes) -> None:
    """With ack.node.gpu.placement=spread each has a card; without it all are on the first."""
    virtual.node("virtual-0", 3, ack_node_gpu_placement="spread")
    virtual.create(*(virtual.pod(f"p{number}", 2) for number in range(3)))
    assert {card for _, card in virtual.wait_for_placed(3).values()} == {"0", "1", "2"}
    virtual.cluster.kubectl("label", "node", "virtual-0", "ack.node.gpu.placement-")
    virtual.cluster.kubectl("-n", virtual.namespace, "delete", "pods", "--all")
    virtual.create(*(virtual.pod(f"q{number}", 2) for number in range(3)))
    assert {card for _, card in virtual.wait_for_placed(3).values()} == {"0"}


# ---- on real nodes ----


def slice_states(installation: Installation) -> dict[str, Json]:
    """Return node, record and containers of each running pod, which must not change in an upgrade."""
    return {
        pod["metadata"]["name"]: {
            "node": pod["spec"]["nodeName"],
            "record": pod["metadata"]["annotations"],
            "containers": [
                (status["containerID"], status["restartCount"])
                for status in pod["status"]["containerStatuses"]
            ],
        }
        for pod in installation.pods("held")
    }


@pytest.mark.versions
@pytest.mark.full
def test_running_slices_are_kept_when_the_release_is_upgraded_and_rolled_back(
    shared: Installation,
) -> None:
    """Containers, cards and the table stay the same, and helm waits for both replicas."""
    cluster = shared.cluster
    cluster.apply(deployment("held", MEMORY, 5, replicas=4))
    shared.wait_for_running("held", 4)
    wait_until(
        "all are confirmed",
        lambda: all(
            pod["metadata"]["annotations"][gpushare.ASSIGNED] == "true"
            for pod in shared.pods("held")
        ),
    )
    before, table = slice_states(shared), shared.inspect("-d")
    images = {pod["metadata"]["name"] for pod in replicas(cluster)}
    changed = ("--set=scheduler.policy=spread", "--set=node.resources.requests.cpu=40m")
    waiting = ("-n", RELEASE, "--wait", "--timeout=3m")
    cluster.helm("upgrade", RELEASE, str(CHART), "--reuse-values", *changed, *waiting, timeout=200)
    assert not images & {pod["metadata"]["name"] for pod in replicas(cluster)}
    assert slice_states(shared) == before
    # The kubelet reports no units until the new device plugin has registered.
    wait_until("the same table", lambda: shared.inspect("-d") == table)
    cluster.apply(deployment("new", MEMORY, 4))
    shared.wait_for_running("new", 1)
    cluster.helm("rollback", RELEASE, *waiting, timeout=200)
    shared.wait_for_running("new", 1)
    cluster.kubectl("delete", "deployment", "new", "--now")
    assert slice_states(shared) == before
    wait_until("the same table again", lambda: shared.inspect("-d") == table)


def test_pods_and_leadership_move_when_the_leading_node_is_drained(shared: Installation) -> None:
    """The disruption budget allows one replica to be evicted at a time."""
    cluster = shared.cluster
    wait_for_replicas(cluster)
    cluster.apply(deployment("held", MEMORY, 5))
    shared.wait_for_running("held", 1)
    first = leader(cluster)["spec"]["nodeName"]
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
    try:
        cluster.kubectl("drain", first, *options, timeout=90)
        (moved,) = shared.wait_for_running("held", 1)
        assert moved["spec"]["nodeName"] != first
        assert leader(cluster)["spec"]["nodeName"] != first
    finally:
        cluster.kubectl("uncordon", first)
    wait_for_replicas(cluster)
