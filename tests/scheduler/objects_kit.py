"""Nodes and pods as the API server would send them."""

import uuid
from typing import Any

import msgspec

from fenka.cluster.objects import Node, Pod
from fenka.core.inventory import Card, DeviceId
from fenka.dialects import base, gpushare, node_inventory

Json = dict[str, Any]
T4_MIB = 15079
GIB = 1024


def node_json(
    name: str,
    *sizes: int,
    unit_mib: int = GIB,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    inventory: bool = True,
) -> Json:
    """A sharing node with cards of these MiB; without inventory it is one of gpushare's plugin."""
    cards = [Card(i, DeviceId(f"GPU-{name}-{i}"), "Tesla T4", mib) for i, mib in enumerate(sizes)]
    units = sum(mib // unit_mib for mib in sizes)
    resources = {
        gpushare.MEMORY: str(units),
        gpushare.COUNT: str(len(sizes)),
        "cpu": "8",
        "memory": "32Gi",
        "pods": "110",
    }
    written = {base.CARDS: node_inventory.encode_inventory(cards, unit_mib)} if inventory else {}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": f"node-{name}",
            "labels": labels or {},
            "annotations": {**written, **(annotations or {})},
        },
        "spec": {},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def pod_json(
    name: str,
    *units: int | str,
    node: str = "",
    uid: str = "",
    priority: int | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    phase: str = "Pending",
    init: tuple[int, ...] = (),
) -> Json:
    """A pod with one container for each number of units."""

    def container(title: str, amount: int | str) -> Json:
        limits = {gpushare.MEMORY: str(amount)}
        resources = {"limits": limits, "requests": limits}
        return {"name": title, "image": "busybox", "resources": resources}

    spec: Json = {
        "containers": [container(f"c{i}", amount) for i, amount in enumerate(units)],
        "initContainers": [container(f"i{i}", amount) for i, amount in enumerate(init)],
    }
    if node:
        spec["nodeName"] = node
    if priority is not None:
        spec["priority"] = priority
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or str(uuid.uuid4()),
            "labels": labels or {},
            "annotations": annotations or {},
        },
        "spec": spec,
        "status": {"phase": phase},
    }


def a_node(name: str, *sizes: int, **rest: Any) -> Node:
    """As it is read."""
    return msgspec.convert(node_json(name, *sizes, **rest), Node)


def a_pod(name: str, *units: int | str, **rest: Any) -> Pod:
    """As it is read."""
    return msgspec.convert(pod_json(name, *units, **rest), Pod)


def on_card(index: int, units: int) -> dict[str, str]:
    """gpushare's first generation of annotations."""
    return {gpushare.IDX: str(index), gpushare.POD: str(units), gpushare.ASSIGNED: "true"}
