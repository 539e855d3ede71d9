"""Pods and nodes for the dialects' tests."""

from collections.abc import Sequence

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Placement
from fenka.dialects.base import ContainerKind, ContainerRequest, Dialect, PodRequest, SharedNode

T4_MIB, V100_MIB = 15079, 16130


def share(*sizes: int, unit_mib: int = 1024, name: str = "gpu-1") -> SharedNode:
    """A node with cards of these sizes in MiB."""
    cards = tuple(
        Card(index, DeviceId(f"GPU-{index}"), "model", size) for index, size in enumerate(sizes)
    )
    return SharedNode(Node(name, cards, unit_mib=unit_mib))


def pod(
    *containers: dict[str, int | str],
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    init: tuple[dict[str, int | str], ...] = (),
    sidecars: tuple[dict[str, int | str], ...] = (),
) -> PodRequest:
    """Containers c0, c1, …, init containers i0, …, sidecars s0, …, with these limits."""
    made = [
        ContainerRequest(f"{letter}{number}", limits, kind)
        for letter, kind, some in (
            ("s", ContainerKind.SIDECAR, sidecars),
            ("i", ContainerKind.INIT, init),
            ("c", ContainerKind.APP, containers),
        )
        for number, limits in enumerate(some)
    ]
    return PodRequest(tuple(made), labels or {}, annotations or {})


def node_totals(dialect: Dialect, share: SharedNode) -> dict[str, int]:
    """The amounts that a node advertises for a dialect."""
    return {
        resource.name: sum(resource.units_on(share.node, card) for card in share.node.cards)
        for resource in dialect.NODE_RESOURCES
    }


def environment(
    dialect: Dialect,
    pod: PodRequest,
    share: SharedNode,
    placements: Sequence[Placement],
    container: str,
) -> dict[str, str]:
    """The variables of a container with its slices by the pod's record."""
    slices = dialect.container_slices(pod, share, placements, container)
    return dialect.environment(pod, share, slices, container) if slices else {}
