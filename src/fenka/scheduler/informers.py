"""The informers of the scheduler: they keep the cluster's state and the queue up to date."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fenka.cluster.compact import CompactNode, CompactPod
from fenka.cluster.objects import ConfigMap, Node, Pod
from fenka.cluster.pod_columns import LiveColumns
from fenka.cluster.pod_groups import POD_GROUPS_PATH, GangPods, PodGroup
from fenka.cluster.pod_preemption import BUDGETS_PATH, PodDisruptionBudget
from fenka.cluster.state import ClusterState
from fenka.dialects.gpushare import node_of_config_map
from fenka.dialects.nodes import parse_indexes
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.informer import Informer, Informers, NullListener, PodGroupIndex
from fenka.scheduler.event_reporter import EventReporter
from fenka.scheduler.queue_controller import QueueController


class PodListener:
    """Passes pods on: to the cluster's state first, which the others read.

    Attributes:
        gang_pods: the pods that name a gang, by UID and by gang.
    """

    def __init__(
        self,
        cluster: ClusterState,
        live: LiveColumns,
        queue: QueueController,
        reporter: EventReporter,
    ) -> None:
        self._cluster, self._live, self._queue, self._reporter = cluster, live, queue, reporter
        self.gang_pods = GangPods()

    def on_replace(self, objects: Sequence[Pod]) -> None:
        """Replace all pods."""
        self.gang_pods.replace(objects)
        self._cluster.replace_pods(objects)
        self._queue.replace_pods(objects)
        for pod in objects:
            self._reporter.pod(pod)

    def on_upsert(self, obj: Pod) -> None:
        """Set a pod."""
        self.gang_pods.set(obj)
        self._cluster.set_pod(obj)
        self._live.follow()
        self._queue.set_pod(obj)
        self._reporter.pod(obj)

    def on_delete(self, obj: Pod) -> None:
        """Remove a pod."""
        self.gang_pods.forget(obj.metadata.uid)
        self._cluster.forget_pod(obj.metadata.uid)
        self._live.follow()
        self._queue.forget_pod(obj.metadata.uid)
        self._reporter.forget(obj.metadata.uid)


class NodeListener:
    """Passes nodes on."""

    def __init__(self, cluster: ClusterState, reporter: EventReporter) -> None:
        self._cluster, self._reporter = cluster, reporter

    def on_replace(self, objects: Sequence[Node]) -> None:
        """Replace all nodes."""
        self._cluster.replace_nodes(objects)
        for node in objects:
            self._reporter.node(node)

    def on_upsert(self, obj: Node) -> None:
        """Set a node."""
        self._cluster.set_node(obj)
        self._reporter.node(obj)

    def on_delete(self, obj: Node) -> None:
        """Remove a node, unless another one already has its name."""
        known = self._cluster.node(obj.metadata.name)
        if known is None or known.metadata.uid == obj.metadata.uid:
            self._cluster.forget_node(obj.metadata.name)


class UnhealthyCards:
    """Reads the ConfigMaps in which gpushare's health daemon lists cards."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._nodes: set[str] = set()

    def on_replace(self, objects: Sequence[ConfigMap]) -> None:
        """Replace all ConfigMaps."""
        for name in self._nodes - {
            node_of_config_map(config_map.metadata.name) for config_map in objects
        }:
            self._set(name, frozenset())
        for config_map in objects:
            self.on_upsert(config_map)

    def on_upsert(self, obj: ConfigMap) -> None:
        """Set the unhealthy cards of a node."""
        self._set(node_of_config_map(obj.metadata.name), parse_indexes(obj.data.get("gpus", "")))

    def on_delete(self, obj: ConfigMap) -> None:
        """Take all cards of a node for healthy."""
        self._set(node_of_config_map(obj.metadata.name), frozenset())

    def _set(self, node: str, unhealthy: frozenset[int]) -> None:
        if node:
            self._nodes = self._nodes | {node} if unhealthy else self._nodes - {node}
            self._cluster.set_unhealthy(node, unhealthy)


class ClusterInformers(Informers):
    """All informers of one replica. `run` is their task."""

    def __init__(
        self,
        api: Api,
        cluster: ClusterState,
        live: LiveColumns,
        queue: QueueController,
        reporter: EventReporter,
        *,
        unhealthy_maps: bool = False,
    ) -> None:
        """Args: unhealthy_maps: read gpushare's ConfigMaps, which needs a right in kube-system."""
        self.nodes = Informer(api, "/api/v1/nodes", CompactNode, NodeListener(cluster, reporter))
        self.pod_listener = PodListener(cluster, live, queue, reporter)
        self.pods = Informer(api, "/api/v1/pods", CompactPod, self.pod_listener)
        self.pod_groups = PodGroupIndex()
        self.budgets: Informer[PodDisruptionBudget] = Informer(
            api, BUDGETS_PATH, PodDisruptionBudget, NullListener(), optional=True
        )
        self.by_collection: dict[str, Informer[Any]] = {
            "nodes": self.nodes,
            "pods": self.pods,
            "podgroups": Informer(api, POD_GROUPS_PATH, PodGroup, self.pod_groups, optional=True),
            "poddisruptionbudgets": self.budgets,
        }
        if unhealthy_maps:
            self.by_collection["configmaps"] = Informer(
                api,
                "/api/v1/namespaces/kube-system/configmaps",
                ConfigMap,
                UnhealthyCards(cluster),
            )

    async def relist(self) -> None:
        """Read nodes and pods again, as of now."""
        await asyncio.gather(self.nodes.relist(), self.pods.relist())
