"""The node program's access to the API server: its own Node and pods, read by watches and written."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from fenka.cluster.compact import kept_annotations, kept_labels, limit_pod, limit_status
from fenka.cluster.objects import MIRROR, Node, Object, ObjectMeta, Pod, node_path
from fenka.core.inventory import Card
from fenka.dialects import base, gpushare, nodes, resize_records
from fenka.dialects.lease_records import REPORT
from fenka.dialects.mig_records import INSTANCES
from fenka.hardware.unlimited_drivers import ALLOWED as UNLIMITED_DRIVERS
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.events import EventRecorder
from fenka.kubernetes.eviction import add_taint, evict, remove_taint
from fenka.kubernetes.informer import Informer

_LOG = logging.getLogger(__name__)

RESET = "fenka.io/reset"
"""Node annotation, written by users: indexes of cards that they have reset. It is removed once read."""
_READ_ANNOTATIONS = frozenset(
    (
        resize_records.REQUEST,
        resize_records.STATUS,
        resize_records.REFUSED,
        resize_records.FINAL,
        MIRROR,
        UNLIMITED_DRIVERS,
    )
)


class NodePod(Pod):
    """A pod as the node program keeps it."""

    def __post_init__(self) -> None:
        meta = self.metadata
        limit_pod(self)
        limit_status(self.status)
        meta.labels = kept_labels(meta.labels, for_budgets=False)
        meta.annotations = kept_annotations(meta.annotations, _READ_ANNOTATIONS)


class _Anything(Object):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)


class _RuntimeClass(Object):
    handler: str = ""


class NodeInfo(Object):
    """The programs of a node: "containerd://2.1.0", "v1.33.1"."""

    container_runtime_version: str = ""
    kubelet_version: str = ""


class _InfoStatus(Object):
    node_info: NodeInfo = msgspec.field(default_factory=NodeInfo)


class _InfoNode(Object):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    status: _InfoStatus = msgspec.field(default_factory=_InfoStatus)


class _NodeListener:
    """Reports that any object changed."""

    def __init__(self, api: "NodeApi") -> None:
        self._api = api

    def on_replace(self, _: Sequence[object]) -> None:
        """Implement Listener."""
        self._api.changed()

    def on_upsert(self, _: object) -> None:
        """Implement Listener."""
        self._api.changed()

    def on_delete(self, _: object) -> None:
        """Implement Listener."""
        self._api.changed()


class NodeApi:
    """This node's objects, kept current while `run` runs."""

    def __init__(self, api: Api, node: str) -> None:
        self._api, self.name = api, node
        self.changed: Callable[[], object] = lambda: None
        """Called after every change."""
        listener = _NodeListener(self)
        self._pods = Informer(
            api, "/api/v1/pods", NodePod, listener, query={"fieldSelector": f"spec.nodeName={node}"}
        )
        self._nodes = Informer(
            api, "/api/v1/nodes", Node, listener, query={"fieldSelector": f"metadata.name={node}"}
        )
        self._events = EventRecorder(api, "fenka-node", node)
        self._handlers: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        """The last note of each reason: a repeated one is not logged again."""

    @property
    def _path(self) -> str:
        return node_path(self.name)

    @property
    def pods(self) -> Mapping[str, Pod]:
        """Pods of this node by UID."""
        return self._pods.objects

    @property
    def node(self) -> Node | None:
        """This node; None until the watch has shown it."""
        return next(iter(self._nodes.objects.values()), None)

    @property
    def synced(self) -> bool:
        """Whether the Node and its pods have been read once."""
        return self._pods.synced.is_set() and self.node is not None

    async def run(self) -> None:
        """Watch, and write events, until cancelled."""
        await asyncio.gather(self._pods.run(), self._nodes.run(), self._events.run())

    def runs(self, uid: str) -> bool:
        """Return whether the pod exists and has not finished."""
        pod = self.pods.get(uid)
        return pod is not None and not pod.finished

    def container_names(self) -> dict[str, str]:
        """Return the containers' names by their runtime's IDs."""
        return {
            status.container_id.rpartition("/")[2]: status.name
            for pod in self.pods.values()
            for status in (*pod.status.container_statuses, *pod.status.init_container_statuses)
        }

    async def read_node(self) -> tuple[NodeInfo, Sequence[Card]]:
        """Return the node's programs and its last published cards.

        Raises ApiError, ApiUnreachable.
        """
        node = await self._api.get(self._path, _InfoNode)
        return node.status.node_info, self._published(node.metadata)

    def _published(self, meta: ObjectMeta) -> Sequence[Card]:
        if base.CARDS not in meta.annotations:
            return ()
        annotations = {base.CARDS: meta.annotations[base.CARDS]}
        try:
            share = nodes.decode_node(self.name, annotations, {gpushare.MEMORY: "1"})
        except base.InvalidRecord as error:
            _LOG.warning("which cards the node had before is not known: %s", error)
            return ()
        return share.node.cards if share else ()

    async def annotate_node(self, annotations: Mapping[str, str | None]) -> None:
        """Write annotations on the Node; None removes one. Raises ApiError, ApiUnreachable."""
        body = {"metadata": {"annotations": dict(annotations)}}
        await self._api.patch(self._path, _Anything, body)

    async def label_node(self, labels: Mapping[str, str | None]) -> None:
        """Write labels on the Node; None removes one. Raises ApiError, ApiUnreachable."""
        await self._api.patch(self._path, _Anything, {"metadata": {"labels": dict(labels)}})

    async def set_taint(self, key: str, effect: str | None) -> None:
        """Add a taint to the Node; None removes it. Raises ApiError (409: try again), ApiUnreachable."""
        node = self.node
        if node is None:
            return
        if effect is None:
            await remove_taint(self._api, node, key)
        else:
            await add_taint(self._api, node, key, effect)

    async def clear_reset(self) -> None:
        """Remove the annotation RESET. Raises ApiError, ApiUnreachable."""
        await self.annotate_node({RESET: None})

    async def runtime_handler(self, runtime_class: str) -> str:
        """Return the container runtime's name of a runtime class; empty if it cannot be read."""
        if runtime_class not in self._handlers:
            try:
                resource = await self._api.get(
                    f"/apis/node.k8s.io/v1/runtimeclasses/{runtime_class}", _RuntimeClass
                )
            except (ApiError, ApiUnreachable):
                return ""
            self._handlers[runtime_class] = resource.handler
        return self._handlers[runtime_class]

    async def publish_inventory(self, inventory: str, instances: str | None, count: int) -> None:
        """Write the node's cards for schedulers and screens. Raises ApiError, ApiUnreachable.

        instances: its divided cards. They are written with the cards, so that nobody sees one of them whole.
        """
        node = self.node
        if node is None:
            return
        records = {base.CARDS: inventory, INSTANCES: instances}
        if any(node.metadata.annotations.get(name) != text for name, text in records.items()):
            await self.annotate_node(records)
        shown = (
            node.status.capacity.get(gpushare.COUNT),
            node.status.allocatable.get(gpushare.COUNT),
        )
        if shown != (str(count), str(count)) and (count or any(shown)):
            counted = {gpushare.COUNT: str(count)}
            body: dict[str, Any] = {"status": {"capacity": counted, "allocatable": counted}}
            await self._api.patch(f"{self._path}/status", _Anything, body)

    async def write_report(self, text: str) -> str:
        """Write what pods hold, and return the Node's new version. Raises ApiError, ApiUnreachable."""
        body: dict[str, Any] = {"metadata": {"annotations": {REPORT: text}}}
        return (await self._api.patch(self._path, _Anything, body)).metadata.resource_version

    async def try_annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """Write annotations on a pod, and ignore failures."""
        with contextlib.suppress(ApiError, ApiUnreachable):
            await self.annotate(pod, annotations)

    async def annotate(self, pod: Pod, annotations: Mapping[str, str | None]) -> None:
        """Write annotations on a pod; None removes one. Raises ApiError, ApiUnreachable."""
        meta = pod.metadata
        body = {"metadata": {"uid": meta.uid, "annotations": dict(annotations)}}
        await self._api.patch(pod.path, _Anything, body)

    async def evict(self, namespace: str, name: str, uid: str) -> None:
        """Evict a pod, as a drain does. Raises ApiError, ApiUnreachable."""
        await evict(self._api, namespace, name, uid)

    def node_event(self, reason: str, note: str) -> None:
        """Write a warning event on the Node. A repeated one is counted."""
        if self.node is not None:
            if self._notes.get(reason) != note:
                _LOG.warning("%s", note)
            self._notes[reason] = note
            self._events.record_on_node(self.node, reason, note)

    def pod_event(self, uid: str, reason: str, note: str) -> None:
        """Write a warning event on a pod."""
        pod = self.pods.get(uid)
        if pod is not None:
            _LOG.warning("%s: %s", pod.full_name, note)
            self._events.record_on_pod(pod, reason, note)
