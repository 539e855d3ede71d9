"""Test the extender on a real cluster: killed replicas and API servers, preemption, upgrades, drains.

Most pods here are placed on nodes without a kubelet (virtual_nodes.py).
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest

from e2e.cluster import Cluster, ClusterError, wait_until
from e2e.scenarios.conftest import CHART, RELEASE
from e2e.scenarios.installation import MEMORY, Installation, call_extender, deployment
from e2e.scenarios.virtual_nodes import UNITS, VIRTUAL_LABEL, Json, VirtualNodes, node_object
from fenka.dialects import gpushare


@pytest.fixture
def virtual(installation: Installation, namespace: str) -> Iterator[VirtualNodes]:
    """Provide nodes without a kubelet, and delete them afterwards."""
    virtual = VirtualNodes(installation, namespace)
    yield virtual
    installation.cluster.kubectl(
        "-n", namespace, "delete", "pods", "--all", "--grace-period=0", "--force"
    )
    installation.cluster.kubectl("delete", "node", "-l", VIRTUAL_LABEL)


def replicas(cluster: Cluster) -> list[Json]:
    """Return the extender's pods that are not being deleted."""
    pods = cluster.list("pods", RELEASE, "app.kubernetes.io/component=scheduler")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def is_ready(pod: Json) -> bool:
    """Return whether the pod's Ready condition is true."""
    conditions = {
        condition["type"]: condition["status"] for condition in pod["status"].get("conditions", [])
    }
    return conditions.get("Ready") == "True"


def wait_for_replicas(cluster: Cluster) -> None:
    """Wait until both replicas are ready."""

    def both() -> bool:
        pods = replicas(cluster)
        states = {
            pod["metadata"]["name"]: (pod["spec"].get("nodeName"), pod["status"]) for pod in pods
        }
        assert len(pods) == 2, states
        assert all(map(is_ready, pods)), states
        return True

    wait_until("two ready replicas", both, 180)


def leader(cluster: Cluster) -> Json:
    """Return the pod of the leading replica."""
    holder = cluster.get("lease", "fenka-scheduler", RELEASE)["spec"]["holderIdentity"]
    return cluster.get("pod", holder.rpartition("_")[0], RELEASE)


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
    virtual.wait_for_event("p", "Insufficient GPU Memory in one device: 0/2 GPUs fit")
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


@pytest.fixture
def high_priority_class(installation: Installation) -> Iterator[str]:
    """Provide a PriorityClass with preemption."""
    text = json.dumps(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "important"},
            "value": 1000,
        }
    )
    installation.cluster.apply(text)
    yield "important"
    installation.cluster.delete(text)


def test_preemption_evicts_the_pods_of_one_card_when_a_higher_priority_needs_it(
    virtual: VirtualNodes, high_priority_class: str
) -> None:
    """By kube-scheduler's sum one victim suffices; the card needs two pods of the same card evicted."""
    virtual.node("virtual-0", 2)
    virtual.create(*(virtual.pod(f"low-{number}", 6) for number in range(4)))
    before = virtual.wait_for_placed(4)
    assert Counter(card for _, card in before.values()) == {"0": 2, "1": 2}
    virtual.create(virtual.pod("high", 14, priorityClassName=high_priority_class))
    wait_until("high has a card", lambda: "high" in virtual.placed())
    after = virtual.placed()
    _, freed = after.pop("high")
    assert after == {name: place for name, place in before.items() if place[1] != freed}


def test_preemption_chooses_other_victims_when_a_disruption_budget_protects_some(
    virtual: VirtualNodes, high_priority_class: str
) -> None:
    """Two of four pods are protected, so the other card's two are evicted."""
    virtual.node("virtual-0", 2)
    virtual.create(*(virtual.pod(f"low-{number}", 6) for number in range(4)))
    before = virtual.wait_for_placed(4)
    protected = {name for name, place in before.items() if place[1] == "0"}
    for name in protected:
        virtual.cluster.kubectl("-n", virtual.namespace, "label", "pod", name, "keep=yes")
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "keep", "namespace": virtual.namespace},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {"keep": "yes"}}},
    }
    virtual.cluster.apply(json.dumps(budget), virtual.namespace)
    virtual.create(virtual.pod("high", 14, priorityClassName=high_priority_class))
    wait_until("high has a card", lambda: "high" in virtual.placed())
    assert virtual.placed().keys() == {*protected, "high"}
    assert virtual.placed()["high"][1] == "1"


@pytest.fixture
def non_preempting_class(installation: Installation) -> Iterator[str]:
    """Provide a PriorityClass without preemption."""
    text = json.dumps(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "patient"},
            "value": 500,
            "preemptionPolicy": "Never",
        }
    )
    installation.cluster.apply(text)
    yield "patient"
    installation.cluster.delete(text)


def queue_order(virtual: VirtualNodes) -> list[str]:
    """Return the pending pods of the namespace in the order of `fenka queue`."""
    rows = json.loads(virtual.installation.fenka("queue", "--cluster", "-o", "json"))
    return [row["name"] for row in rows if row["namespace"] == virtual.namespace]


def test_small_pods_backfill_when_a_larger_one_has_a_reservation(
    virtual: VirtualNodes, non_preempting_class: str
) -> None:
    """10 of 16 units are allocated on each of two cards.

    A pod of 12 units reserves the card that is free at a known time. Small pods use the other card, or this
    one if they end earlier. A pod of higher priority is served first.
    """
    virtual.node("virtual-0", 2)
    virtual.create(virtual.pod("a", 10))
    virtual.wait_for_placed(1)
    virtual.create(virtual.pod("b", 10, activeDeadlineSeconds=600))
    assert virtual.wait_for_placed(2) == {"a": ("virtual-0", "0"), "b": ("virtual-0", "1")}
    virtual.create(virtual.pod("head", 12))
    virtual.wait_for_event("head", "0/2 GPUs fit: 2 too little memory")
    # Creation times are in whole seconds, so a pod created in the same second would not be later.
    head = next(pod for pod in virtual.pods() if pod["metadata"]["name"] == "head")
    created = datetime.fromisoformat(head["metadata"]["creationTimestamp"]).timestamp()
    wait_until("the next second", lambda: time.time() >= created + 1)
    virtual.create(virtual.pod("small", 4))
    assert virtual.wait_for_placed(3)["small"] == ("virtual-0", "0")
    # 2 units are left on card 0; the 6 units of card 1 are reserved for the head.
    virtual.create(virtual.pod("late", 4))
    virtual.wait_for_event("late", "1 reserved for requests before it", "position 2 of 2")
    virtual.create(virtual.pod("short", 4, activeDeadlineSeconds=60))
    assert virtual.wait_for_placed(4)["short"] == ("virtual-0", "1")
    virtual.create(virtual.pod("vip", 12, priorityClassName=non_preempting_class))
    virtual.wait_for_event("vip", "position 1 of 3 in the queue")
    assert queue_order(virtual) == ["vip", "head", "late"]
    virtual.cluster.kubectl("-n", virtual.namespace, "delete", "pod", "b")
    wait_until("the important one", lambda: "vip" in virtual.placed())
    assert virtual.placed()["vip"] == ("virtual-0", "1")
    assert queue_order(virtual) == ["head", "late"]
    virtual.cluster.kubectl("-n", virtual.namespace, "delete", "pod", "vip")
    wait_until("the head", lambda: "head" in virtual.placed())
    assert "late" not in virtual.placed()
    virtual.cluster.kubectl("-n", virtual.namespace, "delete", "pod", "a")
    wait_until("all", lambda: "late" in virtual.placed())


def test_pods_are_gated_and_served_in_order_when_the_queue_is_long(virtual: VirtualNodes) -> None:
    """One of 30 pods has the card that all request, and the first few pending ones are tried.

    The others have a scheduling gate that an editor of the namespace cannot remove. Each release admits the
    next pod.
    """
    cluster, namespace = virtual.cluster, virtual.namespace
    virtual.node("virtual-0", 1)
    virtual.create(*(virtual.pod(f"p{number:02}", UNITS) for number in range(30)))
    bound = list(virtual.wait_for_placed(1))

    def gated() -> list[str]:
        return [
            pod["metadata"]["name"] for pod in virtual.pods() if pod["spec"].get("schedulingGates")
        ]

    # More than four may be tried, since pods created in the same second are ordered by UID.
    wait_until("the first four to be tried", lambda: 10 <= len(gated()) <= 25)
    cluster.kubectl(
        *("-n", namespace, "create", "rolebinding", "editor", "--clusterrole=edit", "--user=eve")
    )
    take = json.dumps({"spec": {"schedulingGates": None}})
    with pytest.raises(ClusterError, match=r"fenka.io/queue.*when the pod's turn comes"):
        cluster.kubectl(
            *("--as=eve", "-n", namespace, "patch", "pod", gated()[0], "--type=merge", "-p", take)
        )
    for _ in range(3):
        following = queue_order(virtual)[0]
        cluster.kubectl("-n", namespace, "delete", "pod", bound[-1], "--grace-period=0", "--force")
        wait_until(f"{following} has the card", lambda: following in virtual.placed())  # noqa: B023
        bound.append(following)
    remaining = {pod["metadata"]["name"] for pod in virtual.pods()}
    assert len(remaining) == 27
    wait_until("the next four to be tried", lambda: not {*queue_order(virtual)[:4]} & {*gated()})


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
