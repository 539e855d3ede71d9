"""The cluster as this replica sees it: four collections that keep one world up."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from fenka.cluster.disruption import BUDGETS_PATH, PodDisruptionBudget
from fenka.cluster.objects import ConfigMap, Node, Pod
from fenka.cluster.pod_groups import POD_GROUPS_PATH, PodGroup
from fenka.cluster.state import ClusterState
from fenka.dialects.gpushare import UNHEALTHY_CONFIG_MAP
from fenka.dialects.node_inventory import parse_indexes
from fenka.kubernetes.client import Api
from fenka.kubernetes.informer import Informer
from fenka.scheduler.event_reporter import EventReporter
from fenka.scheduler.queue_controller import QueueController


class NullListener:
    """Nobody needs to hear of each change: what there is is looked up."""

    def on_replace(self, objects: Sequence[object]) -> None:
        """All there are."""

    def on_upsert(self, thing: object) -> None:
        """One is so now."""

    def on_delete(self, thing: object) -> None:
        """One is gone."""


class PodGroupIndex:
    """Listens to PodGroups, which pods name."""

    def __init__(self) -> None:
        self.by_name: dict[str, PodGroup] = {}
        """By namespace/name."""

    def on_replace(self, objects: Sequence[PodGroup]) -> None:
        """All there are."""
        self.by_name.clear()
        for it in objects:
            self.on_upsert(it)

    def on_upsert(self, thing: PodGroup) -> None:
        """One is so now."""
        self.by_name[_full_name(thing)] = thing

    def on_delete(self, thing: PodGroup) -> None:
        """One is gone; unless another has its name already."""
        known = self.by_name.get(_full_name(thing))
        if known is not None and known.metadata.uid == thing.metadata.uid:
            del self.by_name[_full_name(thing)]


def _full_name(group: PodGroup) -> str:
    return f"{group.metadata.namespace}/{group.metadata.name}"


class PodListener:
    """Listens to pods."""

    def __init__(
        self, world: ClusterState, order: QueueController, event_reporter: EventReporter
    ) -> None:
        self._world, self._order, self._teller = world, order, event_reporter

    def on_replace(self, objects: Sequence[Pod]) -> None:
        """All pods there are."""
        self._world.replace_pods(objects)
        self._order.resync(objects)
        for pod in objects:
            self._teller.pod(pod)

    def on_upsert(self, thing: Pod) -> None:
        """A pod is so now."""
        self._world.set_pod(thing)
        self._order.set_pod(thing)
        self._teller.pod(thing)

    def on_delete(self, thing: Pod) -> None:
        """A pod is gone."""
        self._world.forget_pod(thing.metadata.uid)
        self._order.forget(thing.metadata.uid)
        self._teller.forget(thing.metadata.uid)


class NodeListener:
    """Listens to nodes."""

    def __init__(self, world: ClusterState, event_reporter: EventReporter) -> None:
        self._world, self._teller = world, event_reporter

    def on_replace(self, objects: Sequence[Node]) -> None:
        """All nodes there are."""
        self._world.replace_nodes(objects)
        for node in objects:
            self._teller.node(node)

    def on_upsert(self, thing: Node) -> None:
        """A node is so now."""
        self._world.set_node(thing)
        self._teller.node(thing)

    def on_delete(self, thing: Node) -> None:
        """A node is gone; unless another has its name already."""
        known = self._world.node(thing.metadata.name)
        if known is None or known.metadata.uid == thing.metadata.uid:
            self._world.forget_node(thing.metadata.name)


class UnhealthyCards:
    """Listens to the ConfigMaps in which gpushare's health daemon names cards."""

    def __init__(self, world: ClusterState) -> None:
        self._world = world
        self._named: set[str] = set()

    def on_replace(self, objects: Sequence[ConfigMap]) -> None:
        """All ConfigMaps there are."""
        named = {_node_of(it) for it in objects}
        for node in self._named - named:
            self._world.set_unhealthy(node, frozenset())
        self._named &= named
        for it in objects:
            self.on_upsert(it)

    def on_upsert(self, thing: ConfigMap) -> None:
        """A ConfigMap is so now."""
        node = _node_of(thing)
        if node:
            self._named.add(node)
            self._world.set_unhealthy(node, parse_indexes(thing.data.get("gpus", "")))

    def on_delete(self, thing: ConfigMap) -> None:
        """A ConfigMap is gone."""
        node = _node_of(thing)
        if node:
            self._named.discard(node)
            self._world.set_unhealthy(node, frozenset())


def _node_of(config_map: ConfigMap) -> str:
    name = config_map.metadata.name
    prefix = UNHEALTHY_CONFIG_MAP
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


class ClusterInformers:
    """The watches, together."""

    def __init__(
        self, api: Api, world: ClusterState, order: QueueController, event_reporter: EventReporter
    ) -> None:
        self.nodes: Informer[Node] = Informer(
            api, "/api/v1/nodes", Node, NodeListener(world, event_reporter)
        )
        self.pods: Informer[Pod] = Informer(
            api, "/api/v1/pods", Pod, PodListener(world, order, event_reporter)
        )
        self.group_names = PodGroupIndex()
        self.groups: Informer[PodGroup] = Informer(
            api, POD_GROUPS_PATH, PodGroup, self.group_names, optional=True
        )
        self.budgets: Informer[PodDisruptionBudget] = Informer(
            api, BUDGETS_PATH, PodDisruptionBudget, NullListener(), optional=True
        )
        self.config_maps: Informer[ConfigMap] = Informer(
            api, "/api/v1/namespaces/kube-system/configmaps", ConfigMap, UnhealthyCards(world)
        )

    @property
    def watches(self) -> dict[str, Informer[Any]]:
        """By what they watch."""
        return {
            "nodes": self.nodes,
            "pods": self.pods,
            "configmaps": self.config_maps,
            "podgroups": self.groups,
            "poddisruptionbudgets": self.budgets,
        }

    @property
    def synced(self) -> bool:
        """Whether everything was read once."""
        return all(it.synced.is_set() for it in self.watches.values())

    @property
    def troubles(self) -> Iterable[str]:
        """Why collections are not kept up, in sentences."""
        return [f"{name}: {it.last_error}" for name, it in self.watches.items() if it.last_error]

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watch in self.watches.values():
                group.create_task(watch.run())

    async def relist(self) -> None:
        """Read nodes and pods anew, as of now."""
        await asyncio.gather(self.nodes.relist(), self.pods.relist())
