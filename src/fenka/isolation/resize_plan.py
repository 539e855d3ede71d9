"""The order in which a resize takes effect. Used by the workstation's daemon and by the node program.

1. Record `reserved`: of each slice the larger of both sizes.
2. `enforce` the new sizes on the control pages.
3. Record `after`; if step 2 was refused, record `before`.

So a process that is killed at any moment leaves records of at least what programs may use, and the same
resize can be repeated to complete it. Pure, except for the functions that it is given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fenka.core.inventory import Node
from fenka.core.request import InvalidRequest, Memory, Slice
from fenka.isolation.account import InvalidAccount
from fenka.isolation.resize import InUse

Sizes = Mapping[str, Sequence[Slice]]
"""Slices by lease, in the order of the lease's control page."""


@dataclass(frozen=True, slots=True)
class ResizePlan:
    """A resize of leases. before: the sizes that are in force."""

    before: Sizes
    after: Sizes

    @property
    def reserved(self) -> dict[str, list[Slice]]:
        """The larger of both sizes, which may be in use during the resize."""
        return {
            lease: [larger(*pair) for pair in zip(slices, self.after[lease], strict=True)]
            for lease, slices in self.before.items()
        }

    @property
    def grows(self) -> bool:
        """Whether any slice becomes larger, so that step 1 is needed."""
        return any([*slices] != [*self.before[lease]] for lease, slices in self.reserved.items())

    def enforce(self, apply: Callable[[str, Sequence[Slice]], object]) -> None:
        """Apply the new sizes lease by lease.

        Leases that shrink come first, because only these can be refused: what must be undone then has only
        shrunk, and there is room for it.

        Args:
            apply: Puts the slices of a lease in force.

        Raises:
            InUse, InvalidAccount: Raised by `apply`; the sizes before are in force again.
        """
        applied: list[str] = []
        try:
            for lease in self._order():
                apply(lease, self.after[lease])
                applied.append(lease)
        except (InUse, InvalidAccount):
            for lease in applied:
                apply(lease, self.before[lease])
            raise

    def _order(self) -> list[str]:
        changed = [lease for lease in self.after if [*self.after[lease]] != [*self.before[lease]]]
        return sorted(changed, key=lambda lease: not self._shrinks(lease))

    def _shrinks(self, lease: str) -> bool:
        pairs = zip(self.before[lease], self.after[lease], strict=True)
        return any(new.memory_mib < old.memory_mib for old, new in pairs)


def larger(piece: Slice, other: Slice) -> Slice:
    """Return a slice with the larger memory and the larger compute of two slices of one card."""
    return replace(
        piece,
        memory_mib=max(piece.memory_mib, other.memory_mib),
        compute=max(piece.compute, other.compute),
    )


def resized(
    slices: Sequence[Slice], memory: Memory | None, compute: int | None, node: Node
) -> list[Slice]:
    """Return slices of a node's cards in other sizes; None keeps a size.

    Raises InvalidRequest if a card is too small.
    """
    sizes = {card.uuid: card.memory_mib for card in node.cards}

    def changed(piece: Slice) -> Slice:
        size = sizes.get(piece.uuid, 0)
        mib = memory.mib_on(size, node.unit_mib) if memory else piece.memory_mib
        if mib is None:
            nominal = memory.nominal_mib(node.unit_mib) if memory else 0
            raise InvalidRequest(
                f"card {piece.card} has {size} MiB: {nominal} MiB are more than all of it"
            )
        return replace(piece, memory_mib=mib, compute=piece.compute if compute is None else compute)

    return [changed(piece) for piece in slices]
