"""gpushare's `/inspect`: nodes, their cards and the pods on them, in units."""

from collections.abc import Iterator
from math import ceil
from typing import Any

import msgspec

from fenka.cluster.state import ClusterState
from fenka.dialects import gpushare
from fenka.dialects.base import SharedNode


def inspect_text(cluster: ClusterState) -> Iterator[bytes]:
    """Yield the JSON of all sharing nodes, in parts."""
    opening = b'{"nodes":['
    for shared in cluster.shared_nodes():
        yield opening + msgspec.json.encode(inspect(cluster, shared))
        opening = b","
    yield b"]}" if opening == b"," else opening + b"]}"


def inspect(cluster: ClusterState, shared: SharedNode) -> dict[str, Any]:
    """Return one sharing node."""
    node = shared.node
    pods: dict[int, list[dict[str, Any]]] = {card.index: [] for card in shared.physical_cards}
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
        for card in shared.physical_cards
    ]
    return {
        "name": node.name,
        "totalGPU": shared.total_units,
        "usedGPU": sum(it["usedGPU"] for it in devices),
        "devs": devices,
    }
