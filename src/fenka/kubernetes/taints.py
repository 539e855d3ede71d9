"""Adds and removes a taint of a node. Others' taints are kept, with the fields that fenka does not know."""

from typing import Any

import msgspec

from fenka.cluster.eligibility import NO_SCHEDULE
from fenka.cluster.objects import Node, Object, ObjectMeta, node_path
from fenka.kubernetes.client import Api


class _Spec(Object):
    taints: tuple[dict[str, Any], ...] = ()


class _TaintedNode(Object):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: _Spec = msgspec.field(default_factory=_Spec)


async def add_taint(api: Api, node: Node, key: str) -> None:
    """Keep pods that do not tolerate it from the node. Raises ApiError (409: try again), ApiUnreachable."""
    await _write(api, node, key, [{"key": key, "effect": NO_SCHEDULE}])


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
