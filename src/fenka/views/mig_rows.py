"""Divided cards and their MIG instances as rows of the screens, on a workstation and in a cluster."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from fenka.core.inventory import Card
from fenka.core.mig.geometry import Geometry
from fenka.core.mig.instances import instance_card, layout_of, usable_mib
from fenka.core.mig.layouts import free_counts
from fenka.core.units import card_units
from fenka.dialects.base import SharedNode
from fenka.dialects.mig_records import TAKEN

if TYPE_CHECKING:
    # The daemon's messages have these rows too, and need no cluster.
    from fenka.cluster.state import PodAllocation

Owner = Literal["fenka", "administrator"]


class InstanceView(msgspec.Struct, frozen=True):
    """A MIG instance.

    Attributes:
        compute: percent of the whole card's time.
        uuid: its device's UUID; in a cluster its place, `<UUID of the card>/<start>/<profile>`.
        gpu_instance: the driver's id; None for one that is gone, and in a cluster.
        kept: whether it stays while nobody uses it.
        jobs: names of those that hold it; in a cluster pods with their namespace.
    """

    start: int
    profile: str
    memory_mib: int
    compute: int
    owner: Owner
    uuid: str = ""
    gpu_instance: int | None = None
    kept: bool = False
    jobs: list[str] = []


class MigCardView(msgspec.Struct, frozen=True):
    """A card and its division.

    enabled: whether it is in MIG mode. profiles: what its model offers; none without MIG. free: how many more
    of each plain profile fit, each for itself. waiting: what its layout waits for, in sentences.
    """

    index: int
    uuid: str
    model: str
    pci_device: str
    enabled: bool
    profiles: list[str] = []
    instances: list[InstanceView] = []
    free: dict[str, int] = {}
    waiting: list[str] = []


class InstanceSlice(msgspec.Struct, frozen=True):
    """A slice of an instance. holder: namespace and name. compute: percent of the whole card's time."""

    holder: str
    memory_mib: int
    compute: int


class InstanceRow(msgspec.Struct, frozen=True):
    """A MIG instance. compute: percent of the whole card's time."""

    card: int
    start: int
    profile: str
    memory_mib: int
    compute: int
    owner: Owner = "fenka"
    slices: list[InstanceSlice] = []


def usable_units(shared: SharedNode, card: Card) -> int:
    """Return the units of a card; of a divided one those of its largest instance."""
    return card_units(usable_mib(card, shared.division), shared.unit_mib)


def instance_rows(
    cards: Iterable[MigCardView], slices: Mapping[str, list[InstanceSlice]]
) -> list[InstanceRow]:
    """Return the instances of divided cards by start. slices: those in each instance, by its UUID."""
    return [
        InstanceRow(
            *(
                card.index,
                instance.start,
                instance.profile,
                instance.memory_mib,
                instance.compute,
                instance.owner,
            ),
            slices=slices.get(instance.uuid, []),
        )
        for card in cards
        for instance in card.instances
    ]


def node_instances(
    shared: SharedNode, allocations: Iterable["PodAllocation"]
) -> tuple[list[InstanceRow], dict[int, dict[str, int]]]:
    """Return the instances of a cluster's node, and what else fits on its divided cards by index."""
    if not shared.division.geometries:
        return [], {}
    slices = _slices_by_device(allocations)
    cards = _divided_cards(shared, slices)
    return instance_rows(cards, slices), {card.index: card.free for card in cards}


def divided_cards(shared: SharedNode, allocations: Iterable["PodAllocation"]) -> list[MigCardView]:
    """Return the divided cards of a cluster's node."""
    return _divided_cards(shared, _slices_by_device(allocations))


def _slices_by_device(allocations: Iterable["PodAllocation"]) -> dict[str, list[InstanceSlice]]:
    slices = defaultdict[str, list[InstanceSlice]](list)
    for held in allocations:
        for piece in held.slices:
            slices[piece.uuid].append(
                InstanceSlice(held.pod.full_name, piece.memory_mib, piece.compute)
            )
    return slices


def _divided_cards(
    shared: SharedNode, slices: Mapping[str, Sequence[InstanceSlice]]
) -> list[MigCardView]:
    return [
        _divided(shared, card, geometry, slices)
        for card in shared.node.cards
        if (geometry := shared.division.geometries.get(card.uuid)) is not None
    ]


def _divided(
    shared: SharedNode,
    card: Card,
    geometry: Geometry,
    slices: Mapping[str, Sequence[InstanceSlice]],
) -> MigCardView:
    taken = shared.division.taken.get(card.uuid, {})
    layout = layout_of(shared.node, shared.division, card.uuid)
    instances = []
    for place in sorted(layout, key=lambda place: place.start):
        instance = instance_card(card, geometry, place)
        holders = dict.fromkeys(piece.holder for piece in slices.get(instance.uuid, ()))
        instances.append(
            InstanceView(
                *(instance.start, instance.profile, instance.memory_mib, instance.compute),
                owner="administrator" if taken.get(place) == TAKEN["foreign"] else "fenka",
                uuid=instance.uuid,
                jobs=list(holders),
            )
        )
    return MigCardView(
        *(card.index, card.uuid, card.model, ""),
        enabled=True,
        profiles=list(geometry.by_name),
        instances=instances,
        free={**free_counts(geometry, layout)},
    )
