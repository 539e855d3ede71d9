"""Checks that what is given away of a card fits beside what other pods hold of it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.node.lease.resolve import Misplaced
from fenka.node.lease.store import Lease

MEMORY, COMPUTE = "MiB", "% of its time"


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a card lacks. measure: as users write it. holders: pods that hold part of the card."""

    measure: str
    total: int
    held: int
    requested: int
    holders: list[str]


def check_capacity(
    lease: Lease,
    pods: Mapping[str, Sequence[Slice]],
    cards: Collection[Card],
    names: Mapping[str, str],
) -> None:
    """Check that a lease fits on its cards beside what other pods hold.

    So a card is not overcommitted by a pod that was deleted by force and still runs, or by two schedulers
    that decide at once.

    Args:
        lease: The lease.
        pods: What pods hold here by UID, as long as any of their processes lives.
        cards: The node's cards.
        names: The pods' names by UID.

    Raises:
        Misplaced: The lease does not fit, or a card is unhealthy.
    """
    known = {card.uuid: card for card in cards}
    others = {uid: slices for uid, slices in pods.items() if uid != lease.uid}
    for piece in lease.holds:
        card = known.get(piece.uuid)
        if card is None or not card.healthy:
            raise Misplaced(
                f"fenka: card {piece.card} ({piece.uuid}) of this node is unhealthy now"
            )
        for shortage in shortages(piece, card, others, names):
            measure = shortage.measure
            raise Misplaced(
                f"fenka: card {piece.card} has {shortage.total} {measure}, of which {shortage.held} "
                f"{measure} are still held by {', '.join(shortage.holders)}: these {shortage.requested} "
                f"must wait until they end"
            )


def shortages(
    piece: Slice, card: Card, others: Mapping[str, Sequence[Slice]], names: Mapping[str, str]
) -> Iterator[Shortage]:
    """Yield what a card lacks of memory and compute for a slice, beside what others hold.

    others: slices by UID. names: pods by UID.
    """
    on_card = [
        (names.get(uid, uid), other)
        for uid, slices in others.items()
        for other in slices
        if other.uuid == piece.uuid
    ]
    for measure, total, requested, amounts in (
        (
            MEMORY,
            card.memory_mib,
            piece.memory_mib,
            [(name, other.memory_mib) for name, other in on_card],
        ),
        (COMPUTE, card.compute, piece.compute, [(name, other.compute) for name, other in on_card]),
    ):
        held = sum(amount for _, amount in amounts)
        if held + requested > total:
            holders = sorted({name for name, amount in amounts if amount})
            yield Shortage(measure, total, held, requested, holders)
