"""Test preemption on nodes without a kubelet (virtual_nodes.py)."""

import json
from collections import Counter
from collections.abc import Callable

from e2e.cluster import wait_until
from e2e.scenarios.virtual_nodes import VirtualNodes


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
