"""Objects for tests: nodes and pods as JSON or as fenka reads them, and jobs of a workstation."""

import uuid
from typing import Any

import msgspec

from fenka.cluster.objects import Node, Pod
from fenka.cluster.pod_groups import MINIMUM_LABEL, NAME_LABELS
from fenka.core.inventory import Card, DeviceId
from fenka.core.request import Memory, Placement, Request, Slice
from fenka.dialects import base, gpushare, nodes
from fenka.jobs.job_spec import GpuResources, JobSpec
from fenka.workstation.job import Job
from tests.fakes.api_server import Json as Json  # noqa: PLC0414

T4_MIB = 15079
GIB = 1024


def node(name: str, **given: Any) -> Json:
    """A ready node. resources: allocatable; capacity: where that differs; more by Kubernetes' names."""
    resources = {key: str(value) for key, value in given.get("resources", {}).items()}
    capacity = {key: str(value) for key, value in given.get("capacity", {}).items()}
    ready = {"type": "Ready", "status": given.get("ready", "True")}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": f"node-{name}",
            "labels": given.get("labels") or {},
            "annotations": given.get("annotations") or {},
        },
        "spec": {
            "unschedulable": given.get("unschedulable", False),
            "taints": given.get("taints", []),
        },
        "status": {
            "allocatable": resources,
            "capacity": {**resources, **capacity},
            "addresses": [{"type": "InternalIP", "address": given.get("address", "10.0.0.1")}],
            "conditions": [ready],
        },
    }


def sharing(name: str, card_units: int = 14, cards: int = 1, **given: Any) -> Json:
    """A node on which gpushare's own plugin runs."""
    resources = {gpushare.MEMORY: card_units * cards, gpushare.COUNT: cards}
    labels = {"gpushare": "true", **given.pop("labels", {})}
    return node(name, resources={**resources, **given.pop("resources", {})}, labels=labels, **given)


def node_json(
    name: str, *sizes: int, unit_mib: int = GIB, inventory: bool = True, **given: Any
) -> Json:
    """A node with cards of these MiB and fenka's inventory; without it, one of gpushare's plugin."""
    cards = [Card(i, DeviceId(f"GPU-{name}-{i}"), "Tesla T4", mib) for i, mib in enumerate(sizes)]
    resources = {
        gpushare.MEMORY: sum(mib // unit_mib for mib in sizes),
        gpushare.COUNT: len(sizes),
        **{"cpu": 8, "memory": "32Gi", "pods": 110},
    }
    written = {base.CARDS: nodes.encode_inventory(cards, unit_mib)} if inventory else {}
    annotations = {**written, **(given.pop("annotations", None) or {})}
    return node(name, resources=resources, annotations=annotations, **given)


def pod(name: str, limits: Json | None = None, **given: Any) -> Json:
    """A pod of one container with these limits; on a `node` it runs."""
    namespace, on = given.get("namespace", "default"), given.get("node", "")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": given.get("uid", f"u-{namespace}-{name}"),
            "annotations": given.get("annotations") or {},
            "labels": given.get("labels") or {},
        },
        "spec": {
            **({"nodeName": on} if on else {}),
            "schedulerName": given.get("scheduler", "default-scheduler"),
            "containers": [_container("main", limits or {})],
            **given.get("spec", {}),
        },
        "status": {
            "phase": given.get("phase", "Running" if on else "Pending"),
            **given.get("status", {}),
        },
    }


def pod_json(
    name: str,
    *amounts: int | str,
    priority: int | None = None,
    init: tuple[int, ...] = (),
    **given: Any,
) -> Json:
    """A pod with a UID of its own and one container for each number of units."""
    spec: Json = {
        "containers": [_container(f"c{i}", units(it)) for i, it in enumerate(amounts)],
        "initContainers": [_container(f"i{i}", units(it)) for i, it in enumerate(init)],
    }
    if priority is not None:
        spec["priority"] = priority
    unique = given.pop("uid", "") or str(uuid.uuid4())
    return pod(name, uid=unique, spec=spec, phase=given.pop("phase", "Pending"), **given)


def _container(name: str, limits: Json) -> Json:
    texts = {key: str(value) for key, value in limits.items()}
    return {"name": name, "image": "busybox", "resources": {"limits": texts, "requests": texts}}


def units(count: int | str) -> Json:
    """Limits: units of GPU memory."""
    return {gpushare.MEMORY: count}


def gang_labels(name: str, size: int) -> dict[str, str]:
    """Return the labels of co-scheduling for a gang of this size."""
    return {NAME_LABELS[0]: name, MINIMUM_LABEL: str(size)}


def on_card(index: int, count: int | str, total: int = 14) -> dict[str, str]:
    """gpushare's first generation of annotations."""
    return {
        gpushare.IDX: str(index),
        gpushare.POD: str(count),
        gpushare.DEV: str(total),
        gpushare.ASSIGNED: "true",
        gpushare.ASSUME_TIME: "1700000000000000000",
    }


def a_node(name: str, *sizes: int, **given: Any) -> Node:
    """As fenka reads it."""
    return msgspec.convert(node_json(name, *sizes, **given), Node)


def a_pod(name: str, *amounts: int | str, **given: Any) -> Pod:
    """As fenka reads it."""
    return msgspec.convert(pod_json(name, *amounts, **given), Pod)


# --- a workstation --------------------------------------------------------------------------------


def job(name: str = "a", **fields: Any) -> Job:
    """A pending job of user 1000 that requests 1 GiB of a card.

    fields: what differs, of the job or else of its specification.
    """
    spec = {key: fields.pop(key) for key in {*fields} - {*Job.__struct_fields__}}
    made = Job(
        id=name,
        name=name,
        uid=1000,
        pid=1,
        start_ticks=1,
        spec=msgspec.structs.replace(JobSpec(["true"], GpuResources("1")), **spec),
        request=Request(memory=Memory(1, 1024)),
        requested_at=0.0,
    )
    return msgspec.structs.replace(made, **fields)


def placement(uuid: str, mib: int = 1024) -> Placement:
    """A slice of card 0 with this UUID."""
    return Placement("here", (Slice(0, DeviceId(uuid), mib, 100),))


def unschedulable(message: str) -> Json:
    """Return the status in which kube-scheduler says why a pod is pending."""
    return {
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
            }
        ]
    }


def notebooks(on: str) -> list[Json]:
    """Return three pods of 4 units on a card of 14."""
    return [
        pod(f"notebook-{number}", units(4), node=on, annotations=on_card(0, 4))
        for number in (1, 2, 3)
    ]
