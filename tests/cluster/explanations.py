"""Explanations of pods, of clusters as JSON."""

from typing import Any

import msgspec

from fenka.cluster.explain import explain
from fenka.cluster.objects import Event, Node, Pod
from fenka.cluster.state import ClusterSnapshot
from fenka.dialects.registry import WITH_HAMI
from tests.builders import Json, pod, units

Objects = dict[str, list[Json]]


def objects(**kinds: list[Json]) -> Objects:
    """Return a cluster's objects by kind."""
    return kinds


def data(cluster: Objects, name: str) -> dict[str, Any]:
    """Explain a pod of the namespace default, as JSON."""
    pods = [msgspec.convert(it, Pod) for it in cluster.get("pods", [])]
    (asked,) = [it for it in pods if it.full_name == f"default/{name}"]
    snapshot = ClusterSnapshot.of(
        [msgspec.convert(it, Node) for it in cluster.get("nodes", [])],
        [it for it in pods if it.spec.node_name and not it.finished],
        dialects=WITH_HAMI,
    )
    events = [msgspec.convert(it, Event) for it in cluster.get("events", [])]
    explanation: dict[str, Any] = msgspec.to_builtins(explain(asked, snapshot, events))
    return explanation


def waiting(count: int = 4, **given: Any) -> Json:
    """Return the pod that is explained."""
    return pod("p", units(count), **given)
