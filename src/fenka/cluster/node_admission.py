"""Which requests a node's mode admits, and which its cards could ever hold."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from fenka.cluster.state import ClusterState
from fenka.core.gangs import place_gang
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.reasons import Unschedulable
from fenka.core.request import Request
from fenka.core.usage import EmptyUsage
from fenka.dialects import node_modes
from fenka.dialects.base import InvalidRecord, SliceRequest

_CardKind = tuple[int, int, str, bool, bool]


def labels(cluster: ClusterState, name: str) -> Mapping[str, str]:
    """Return the labels of a node; none for an unknown one."""
    node = cluster.node(name)
    return node.metadata.labels if node else {}


def resident_compute(cluster: ClusterState, name: str) -> set[bool]:
    """Return whether pods with memory of this node have compute too; empty if its mode does not matter."""
    if node_modes.MODE_LABEL not in labels(cluster, name):
        return set()
    return {
        any(piece.compute for piece in it.slices)
        for it in cluster.allocations(name)
        if it.slices and not any(placement.whole for placement in it.placements)
    }


def check_admission(cluster: ClusterState, name: str, parts: Sequence[SliceRequest]) -> None:
    """Check that the node admits the requests beside its pods. Raises InvalidRecord with the reason."""
    node_modes.check_admission(labels(cluster, name), parts, resident_compute(cluster, name))


def admits(cluster: ClusterState, name: str, parts: Sequence[SliceRequest]) -> bool:
    """Return whether the node admits the requests beside its pods."""
    try:
        check_admission(cluster, name, parts)
    except InvalidRecord:
        return False
    return True


def fits_when_empty(requests: tuple[Request, ...], node: Node, *, repaired: bool = False) -> bool:
    """Return whether the requests would fit the node without any allocations.

    Args:
        requests: what is placed together.
        node: the node.
        repaired: take unhealthy cards for healthy and cordoned ones for open.
    """
    kinds = tuple(
        (it.memory_mib, it.compute, it.model, it.healthy or repaired, it.cordoned and not repaired)
        for it in node.cards
    )
    return _fit_when_empty(requests, kinds, node.unit_mib)


@lru_cache(maxsize=1024)
def _fit_when_empty(
    requests: tuple[Request, ...], kinds: tuple[_CardKind, ...], unit_mib: int
) -> bool:
    """Keyed by the kinds of cards: a cluster has few kinds of nodes."""
    cards = (
        Card(
            index,
            DeviceId(str(index)),
            model,
            memory_mib,
            compute,
            healthy=healthy,
            cordoned=cordoned,
        )
        for index, (memory_mib, compute, model, healthy, cordoned) in enumerate(kinds)
    )
    node = replace(Node("any", tuple(cards)), unit_mib=unit_mib)
    return not isinstance(place_gang(EmptyUsage(), requests, "binpack", (node,)), Unschedulable)
