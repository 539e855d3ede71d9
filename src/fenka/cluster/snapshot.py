"""A cluster as it was listed once, for screens and what-ifs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterState
from fenka.dialects.base import Dialect
from fenka.dialects.registry import DIALECTS


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """Nodes by name, pods by namespace and name, and the state that follows from them."""

    nodes: list[Node]
    pods: list[Pod]
    state: ClusterState

    @classmethod
    def of(
        cls,
        nodes: Iterable[Node],
        pods: Iterable[Pod],
        unhealthy: Mapping[str, frozenset[int]] | None = None,
        dialects: tuple[Dialect, ...] = DIALECTS,
        state: ClusterState | None = None,
    ) -> "ClusterSnapshot":
        """Build a snapshot.

        Args:
            nodes: all nodes.
            pods: all pods.
            unhealthy: indexes of cards that a health daemon names, by node.
            dialects: the names by which pods request cards.
            state: has the nodes and pods already, if they were added to it one by one.
        """
        nodes = sorted(nodes, key=lambda node: node.metadata.name)
        pods = sorted(pods, key=lambda pod: (pod.metadata.namespace, pod.metadata.name))
        state = state or ClusterState(nodes, pods, dialects)
        for name, indexes in (unhealthy or {}).items():
            state.set_unhealthy(name, indexes)
        return cls(nodes, pods, state)
