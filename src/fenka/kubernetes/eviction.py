"""Ends pods: by an eviction, which respects their disruption budgets as a drain does, or by deleting them.

Adds and removes a taint of a node. Others' taints are kept, with the fields that fenka does not know.
"""

import contextlib
import time
from typing import Any

import msgspec

from fenka.cluster.autoscaling import encode_time
from fenka.cluster.node_admission import NO_SCHEDULE
from fenka.cluster.objects import Node, Object, ObjectMeta, node_path, pod_path
from fenka.kubernetes.api_client import Api, ApiError

_TRIES = 3
"""The kubelet writes the status of a pod that ends, too."""


async def evict(api: Api, namespace: str, name: str, uid: str, grace_s: int | None = None) -> None:
    """Evict the pod with this UID, and no other of its name. Raises ApiError, ApiUnreachable.

    grace_s: from SIGTERM, or its preStop hook, to SIGKILL; by default what its spec says.
    """
    body: dict[str, Any] = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": _options(uid, grace_s),
    }
    await api.create(f"{pod_path(namespace, name)}/eviction", Object, body)


async def delete_pod(
    api: Api, namespace: str, name: str, uid: str, grace_s: int, reason: str
) -> None:
    """Delete the pod with this UID whatever its budgets say. Raises ApiError, ApiUnreachable.

    An eviction tells a Job that a pod's end is a disruption and no failure. So does this.

    Args:
        grace_s: as for `evict`; 0 removes the object without waiting for the node.
        reason: why, one word in CamelCase.
    """
    path = pod_path(namespace, name)
    await _try_to_mark(api, path, uid, reason, failed=False)
    if grace_s == 0:
        # The chart's policy lets fail only what is being deleted: a stolen token ends no status beside that.
        await api.delete(path, _options(uid, 1))
        await _try_to_mark(api, path, uid, reason, failed=True)
    await api.delete(path, _options(uid, grace_s))


class _MarkedStatus(Object):
    phase: str = ""
    conditions: tuple[dict[str, Any], ...] = ()


class _MarkedPod(Object):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    status: _MarkedStatus = msgspec.field(default_factory=_MarkedStatus)


async def _try_to_mark(api: Api, path: str, uid: str, reason: str, *, failed: bool) -> None:
    """Mark the pod; a status that cannot be written keeps no pod."""
    for _ in range(_TRIES):
        with contextlib.suppress(ApiError):
            await _mark(api, path, uid, reason, failed=failed)
            break


async def _mark(api: Api, path: str, uid: str, reason: str, *, failed: bool) -> None:
    """Write the condition that Kubernetes' own controllers write before they delete a pod."""
    pod = await api.get(path, _MarkedPod)
    others = [
        condition
        for condition in pod.status.conditions
        if condition.get("type") != "DisruptionTarget"
    ]
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": "fenka ended the pod together with its node",
        "lastTransitionTime": encode_time(time.time()),
    }
    # Where no kubelet does it, a Job waits for somebody to say that the pod has ended.
    phase = {"phase": "Failed"} if failed and pod.status.phase != "Succeeded" else {}
    body = {
        "metadata": {"uid": uid, "resourceVersion": pod.metadata.resource_version},
        "status": {"conditions": [*others, condition], **phase},
    }
    await api.patch(f"{path}/status", Object, body)


def _options(uid: str, grace_s: int | None) -> dict[str, Any]:
    grace = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
    return {"preconditions": {"uid": uid}, **grace}


class _TaintedSpec(Object):
    taints: tuple[dict[str, Any], ...] = ()


class _TaintedNode(Object):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: _TaintedSpec = msgspec.field(default_factory=_TaintedSpec)


async def add_taint(api: Api, node: Node, key: str, effect: str = NO_SCHEDULE) -> None:
    """Keep pods that do not tolerate it from the node, unless a taint has this key already.

    Raises ApiError (409: try again), ApiUnreachable.
    """
    await _write(api, node, key, [{"key": key, "effect": effect}])


async def remove_taint(api: Api, node: Node, key: str) -> None:
    """Remove all taints with this key. Raises ApiError (409: try again), ApiUnreachable."""
    await _write(api, node, key, [])


async def _write(api: Api, node: Node, key: str, wanted: list[dict[str, str]]) -> None:
    path = node_path(node.metadata.name)
    current = await api.get(path, _TaintedNode)
    others = [taint for taint in current.spec.taints if taint.get("key") != key]
    if len(current.spec.taints) - len(others) == len(wanted):
        return
    # A list is replaced as a whole: the version makes sure that it is the one that was read.
    guard = {
        "uid": node.metadata.uid,
        "resourceVersion": current.metadata.resource_version,
    }
    await api.patch(path, Object, {"metadata": guard, "spec": {"taints": [*others, *wanted]}})
