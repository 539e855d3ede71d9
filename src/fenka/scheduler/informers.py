"""The cluster as this replica sees it: four collections that keep one world up."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from fenka.dialects.gpushare import UNHEALTHY_CONFIG_MAP, read_indexes
from fenka.kubernetes.budgets import BUDGETS, PodDisruptionBudget
from fenka.kubernetes.client import Api
from fenka.kubernetes.gangs import POD_GROUPS, PodGroup
from fenka.kubernetes.objects import ConfigMap, Node, Pod
from fenka.kubernetes.watch import Watch
from fenka.kubernetes.world import World
from fenka.scheduler.event_reporter import EventReporter
from fenka.scheduler.queue_controller import QueueController


class NullListener:
    """Nobody needs to hear of each change: what there is is looked up."""

    def on_resync(self, objects: Sequence[object]) -> None:
        """All there are."""

    def on_set(self, thing: object) -> None:
        """One is so now."""

    def on_forget(self, thing: object) -> None:
        """One is gone."""


class PodGroupIndex:
    """Listens to PodGroups, which pods name."""

    def __init__(self) -> None:
        self.by_name: dict[str, PodGroup] = {}
        """By namespace/name."""

    def on_resync(self, objects: Sequence[PodGroup]) -> None:
        """All there are."""
        self.by_name.clear()
        for it in objects:
            self.on_set(it)

    def on_set(self, thing: PodGroup) -> None:
        """One is so now."""
        self.by_name[_full_name(thing)] = thing

    def on_forget(self, thing: PodGroup) -> None:
        """One is gone; unless another has its name already."""
        known = self.by_name.get(_full_name(thing))
        if known is not None and known.metadata.uid == thing.metadata.uid:
            del self.by_name[_full_name(thing)]


def _full_name(group: PodGroup) -> str:
    return f"{group.metadata.namespace}/{group.metadata.name}"


class PodListener:
    """Listens to pods."""

    def __init__(self, world: World, order: QueueController, event_reporter: EventReporter) -> None:
        self._world, self._order, self._teller = world, order, event_reporter

    def on_resync(self, objects: Sequence[Pod]) -> None:
        """All pods there are."""
        self._world.resync_pods(objects)
        self._order.resync(objects)
        for pod in objects:
            self._teller.pod(pod)

    def on_set(self, thing: Pod) -> None:
        """A pod is so now."""
        self._world.set_pod(thing)
        self._order.set_pod(thing)
        self._teller.pod(thing)

    def on_forget(self, thing: Pod) -> None:
        """A pod is gone."""
        self._world.forget_pod(thing.metadata.uid)
        self._order.forget(thing.metadata.uid)
        self._teller.forget(thing.metadata.uid)


class NodeListener:
    """Listens to nodes."""

    def __init__(self, world: World, event_reporter: EventReporter) -> None:
        self._world, self._teller = world, event_reporter

    def on_resync(self, objects: Sequence[Node]) -> None:
        """All nodes there are."""
        self._world.resync_nodes(objects)
        for node in objects:
            self._teller.node(node)

    def on_set(self, thing: Node) -> None:
        """A node is so now."""
        self._world.set_node(thing)
        self._teller.node(thing)

    def on_forget(self, thing: Node) -> None:
        """A node is gone; unless another has its name already."""
        known = self._world.node(thing.metadata.name)
        if known is None or known.metadata.uid == thing.metadata.uid:
            self._world.forget_node(thing.metadata.name)


class UnhealthyCards:
    """Listens to the ConfigMaps in which gpushare's health daemon names cards."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._named: set[str] = set()

    def on_resync(self, objects: Sequence[ConfigMap]) -> None:
        """All ConfigMaps there are."""
        named = {_node_of(it) for it in objects}
        for node in self._named - named:
            self._world.set_sick(node, frozenset())
        self._named &= named
        for it in objects:
            self.on_set(it)

    def on_set(self, thing: ConfigMap) -> None:
        """A ConfigMap is so now."""
        node = _node_of(thing)
        if node:
            self._named.add(node)
            self._world.set_sick(node, read_indexes(thing.data.get("gpus", "")))

    def on_forget(self, thing: ConfigMap) -> None:
        """A ConfigMap is gone."""
        node = _node_of(thing)
        if node:
            self._named.discard(node)
            self._world.set_sick(node, frozenset())


def _node_of(config_map: ConfigMap) -> str:
    name = config_map.metadata.name
    prefix = UNHEALTHY_CONFIG_MAP
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


class ClusterInformers:
    """The watches, together."""

    def __init__(
        self, api: Api, world: World, order: QueueController, event_reporter: EventReporter
    ) -> None:
        self.nodes: Watch[Node] = Watch(
            api, "/api/v1/nodes", Node, NodeListener(world, event_reporter)
        )
        self.pods: Watch[Pod] = Watch(
            api, "/api/v1/pods", Pod, PodListener(world, order, event_reporter)
        )
        self.group_names = PodGroupIndex()
        self.groups: Watch[PodGroup] = Watch(
            api, POD_GROUPS, PodGroup, self.group_names, optional=True
        )
        self.budgets: Watch[PodDisruptionBudget] = Watch(
            api, BUDGETS, PodDisruptionBudget, NullListener(), optional=True
        )
        self.config_maps: Watch[ConfigMap] = Watch(
            api, "/api/v1/namespaces/kube-system/configmaps", ConfigMap, UnhealthyCards(world)
        )

    @property
    def watches(self) -> dict[str, Watch[Any]]:
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
        return [f"{name}: {it.trouble}" for name, it in self.watches.items() if it.trouble]

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watch in self.watches.values():
                group.create_task(watch.run())

    async def relist(self) -> None:
        """Read nodes and pods anew, as of now."""
        await asyncio.gather(self.nodes.relist(), self.pods.relist())
