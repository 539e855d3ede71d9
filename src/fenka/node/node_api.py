"""What the node sees of the cluster, and the little that it writes there: its own node, its own pods."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from fenka.cluster.objects import Node, Object, ObjectMeta, Pod
from fenka.core.inventory import Card
from fenka.dialects import base, gpushare, node_inventory
from fenka.dialects.leases import REPORT
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.events import EventRecorder
from fenka.kubernetes.eviction import evict
from fenka.kubernetes.informer import Informer
from fenka.node.lease.store import Lease

_LOG = logging.getLogger(__name__)

RESET = "fenka.io/reset"
"""Node annotation, written by people: indexes of cards that they have reset. It is taken away once read."""


class _Anything(Object):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)


class _RuntimeClass(Object):
    handler: str = ""


class _NodeInfo(Object):
    container_runtime_version: str = ""


class _InfoStatus(Object):
    node_info: _NodeInfo = msgspec.field(default_factory=_NodeInfo)


class _InfoNode(Object):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    status: _InfoStatus = msgspec.field(default_factory=_InfoStatus)


class _Nudge:
    """Tells that something has changed; what, is in the Watch."""

    def __init__(self, cluster: "NodeApi") -> None:
        self._cluster = cluster

    def on_replace(self, _: Sequence[object]) -> None:
        """As Listener."""
        self._cluster.changed()

    def on_upsert(self, _: object) -> None:
        """As Listener."""
        self._cluster.changed()

    def on_delete(self, _: object) -> None:
        """As Listener."""
        self._cluster.changed()


class NodeApi:
    """This node's objects, kept up by watches while `run` runs. changed: called after every change."""

    def __init__(self, api: Api, node: str) -> None:
        self._api, self.name = api, node
        self.changed: Callable[[], object] = lambda: None
        listener = _Nudge(self)
        self._pods = Informer(
            api, "/api/v1/pods", Pod, listener, query={"fieldSelector": f"spec.nodeName={node}"}
        )
        self._nodes = Informer(
            api, "/api/v1/nodes", Node, listener, query={"fieldSelector": f"metadata.name={node}"}
        )
        self._events = EventRecorder(api, "fenka-node", node)
        self._handlers: dict[str, str] = {}
        self._said: dict[str, str] = {}

    @property
    def _path(self) -> str:
        return f"/api/v1/nodes/{self.name}"

    @property
    def pods(self) -> Mapping[str, Pod]:
        """Of this node, by UID."""
        return self._pods.objects

    @property
    def node(self) -> Node | None:
        """This node; None before it was seen."""
        return next(iter(self._nodes.objects.values()), None)

    @property
    def synced(self) -> bool:
        """Whether both have been read once."""
        return self._pods.synced.is_set() and self.node is not None

    async def run(self) -> None:
        """Keep everything up, and write events, until cancelled."""
        await asyncio.gather(self._pods.run(), self._nodes.run(), self._events.run())

    async def first_look(self) -> tuple[str, Sequence[Card]]:
        """The container runtime as the kubelet names it, "containerd://2.1.0"; and the cards that were last
        written down for this node. Raises ApiError, ApiUnreachable."""
        found = await self._api.get(self._path, _InfoNode)
        return found.status.node_info.container_runtime_version, self._described(found.metadata)

    def _described(self, meta: ObjectMeta) -> Sequence[Card]:
        if base.CARDS not in meta.annotations:
            return ()
        annotations = {base.CARDS: meta.annotations[base.CARDS]}
        try:
            share = node_inventory.decode_node(self.name, annotations, {gpushare.MEMORY: "1"})
        except base.InvalidRecord as why:
            _LOG.warning("which cards the node had before is not known: %s", why)
            return ()
        return share.node.cards if share else ()

    async def take_reset(self) -> None:
        """Take the annotation RESET away. Raises ApiError, ApiUnreachable."""
        await self._api.patch(self._path, _Anything, {"metadata": {"annotations": {RESET: None}}})

    async def handler(self, runtime_class: str) -> str:
        """What the container runtime calls this class; empty where nobody says."""
        if runtime_class not in self._handlers:
            try:
                found = await self._api.get(
                    f"/apis/node.k8s.io/v1/runtimeclasses/{runtime_class}", _RuntimeClass
                )
            except (ApiError, ApiUnreachable):
                return ""
            self._handlers[runtime_class] = found.handler
        return self._handlers[runtime_class]

    async def describe(self, inventory: str, count: int) -> None:
        """Write the node's cards where schedulers and screens read them. Raises ApiError, ApiUnreachable."""
        node = self.node
        if node is None:
            return
        if node.metadata.annotations.get(base.CARDS) != inventory:
            body: dict[str, Any] = {"metadata": {"annotations": {base.CARDS: inventory}}}
            await self._api.patch(self._path, _Anything, body)
        shown = (
            node.status.capacity.get(gpushare.COUNT),
            node.status.allocatable.get(gpushare.COUNT),
        )
        if shown != (str(count), str(count)) and (count or any(shown)):
            counted = {gpushare.COUNT: str(count)}
            body = {"status": {"capacity": counted, "allocatable": counted}}
            await self._api.patch(f"{self._path}/status", _Anything, body)

    async def report(self, text: str) -> str:
        """Write what pods hold; the Node's version with it. Raises ApiError, ApiUnreachable."""
        body: dict[str, Any] = {"metadata": {"annotations": {REPORT: text}}}
        return (await self._api.patch(self._path, _Anything, body)).metadata.resource_version

    async def note(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """Say on the pod what has become of it, as the plugins before fenka did. Best effort."""
        with contextlib.suppress(ApiError, ApiUnreachable):
            await self.annotate(pod, annotations)

    async def annotate(self, pod: Pod, annotations: Mapping[str, str | None]) -> None:
        """Write these on a pod, and take away those that are None. Raises ApiError, ApiUnreachable."""
        meta = pod.metadata
        body = {"metadata": {"uid": meta.uid, "annotations": dict(annotations)}}
        await self._api.patch(pod.path, _Anything, body)

    async def evict(self, lease: Lease) -> None:
        """End the pod, as a drain would. Raises ApiError, ApiUnreachable."""
        await evict(self._api, lease.namespace, lease.pod, lease.uid)

    def node_event(self, reason: str, note: str) -> None:
        """A warning on the node. The same again is counted."""
        if self.node is not None:
            if self._said.get(reason) != note:
                _LOG.warning("%s", note)
            self._said[reason] = note
            self._events.on_node(self.node, reason, note)

    def pod_event(self, uid: str, reason: str, note: str) -> None:
        """A warning on a pod."""
        pod = self.pods.get(uid)
        if pod is not None:
            _LOG.warning("%s: %s", pod.full_name, note)
            self._events.on_pod(pod, reason, note)
