"""Create nodes without a kubelet, which have only an API object with an inventory of cards.

They show decisions about hundreds of slices without starting containers.
"""

import json
import sys
from collections import Counter
from typing import Any

from e2e.cluster import Cluster, wait_until
from e2e.images import BUSYBOX
from e2e.scenarios.installation import MEMORY, Installation
from fenka.core.inventory import Card, DeviceId
from fenka.dialects import base, gpushare, nodes

Json = dict[str, Any]
UNITS = 16
GIB = 1024
VIRTUAL_LABEL = "fenka.io/test-node"
"""The label of nodes without a kubelet."""


CREATE = """
import asyncio, json, pathlib, sys
from fenka.kubernetes.api_client import Api
from fenka.cluster.objects import Node
async def main():
    async with await Api.connect(pathlib.Path(sys.argv[1])) as api:
        for node, status in json.load(sys.stdin):
            await api.create("/api/v1/nodes", Node, node)
            path = f"/api/v1/nodes/{node['metadata']['name']}/status"
            await api.patch(path, Node, status)
asyncio.run(main())
"""


def node_object(name: str, cards: int, labels: dict[str, str], *, inventory: bool = True) -> Json:
    """Return a node with cards of 16 GiB; without an inventory it looks like a node of gpushare."""
    inventory_cards = [
        Card(i, DeviceId(f"GPU-{name}-{i}"), "Tesla T4", UNITS * GIB) for i in range(cards)
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {VIRTUAL_LABEL: "yes", "kubernetes.io/hostname": name, **labels},
            "annotations": {base.CARDS: nodes.encode_inventory(inventory_cards, GIB)}
            if inventory
            else {},
        },
        # Without the taint these empty nodes would attract the extender's own pods.
        "spec": {"taints": [{"key": VIRTUAL_LABEL, "value": "yes", "effect": "NoSchedule"}]},
    }


def node_status(cards: int) -> Json:
    """Return the status that a kubelet would report."""
    resources = {"cpu": "64", "memory": "64Gi", "pods": "500"}
    resources |= {MEMORY: str(cards * UNITS), gpushare.COUNT: str(cards)}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    return {"status": {"capacity": resources, "allocatable": resources, "conditions": [ready]}}


class VirtualNodes:
    """Nodes without a kubelet, and pods on them in one namespace."""

    def __init__(self, installation: Installation, namespace: str) -> None:
        self.installation, self.cluster, self.namespace = (
            installation,
            installation.cluster,
            namespace,
        )
        self.names: list[str] = []

    def node(self, name: str, cards: int, **labels: str) -> None:
        """Add a node with these labels, and wait until the extender reports it."""
        written = {key.replace("_", "."): value for key, value in labels.items()}
        self.add(cards, node_object(name, cards, written))
        wait_until(f"the extender knows {name}", lambda: name in self.reported_units())

    def add(self, cards: int, node: Json) -> None:
        """Add a node object with this number of cards."""
        name = node["metadata"]["name"]
        self.names.append(name)
        self.cluster.apply(json.dumps(node))
        status = json.dumps(node_status(cards))
        self.cluster.kubectl(
            "patch", "node", name, "--subresource=status", "--type=merge", f"--patch={status}"
        )

    def add_all(self, cards: int, nodes: list[Json]) -> None:
        """Add many node objects at once, each with this number of cards."""
        self.names += [node["metadata"]["name"] for node in nodes]
        given = json.dumps([[node, node_status(cards)] for node in nodes])
        kubeconfig = str(self.cluster.kubeconfig)
        command = (sys.executable, "-c", CREATE, kubeconfig)
        self.cluster.run(*command, stdin=given)

    def pod(self, name: str, units: int, **rest: Any) -> Json:
        """Return the manifest of a pod for these nodes.

        Args:
            name: the pod's name.
            units: the memory that it requests.
            rest: `annotations`, and more fields of its spec.
        """
        annotations = rest.pop("annotations", {})
        container = {"name": "c", "image": BUSYBOX, "resources": {"limits": {MEMORY: units}}}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "annotations": annotations,
            },
            "spec": {
                "nodeSelector": {VIRTUAL_LABEL: "yes"},
                # No kubelet reports for these nodes, so they are tainted soon.
                "tolerations": [{"operator": "Exists"}],
                # No kubelet would confirm the end of a pod.
                "terminationGracePeriodSeconds": 0,
                "containers": [container],
                **rest,
            },
        }

    def create(self, *pods: Json) -> None:
        """Create pods in one call, as a user who may write records and set nodeName."""
        # kubectl 1.30 takes a text that begins with a brace for one JSON document.
        text = "".join(f"---\n{json.dumps(pod)}\n" for pod in pods)
        former = ("--as=former-plugin", "--as-group=system:masters")
        self.cluster.kubectl(*former, "create", "-f", "-", stdin=text)

    def pods(self) -> list[Json]:
        """Return the pods of the namespace."""
        return list(self.cluster.list("pods", self.namespace))

    def placed(self) -> dict[str, tuple[str, str]]:
        """Return node and card of each placed pod by name."""
        return {
            pod["metadata"]["name"]: (
                pod["spec"]["nodeName"],
                pod["metadata"]["annotations"][gpushare.IDX],
            )
            for pod in self.pods()
            if pod["spec"].get("nodeName") and gpushare.IDX in pod["metadata"]["annotations"]
        }

    def wait_for_placed(self, count: int, seconds: float = 60) -> dict[str, tuple[str, str]]:
        """Wait until this number of pods is placed, and return them."""
        wait_until(f"{count} pods placed", lambda: len(self.placed()) == count, seconds)
        return self.placed()

    def wait_for_event(self, pod: str, *parts: str) -> str:
        """Wait until an event of the pod contains all these parts, and return its message."""
        return self.installation.wait_for_event(pod, *parts, namespace=self.namespace)

    def units_by_annotations(self) -> dict[str, Counter[str]]:
        """Return the allocated units by node and card, according to the pods' annotations."""
        held: dict[str, Counter[str]] = {name: Counter() for name in self.names}
        for pod in self.pods():
            for cards in json.loads(pod["metadata"]["annotations"][gpushare.ALLOCATION]).values():
                held[pod["spec"]["nodeName"]].update(cards)
        return held

    def reported_units(self) -> dict[str, Counter[str]]:
        """Return the allocated units by node and card, according to the extender's report."""
        nodes = json.loads(fetch(self.cluster, "/gpushare-scheduler/inspect"))["nodes"]
        return {
            node["name"]: Counter(
                {str(card["id"]): card["usedGPU"] for card in node["devs"] if card["usedGPU"]}
            )
            for node in nodes
            if node["name"] in self.names
        }


def fetch(cluster: Cluster, path: str) -> str:
    """Return an answer of the extender's read Service, which needs no certificate."""
    named = "--field-selector=metadata.name=fenka-scheduler-read"
    where = "jsonpath={.items[0].spec.clusterIP}"
    address = cluster.kubectl("get", "services", "-A", named, "-o", where)
    return cluster.fetch(f"http://{address}:12346{path}")
