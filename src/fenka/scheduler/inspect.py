"""gpushare's `/inspect`: nodes, their cards and the pods on them, in units."""

from math import ceil
from typing import Any

from fenka.cluster.state import ClusterState
from fenka.dialects import gpushare
from fenka.dialects.base import SharedNode


def inspect(cluster: ClusterState, name: str | None = None) -> dict[str, Any] | None:
    """Return all sharing nodes, or the one of this name; None if there is none."""
    if name is None:
        return {"nodes": [_node(cluster, shared) for shared in cluster.shared_nodes()]}
    shared = cluster.shared_node(name)
    return None if shared is None else {"nodes": [_node(cluster, shared)]}


def _node(cluster: ClusterState, shared: SharedNode) -> dict[str, Any]:
    node = shared.node
    pods: dict[int, list[dict[str, Any]]] = {card.index: [] for card in node.cards}
    for allocation in cluster.allocations(node.name):
        for index, units in gpushare.shown_units(shared, allocation.slices).items():
            meta = allocation.pod.metadata
            held = {"name": meta.name, "namespace": meta.namespace, "usedGPU": ceil(units)}
            pods[index].append(held)
    devices = [
        {
            "id": card.index,
            "totalGPU": shared.card_units(card.index),
            "usedGPU": sum(it["usedGPU"] for it in pods[card.index]),
            "pods": pods[card.index],
        }
        for card in node.cards
    ]
    return {
        "name": node.name,
        "totalGPU": shared.total_units,
        "usedGPU": sum(it["usedGPU"] for it in devices),
        "devs": devices,
    }
