"""Test the order of pending pods on nodes without a kubelet (virtual_nodes.py)."""

import json
import time
from collections.abc import Callable
from datetime import datetime

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.virtual_nodes import UNITS, VirtualNodes


def queue_order(virtual: VirtualNodes) -> list[str]:
    """Return the pending pods of the namespace in the order of `fenka queue`."""
    rows = json.loads(virtual.installation.fenka("queue", "--cluster", "-o", "json"))
    return [row["name"] for row in rows if row["namespace"] == virtual.namespace]


@pytest.mark.versions
def test_small_pods_backfill_when_a_larger_one_has_a_reservation(
    virtual: VirtualNodes, create_priority_class: Callable[..., str]
) -> None:
    """10 of 16 units are allocated on each of two cards.

    A pod of 12 units reserves the card that is free at a known time. Small pods use the other card, or this
    one if they end earlier. A pod of higher priority is served first.
    """
    patient = create_priority_class("patient", 500, preemptionPolicy="Never")
    virtual.node("virtual-0", 2)
    virtual.create(virtual.pod("a", 10))
    virtual.wait_for_placed(1)
    virtual.create(virtual.pod("b", 10, activeDeadlineSeconds=600))
    assert virtual.wait_for_placed(2) == {"a": ("virtual-0", "0"), "b": ("virtual-0", "1")}
    virtual.create(virtual.pod("head", 12))
    virtual.wait_for_event("head", "no GPU fits: 2 of 2 have too little memory")
    # Creation times are in whole seconds, so a pod created in the same second would not be later.
    head = next(pod for pod in virtual.pods() if pod["metadata"]["name"] == "head")
    created = datetime.fromisoformat(head["metadata"]["creationTimestamp"]).timestamp()
    wait_until("the next second", lambda: time.time() >= created + 1)
    virtual.create(virtual.pod("small", 4))
    assert virtual.wait_for_placed(3)["small"] == ("virtual-0", "0")
    # 2 units are left on card 0; the 6 units of card 1 are reserved for the head.
    virtual.create(virtual.pod("late", 4))
    virtual.wait_for_event("late", "reserved for requests before it", "position 2 of 2")
    virtual.create(virtual.pod("short", 4, activeDeadlineSeconds=60))
    assert virtual.wait_for_placed(4)["short"] == ("virtual-0", "1")
    virtual.create(virtual.pod("vip", 12, priorityClassName=patient))
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


@pytest.mark.versions
@pytest.mark.since("1.36", "no MutatingAdmissionPolicy, so no pod of a long queue is gated")
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
