"""Test preemption on nodes without a kubelet (virtual_nodes.py)."""

import json
from collections import Counter
from collections.abc import Callable

import pytest

from e2e.cluster import wait_until
from e2e.machine import ClusterError
from e2e.scenarios.virtual_nodes import VirtualNodes
from fenka.cluster.objects import BACKFILL_CLASS

SERVING_CLASS = "fenka-serving"


@pytest.mark.versions
def test_preemption_evicts_the_pods_of_one_card_when_a_higher_priority_needs_it(
    virtual: VirtualNodes, create_priority_class: Callable[..., str]
) -> None:
    """By kube-scheduler's sum one victim suffices; the card needs two pods of the same card evicted."""
    important = create_priority_class("important", 1000)
    virtual.node("virtual-0", 2)
    virtual.create(*(virtual.pod(f"low-{number}", 6) for number in range(4)))
    before = virtual.wait_for_placed(4)
    assert Counter(card for _, card in before.values()) == {"0": 2, "1": 2}
    virtual.create(virtual.pod("high", 14, priorityClassName=important))
    wait_until("high has a card", lambda: "high" in virtual.placed())
    after = virtual.placed()
    _, freed = after.pop("high")
    assert after == {name: place for name, place in before.items() if place[1] != freed}


def test_preemption_chooses_other_victims_when_a_disruption_budget_protects_some(
    virtual: VirtualNodes, create_priority_class: Callable[..., str]
) -> None:
    """Two of four pods are protected, so the other card's two are evicted."""
    important = create_priority_class("important", 1000)
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
    virtual.create(virtual.pod("high", 14, priorityClassName=important))
    wait_until("high has a card", lambda: "high" in virtual.placed())
    assert virtual.placed().keys() == {*protected, "high"}
    assert virtual.placed()["high"][1] == "1"


def test_service_takes_cards_only_from_backfill_when_values_are_defaults(
    virtual: VirtualNodes,
) -> None:
    """Pods of the default priority stay. Where units are free on two cards, no victim is missed."""
    cluster, namespace = virtual.cluster, virtual.namespace
    virtual.node("virtual-0", 2)
    virtual.create(*(virtual.pod(f"ordinary-{number}", 9) for number in range(2)))
    virtual.wait_for_placed(2)

    def served(name: str, units: int) -> None:
        virtual.create(virtual.pod(name, units, priorityClassName=SERVING_CLASS))

    def rejection(name: str) -> str:
        """Return what kube-scheduler says of a pod that waits."""
        wait_until(
            f"an event of {name}", lambda: "available" in " ".join(cluster.events(name, namespace))
        )
        return " ".join(cluster.events(name, namespace))

    served("wide", 9)
    assert "at least one victim" not in rejection("wide")
    cluster.kubectl("-n", namespace, "delete", "pod", "wide")
    virtual.create(virtual.pod("backfill", 7, priorityClassName=BACKFILL_CLASS))
    wait_until("backfill has a card", lambda: "backfill" in virtual.placed())
    served("first", 7)
    wait_until("both cards are full", lambda: "first" in virtual.placed())
    served("second", 7)
    wait_until("the second has a card", lambda: "second" in virtual.placed())
    served("large", 9)
    assert "at least one victim" not in rejection("large")
    assert virtual.placed().keys() == {"ordinary-0", "ordinary-1", "first", "second"}
    assert f"for pod {namespace}/second" in " ".join(cluster.events("backfill", namespace))


def test_pod_of_the_serving_class_is_refused_when_fenka_would_not_bound_it(
    virtual: VirtualNodes,
) -> None:
    """kube-scheduler asks nobody whom a pod without cards evicts."""
    pod = virtual.pod("bare", 1, priorityClassName=SERVING_CLASS)
    pod["spec"]["containers"][0]["resources"] = {}
    with pytest.raises(ClusterError, match="must request cards"):
        virtual.create(pod)
    other = virtual.pod("other", 1, priorityClassName=SERVING_CLASS, schedulerName="other")
    with pytest.raises(ClusterError, match="asks fenka whom they evict"):
        virtual.create(other)
