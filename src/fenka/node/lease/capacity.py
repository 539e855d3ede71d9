"""Checks that what is given away of a card fits beside what other pods hold of it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fenka.core.inventory import MAX_STARTS, Card
from fenka.core.mig.geometry import Place
from fenka.core.request import Slice
from fenka.dialects.base import SharedNode, split_instance
from fenka.dialects.mig_records import with_instances
from fenka.dialects.node_modes import MIG_TENANCY
from fenka.node.lease.resolve import Misplaced
from fenka.node.lease.sizes import ResizeRejected
from fenka.node.lease.store import Lease

MEMORY, COMPUTE = "MiB", "% of its time"
MAX_NAMES = 3
"""Pods that a rejected resize names of those that hold a card."""


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """The node, and what pods hold of it as long as any of their processes lives.

    held: by UID. names: of the pods, by UID.
    """

    share: SharedNode
    held: Mapping[str, Sequence[Slice]]
    names: Mapping[str, str]

    def healthy_card(self, piece: Slice) -> Card | None:
        """Return the card or instance of a slice; None if it is unhealthy or gone.

        An instance need not exist yet.
        """
        cards = with_instances(self.share, [piece.uuid]).node.cards
        return next((card for card in cards if card.uuid == piece.uuid and card.healthy), None)


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a card lacks. measure: as users write it. holders: pods that hold part of the card."""

    measure: str
    total: int
    held: int
    requested: int
    holders: list[str]


def check_capacity(lease: Lease, capacity: NodeCapacity, *, share_instances: bool = True) -> None:
    """Check that a lease fits on its cards beside what other pods hold.

    So a card is not overcommitted by a pod that was deleted by force and still runs, or by two schedulers
    that decide at once. share_instances: whether two namespaces may share an instance. Raises Misplaced.
    """
    for piece in lease.holds:
        card = capacity.healthy_card(piece)
        if card is None:
            or_whole = ", or its card is not divided now" if split_instance(piece.uuid) else " now"
            raise Misplaced(
                f"fenka: {device_name(piece)} ({piece.uuid}) of this node is unhealthy{or_whole}"
            )
        if card.divided:
            raise Misplaced(f"fenka: {device_name(piece)} is divided into MIG instances now")
        for shortage in _shortages(lease.uid, piece, card, capacity):
            measure = shortage.measure
            raise Misplaced(
                f"fenka: {device_name(piece)} has {shortage.total} {measure}, of which {shortage.held} "
                f"{measure} are still held by {', '.join(shortage.holders)}: these {shortage.requested} "
                f"must wait until they end"
            )
        if card.parent is not None:
            _check_instance(lease, piece, capacity, share_instances)


def _check_instance(
    lease: Lease, piece: Slice, capacity: NodeCapacity, share_instances: bool
) -> None:
    """Check that an instance's place is free, and that it is only for those who may share it."""
    others = {
        (capacity.names.get(uid, uid), other)
        for uid, slices in capacity.held.items()
        for other in slices
        if uid != lease.uid
    }
    for name, other in sorted(others, key=lambda held: held[0]):
        if other.uuid == piece.uuid:
            if not share_instances and name.partition("/")[0] != lease.namespace:
                raise Misplaced(
                    f"fenka: {device_name(piece)} has programs of another namespace, and the node's label "
                    f"{MIG_TENANCY} does not let namespaces share instances"
                )
        elif _mask(piece, capacity) & _mask(other, capacity):
            raise Misplaced(
                f"fenka: {device_name(piece)} has the place of {device_name(other)}, which is still held "
                f"by {name}"
            )


def _mask(piece: Slice, capacity: NodeCapacity) -> int:
    """Return the slices of its card's memory axis that an instance has, as bits by card; 0 for a card."""
    place = split_instance(piece.uuid)
    geometry = capacity.share.division.geometries.get(place[0]) if place else None
    if place is None or geometry is None or place[2] not in geometry.by_name:
        return 0
    mask = Place(geometry.by_name[place[2]], place[1]).mask
    return mask << (piece.card * MAX_STARTS)


def device_name(piece: Slice) -> str:
    """Return what people call the card or instance of a slice."""
    place = split_instance(piece.uuid)
    return f"instance {piece.card}/{place[1]} {place[2]}" if place else f"card {piece.card}"


def check_growth(
    uid: str, before: Sequence[Slice], after: Sequence[Slice], capacity: NodeCapacity
) -> None:
    """Check that a pod may grow from one size to another beside others. Raises ResizeRejected."""
    former_by_card = {piece.uuid: piece for piece in before}
    for piece in after:
        former = former_by_card.get(piece.uuid)
        if former == piece:
            continue
        card = capacity.healthy_card(piece)
        if card is None:
            raise ResizeRejected(
                f"{device_name(piece)} is unhealthy now: nothing grows on it", "unhealthy"
            )
        for shortage in _shortages(uid, piece, card, capacity):
            measure = shortage.measure
            if former is None or _amount(piece, measure) > _amount(former, measure):
                held = f" hold {shortage.held}"
                holders = f", of which {_listed(shortage.holders)}{held}" if shortage.held else ""
                raise ResizeRejected(
                    f"{device_name(piece)} has {shortage.total} {measure}{holders}: {shortage.requested} do "
                    f"not fit",
                    f"room {measure}",
                )


def _shortages(uid: str, piece: Slice, card: Card, capacity: NodeCapacity) -> Iterator[Shortage]:
    """Yield what a card lacks of memory and compute for a slice of a pod, beside what others hold."""
    on_card = [
        (capacity.names.get(holder, holder), other)
        for holder, slices in capacity.held.items()
        for other in slices
        if holder != uid and other.uuid == piece.uuid
    ]
    for measure, total in ((MEMORY, card.memory_mib), (COMPUTE, card.compute)):
        amounts = [(name, _amount(other, measure)) for name, other in on_card]
        held, requested = sum(amount for _, amount in amounts), _amount(piece, measure)
        if held + requested > total:
            holders = sorted({name for name, amount in amounts if amount})
            yield Shortage(measure, total, held, requested, holders)


def _amount(piece: Slice, measure: str) -> int:
    return piece.memory_mib if measure == MEMORY else piece.compute


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
