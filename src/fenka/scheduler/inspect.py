"""gpushare's `/inspect`: nodes, their cards and who holds what of them, in units."""

from math import ceil
from typing import Any

from fenka.cluster.state import ClusterState
from fenka.dialects import gpushare
from fenka.dialects.base import SharedNode


def inspect(world: ClusterState, name: str | None = None) -> dict[str, Any] | None:
    """All sharing nodes, or the one of that name; None where there is none."""
    if name is None:
        return {"nodes": [_node(world, share) for share in world.shared_nodes()]}
    share = world.shared_node(name)
    return None if share is None else {"nodes": [_node(world, share)]}


def _node(world: ClusterState, share: SharedNode) -> dict[str, Any]:
    node = share.node
    pods: dict[int, list[dict[str, Any]]] = {card.index: [] for card in node.cards}
    for holding in world.allocations(node.name):
        for index, units in gpushare.shown_units(share, holding.slices).items():
            meta = holding.pod.metadata
            held = {"name": meta.name, "namespace": meta.namespace, "usedGPU": ceil(units)}
            pods[index].append(held)
    devices = [
        {
            "id": card.index,
            "totalGPU": share.card_units(card.index),
            "usedGPU": sum(it["usedGPU"] for it in pods[card.index]),
            "pods": pods[card.index],
        }
        for card in node.cards
    ]
    return {
        "name": node.name,
        "totalGPU": share.total_units,
        "usedGPU": sum(it["usedGPU"] for it in devices),
        "devs": devices,
    }
