"""Nodes with divided cards, and pods placed on them, for the dialects' tests."""

from collections.abc import Mapping

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.mig.geometry import TABLES
from fenka.core.mig.instances import InstancePlacer
from fenka.core.request import Placement
from fenka.core.usage import UsageTotals
from fenka.dialects.base import PodRequest, SharedNode
from fenka.dialects.mig_records import DividedCard, with_division
from fenka.dialects.registry import WITH_HAMI, detect

A100 = TABLES["A100-40G"]
A100_MIB = 40960


def divided_node(divided: int, whole: int = 0, unit_mib: int = 1024) -> SharedNode:
    """Return a node of A100s, of which the first are divided and empty."""
    cards = tuple(
        Card(number, DeviceId(f"GPU-{number}"), "A100", A100_MIB)
        for number in range(divided + whole)
    )
    return with_division(
        SharedNode(Node("n", cards, unit_mib=unit_mib)),
        [DividedCard(card.uuid, A100, True, {}) for card in cards[:divided]],
    )


def placed(asked: PodRequest, shared: SharedNode) -> tuple[Placement, ...] | None:
    """Return where a pod goes on an unused node, with the instances that are created for it."""
    dialect = detect(asked, WITH_HAMI)
    assert dialect is not None
    placer = InstancePlacer(shared.node, UsageTotals(), shared.division)
    placements = []
    for part in dialect.parse(asked):
        placement = placer.place(part.request, "binpack")
        if not isinstance(placement, Placement):
            return None
        placer.add(placement)
        placements.append(placement)
    return tuple(placements)


def with_records(asked: PodRequest, written: Mapping[str, str]) -> PodRequest:
    """Return the pod with these annotations too."""
    return PodRequest(asked.containers, asked.labels, {**asked.annotations, **written})
