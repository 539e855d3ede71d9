"""Requests that fill a cluster: nodes as fenka's node program publishes them, pods of random sizes."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fenka.cluster.objects import Pod
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Placement, Slice
from fenka.dialects import base, gpushare, nodes
from fenka.dialects.base import ContainerUnits, SharedNode
from fenka.scheduler.server import PREFIX

CARDS, CARD_MIB, MODEL = 8, 15079, "Tesla T4"
NAMESPACE = "default"
Request = dict[str, Any]
"""The method, path and body of an HTTP request."""

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


def node_name(number: int) -> str:
    """Return the name of a node."""
    return f"node-{number:05}"


def cards(node: int) -> tuple[Card, ...]:
    """Return the cards of a node."""
    uuids = (f"GPU-{node:08x}-0000-4000-8000-{index:012x}" for index in range(CARDS))
    return tuple(Card(i, DeviceId(uuid), MODEL, CARD_MIB) for i, uuid in enumerate(uuids))


def node(number: int) -> Request:
    """Return the request that creates a node of eight cards, which counts memory in MiB.

    So nearly every pod has a size of its own.
    """
    resources = {gpushare.MEMORY: str(CARDS * CARD_MIB), gpushare.COUNT: str(CARDS)}
    resources |= {"cpu": "64", "memory": "256Gi", "pods": "110"}
    body = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node_name(number),
            "labels": {"gpushare": "true", "kubernetes.io/hostname": node_name(number)},
            "annotations": {base.CARDS: nodes.encode_inventory(cards(number), 1)},
        },
        "status": {"capacity": resources, "allocatable": resources},
    }
    return {"method": "POST", "path": "/api/v1/nodes", "body": body}


def sizes(count: int) -> list[int]:
    """Return the MiB that pods request: random, and the same in each round."""
    chance = random.Random(12)
    return [chance.randint(256, CARD_MIB) for _ in range(count)]


@dataclass(frozen=True)
class Pods:
    """Pods of one round. The names are its own: kwok deletes by name, and may be late."""

    series: str
    count: int

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [f"{self.series}-{number:05}" for number in range(self.count)]

    def creations(self) -> Iterator[Request]:
        """Yield the requests that create them."""
        for name, mib in zip(self.names, sizes(self.count), strict=True):
            limits = {gpushare.MEMORY: str(mib)}
            resources = {"limits": limits, "requests": {"cpu": "100m", "memory": "128Mi"} | limits}
            container = {"name": "main", "image": "none", "resources": resources}
            body = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": NAMESPACE},
                "spec": {"containers": [container]},
            }
            yield {"method": "POST", "path": PODS, "body": body}

    def deletions(self) -> Iterator[Request]:
        """Yield the requests that delete them at once."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        for name in self.names:
            yield {"method": "DELETE", "path": f"{PODS}/{name}", "body": body}


def extender_binding(pod: Pod, node: int) -> Request:
    """Return the request by which kube-scheduler has the extender bind a pod."""
    meta = pod.metadata
    body = {
        "PodName": meta.name,
        "PodNamespace": meta.namespace,
        "PodUID": meta.uid,
        "Node": node_name(node),
    }
    return {"method": "POST", "path": f"{PREFIX}/bind", "body": body}


def api_binding(pod: Pod, mib: int, node: int, card: int) -> Request:
    """Return the request to the API server that fenka's binder sends for a pod of this size."""
    chosen = cards(node)[card]
    shared = SharedNode(Node(node_name(node), cards(node), unit_mib=1))
    placement = Placement(node_name(node), (Slice(card, chosen.uuid, mib, 0),))
    units = [ContainerUnits("main", mib)]
    meta = pod.metadata
    metadata = {
        "name": meta.name,
        "namespace": meta.namespace,
        "uid": meta.uid,
        "annotations": gpushare.encode_placement(shared, placement, units, time.time_ns()),
    }
    target = {"apiVersion": "v1", "kind": "Node", "name": node_name(node)}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
    return {"method": "POST", "path": f"{PODS}/{meta.name}/binding", "body": body}
