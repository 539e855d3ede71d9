"""The cluster as the autoscaler follows it: informers, and indexes over their objects."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fenka.autoscaler.snapshot import DAEMON_SETS_PATH, DaemonSet, ElasticPod
from fenka.cluster.autoscaling import PROTECTED_UNTIL, RECLAIM_AT, SPOT_ADMIT
from fenka.cluster.objects import Node
from fenka.cluster.pod_groups import POD_GROUPS_PATH, PodGroup, group_name
from fenka.cluster.pod_preemption import BUDGETS_PATH, PodDisruptionBudget
from fenka.cluster.state import ClusterState
from fenka.dialects.base import CARDS, Dialect
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.informer import Informer, Informers, NullListener, PodGroupIndex


class PodIndex:
    """Pods by node. Wakes the loop when one comes or goes that may need a new node."""

    def __init__(self, state: ClusterState, wake: asyncio.Event) -> None:
        self._state, self._wake = state, wake
        self.by_uid: dict[str, ElasticPod] = {}
        self.by_node: dict[str, list[ElasticPod]] = {}

    def on_replace(self, objects: Sequence[ElasticPod]) -> None:
        """Replace all pods."""
        self._state.replace_pods(objects)
        self.by_uid, self.by_node = {}, {}
        for pod in objects:
            self._add(pod)
        self._wake.set()

    def on_upsert(self, obj: ElasticPod) -> None:
        """Set a pod."""
        self._state.set_pod(obj)
        known = self._remove(obj.metadata.uid)
        self._add(obj)
        if known is None or _is_waiting(known) or _is_waiting(obj):
            self._wake_for(obj)

    def on_delete(self, obj: ElasticPod) -> None:
        """Remove a pod."""
        self._state.forget_pod(obj.metadata.uid)
        self._remove(obj.metadata.uid)
        self._wake_for(obj)

    def _wake_for(self, pod: ElasticPod) -> None:
        if group_name(pod) is not None or pod.demand(self._state.dialects).requests_gpu:
            self._wake.set()

    def _add(self, pod: ElasticPod) -> None:
        self.by_uid[pod.metadata.uid] = pod
        if pod.spec.node_name and not pod.finished:
            self.by_node.setdefault(pod.spec.node_name, []).append(pod)

    def _remove(self, uid: str) -> ElasticPod | None:
        pod = self.by_uid.pop(uid, None)
        if pod is not None and pod.spec.node_name and not pod.finished:
            others = [each for each in self.by_node[pod.spec.node_name] if each is not pod]
            self.by_node[pod.spec.node_name] = others
            if not others:
                del self.by_node[pod.spec.node_name]
        return pod


def _is_waiting(pod: ElasticPod) -> bool:
    return not pod.spec.node_name and not pod.finished


class NodeIndex:
    """Nodes by name. Wakes the loop for changes by which anything is decided."""

    def __init__(self, state: ClusterState, wake: asyncio.Event) -> None:
        self._state, self._wake = state, wake
        self.by_name: dict[str, Node] = {}

    def on_replace(self, objects: Sequence[Node]) -> None:
        """Replace all nodes."""
        self._state.replace_nodes(objects)
        self.by_name = {node.metadata.name: node for node in objects}
        self._wake.set()

    def on_upsert(self, obj: Node) -> None:
        """Set a node."""
        known = self.by_name.get(obj.metadata.name)
        self._state.set_node(obj)
        self.by_name[obj.metadata.name] = obj
        if known is None or _facts(known) != _facts(obj):
            self._wake.set()

    def on_delete(self, obj: Node) -> None:
        """Remove a node, unless another one already has its name."""
        known = self.by_name.get(obj.metadata.name)
        if known is None or known.metadata.uid == obj.metadata.uid:
            self._state.forget_node(obj.metadata.name)
            self.by_name.pop(obj.metadata.name, None)
            self._wake.set()


def _facts(node: Node) -> object:
    """Return what is decided by; kubelets report other things all the time."""
    annotations = node.metadata.annotations
    return (
        node.metadata.uid,
        node.metadata.labels,
        annotations.get(CARDS),
        annotations.get(RECLAIM_AT),
        annotations.get(SPOT_ADMIT),
        annotations.get(PROTECTED_UNTIL),
        node.spec,
        node.ready,
        node.status.allocatable,
    )


class ElasticCluster(Informers):
    """All informers of the autoscaler. `run` is their task.

    Attributes:
        changed: set when something has changed by which anything is decided.
    """

    def __init__(self, api: Api, dialects: tuple[Dialect, ...]) -> None:
        self.changed = asyncio.Event()
        self.state = ClusterState(dialects=dialects)
        self.pods = PodIndex(self.state, self.changed)
        self.nodes = NodeIndex(self.state, self.changed)
        self._groups = PodGroupIndex()
        self._pod_informer = Informer(api, "/api/v1/pods", ElasticPod, self.pods)
        self._node_informer = Informer(api, "/api/v1/nodes", Node, self.nodes)
        self._budgets: Informer[PodDisruptionBudget] = Informer(
            api, BUDGETS_PATH, PodDisruptionBudget, NullListener(), optional=True
        )
        self._daemons: Informer[DaemonSet] = Informer(
            api, DAEMON_SETS_PATH, DaemonSet, NullListener()
        )
        self.by_collection: dict[str, Informer[Any]] = {
            "nodes": self._node_informer,
            "pods": self._pod_informer,
            "daemonsets": self._daemons,
            "podgroups": Informer(api, POD_GROUPS_PATH, PodGroup, self._groups, optional=True),
            "poddisruptionbudgets": self._budgets,
        }

    @property
    def groups(self) -> Mapping[str, PodGroup]:
        """Return the PodGroups by namespace/name."""
        return self._groups.by_name

    @property
    def budgets(self) -> Sequence[PodDisruptionBudget]:
        """Return all PodDisruptionBudgets."""
        return tuple(self._budgets.objects.values())

    @property
    def daemons(self) -> Sequence[DaemonSet]:
        """Return all DaemonSets."""
        return tuple(self._daemons.objects.values())

    async def read(self) -> None:
        """Read what plans need once, without following it. Raises ApiError, ApiUnreachable."""
        needed = (each for each in self.by_collection.values() if each is not self._budgets)
        await asyncio.gather(*(informer.read() for informer in needed))

    async def relist(self) -> None:
        """Read nodes and pods again, as of now."""
        await asyncio.gather(self._node_informer.relist(), self._pod_informer.relist())
