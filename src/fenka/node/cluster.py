"""What the node sees of the cluster, and the little that it writes there: its own node, its own pods."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from fenka.dialects import gpushare
from fenka.kubernetes.client import Api, NoCluster, Refused
from fenka.kubernetes.objects import Meta, Node, Object, Pod
from fenka.node.store import Lease

_LOG = logging.getLogger(__name__)

RETRY_S = 1.0
REPEAT_S = 600.0
"""The same event is not posted again within this time."""

_Thing = TypeVar("_Thing", Pod, Node)


class _Anything(Object):
    metadata: Meta = msgspec.field(default_factory=Meta)


class _RuntimeClass(Object):
    handler: str = ""


class _NodeInfo(Object):
    container_runtime_version: str = ""


class _InfoStatus(Object):
    node_info: _NodeInfo = msgspec.field(default_factory=_NodeInfo)


class _InfoNode(Object):
    status: _InfoStatus = msgspec.field(default_factory=_InfoStatus)


class Cluster:
    """This node's objects, kept up by watches while `run` runs. changed: called after every change."""

    def __init__(self, api: Api, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self.name, self._clock = api, node, clock
        self.pods: dict[str, Pod] = {}
        """Of this node, by UID."""
        self.node: Node | None = None
        self.synced = asyncio.Event()
        """Set once both are known."""
        self.changed: Callable[[], object] = lambda: None
        self._handlers: dict[str, str] = {}
        self._posted: dict[tuple[str, str, str], float] = {}

    @property
    def _path(self) -> str:
        return f"/api/v1/nodes/{self.name}"

    async def run(self) -> None:
        """Keep `pods` and `node` up until cancelled."""
        await asyncio.gather(
            self._follow("/api/v1/pods", Pod, f"spec.nodeName={self.name}", self._set_pods),
            self._follow("/api/v1/nodes", Node, f"metadata.name={self.name}", self._set_nodes),
        )

    async def _follow(
        self,
        path: str,
        kind: type[_Thing],
        selector: str,
        take: Callable[[dict[str, _Thing]], None],
    ) -> None:
        while True:
            try:
                listed, version = await self._api.list(path, kind, fieldSelector=selector)
                things = {it.metadata.uid: it for it in listed}
                take(things)
                async for change in self._api.watch(path, kind, version, fieldSelector=selector):
                    if change.object is None:
                        continue
                    if change.type == "DELETED":
                        things.pop(change.object.metadata.uid, None)
                    else:
                        things[change.object.metadata.uid] = change.object
                    take(things)
            except (Refused, NoCluster) as why:
                _LOG.info("%s is read again: %s", path, why)
            await asyncio.sleep(RETRY_S)

    def _set_pods(self, pods: dict[str, Pod]) -> None:
        self.pods = dict(pods)
        self._tell()

    def _set_nodes(self, nodes: dict[str, Node]) -> None:
        self.node = next(iter(nodes.values()), None)
        self._tell()

    def _tell(self) -> None:
        if self.node is not None:
            self.synced.set()
        self.changed()

    async def runtime(self) -> str:
        """The container runtime as the kubelet names it: "containerd://2.1.0". Raises Refused, NoCluster."""
        found = await self._api.get(self._path, _InfoNode)
        return found.status.node_info.container_runtime_version

    async def handler(self, runtime_class: str) -> str:
        """What the container runtime calls this class; empty where nobody says."""
        if runtime_class not in self._handlers:
            try:
                found = await self._api.get(
                    f"/apis/node.k8s.io/v1/runtimeclasses/{runtime_class}", _RuntimeClass
                )
            except (Refused, NoCluster):
                return ""
            self._handlers[runtime_class] = found.handler
        return self._handlers[runtime_class]

    async def describe(self, inventory: str, count: int) -> None:
        """Write the node's cards where schedulers and screens read them. Raises Refused, NoCluster."""
        node = self.node
        if node is None:
            return
        if node.metadata.annotations.get(gpushare.CARDS) != inventory:
            body: dict[str, Any] = {"metadata": {"annotations": {gpushare.CARDS: inventory}}}
            await self._api.patch(self._path, _Anything, body)
        shown = (
            node.status.capacity.get(gpushare.COUNT),
            node.status.allocatable.get(gpushare.COUNT),
        )
        if shown != (str(count), str(count)) and (count or any(shown)):
            counted = {gpushare.COUNT: str(count)}
            body = {"status": {"capacity": counted, "allocatable": counted}}
            await self._api.patch(f"{self._path}/status", _Anything, body)

    async def assigned(self, lease: Lease) -> None:
        """Say on the pod that it has what it was promised, as gpushare's plugin did. Best effort."""
        body = {
            "metadata": {"uid": lease.uid, "annotations": {gpushare.ASSIGNED: "true"}},
        }
        with contextlib.suppress(Refused, NoCluster):
            path = f"/api/v1/namespaces/{lease.namespace}/pods/{lease.pod}"
            await self._api.patch(path, _Anything, body)

    async def evict(self, lease: Lease) -> None:
        """End the pod, as a drain would. Raises Refused, NoCluster."""
        path = f"/api/v1/namespaces/{lease.namespace}/pods/{lease.pod}/eviction"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": lease.pod, "namespace": lease.namespace},
            "deleteOptions": {"preconditions": {"uid": lease.uid}},
        }
        await self._api.create(path, _Anything, body)

    async def node_event(self, reason: str, message: str) -> None:
        """A warning on the node."""
        # The kubelet's own events about a node have its name for a UID; `kubectl describe` looks for that.
        about = {"kind": "Node", "apiVersion": "v1", "name": self.name, "uid": self.name}
        await self._event("default", about, reason, message)

    async def pod_event(self, lease: Lease, reason: str, message: str) -> None:
        """A warning on a pod."""
        about = {
            "kind": "Pod",
            "apiVersion": "v1",
            "name": lease.pod,
            "namespace": lease.namespace,
            "uid": lease.uid,
        }
        await self._event(lease.namespace, about, reason, message)

    async def _event(
        self, namespace: str, about: Mapping[str, str], reason: str, message: str
    ) -> None:
        key, now = (about["uid"], reason, message), self._clock()
        if now - self._posted.get(key, -REPEAT_S) < REPEAT_S:
            return
        self._posted = {k: at for k, at in self._posted.items() if now - at < REPEAT_S}
        self._posted[key] = now
        _LOG.warning("%s %s: %s", about["kind"], about["name"], message)
        moment = datetime.now(UTC)
        stamp = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{about['name']}.{moment.timestamp():.6f}".replace(".", "-"),
                "namespace": namespace,
            },
            "involvedObject": dict(about),
            "type": "Warning",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": "fenka-node", "host": self.name},
            "reportingComponent": "fenka-node",
            "reportingInstance": self.name,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        with contextlib.suppress(Refused, NoCluster):
            await self._api.create(f"/api/v1/namespaces/{namespace}/events", _Anything, body)
