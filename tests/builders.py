"""Objects of Kubernetes as JSON, and jobs of a workstation, for tests."""

from typing import Any

import msgspec

from fenka.core.inventory import DeviceId
from fenka.core.request import Memory, Placement, Request, Slice
from fenka.workstation.job import Job
from tests.fakes.api_server import Json


def node(name: str, **given: Any) -> Json:
    """A ready node. resources: allocatable; capacity: where that differs; more by Kubernetes' names."""
    resources = {key: str(value) for key, value in given.get("resources", {}).items()}
    capacity = {key: str(value) for key, value in given.get("capacity", {}).items()}
    ready = {"type": "Ready", "status": given.get("ready", "True")}
    return {
        "metadata": {
            "name": name,
            "labels": given.get("labels", {}),
            "annotations": given.get("annotations", {}),
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


def pod(name: str, limits: Json | None = None, **given: Any) -> Json:
    """A pod of one container; on a `node` it runs."""
    namespace = given.get("namespace", "default")
    where = given.get("node", "")
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": given.get("uid", f"u-{namespace}-{name}"),
            "annotations": given.get("annotations", {}),
            "labels": given.get("labels", {}),
        },
        "spec": {
            "nodeName": where,
            "schedulerName": given.get("scheduler", "default-scheduler"),
            "containers": [
                {
                    "name": "main",
                    "resources": {
                        "limits": {key: str(value) for key, value in (limits or {}).items()}
                    },
                }
            ],
            **given.get("spec", {}),
        },
        "status": {
            "phase": given.get("phase", "Running" if where else "Pending"),
            **given.get("status", {}),
        },
    }


def units(count: int) -> Json:
    """Limits: units of GPU memory."""
    return {"aliyun.com/gpu-mem": count}


def on_card(index: int, count: int, total: int = 14) -> Json:
    """gpushare's first generation of annotations."""
    return {
        "ALIYUN_COM_GPU_MEM_IDX": str(index),
        "ALIYUN_COM_GPU_MEM_POD": str(count),
        "ALIYUN_COM_GPU_MEM_DEV": str(total),
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000000000000",
    }


def sharing(name: str, card_units: int = 14, cards: int = 1, **given: Any) -> Json:
    """A node on which gpushare's own plugin runs."""
    resources = {"aliyun.com/gpu-mem": card_units * cards, "aliyun.com/gpu-count": cards}
    labels = {"gpushare": "true", **given.pop("labels", {})}
    return node(name, resources={**resources, **given.pop("resources", {})}, labels=labels, **given)


# --- a workstation --------------------------------------------------------------------------------


def job(name: str = "a", **fields: Any) -> Job:
    """A pending job of user 1000 that requests 1 GiB of a card. fields: what differs."""
    made = Job(
        id=name,
        name=name,
        uid=1000,
        pid=1,
        start_ticks=1,
        request=Request(memory=Memory(1, 1024)),
        summary="1",
        command=["true"],
        directory="/",
        kind="run",
        isolation="namespace",
        requested_at=0.0,
    )
    return msgspec.structs.replace(made, **fields)


def placement(uuid: str, mib: int = 1024) -> Placement:
    """A slice of card 0 with this UUID."""
    return Placement("here", (Slice(0, DeviceId(uuid), mib, 100),))
