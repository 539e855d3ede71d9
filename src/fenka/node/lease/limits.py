"""Limits of running containers: what is in force on the control page, and what the store records."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import msgspec

from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.isolation import control, resize
from fenka.isolation.control import InvalidControl, Limit
from fenka.isolation.files import MIB, card_limits
from fenka.isolation.resize_plan import Sizes
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import Lease, LeaseStore


class LeaseLimits:
    """Reads and changes limits. contexts_mib: context overhead by card UUID."""

    def __init__(
        self, store: LeaseStore, files: LeaseFiles, contexts_mib: Mapping[str, int]
    ) -> None:
        self._store, self._files, self._contexts_mib = store, files, contexts_mib

    def in_force(self, token: str, lease: Lease) -> list[Slice]:
        """Return what the lease's programs may use now. Raises OSError, InvalidControl."""
        if lease.limits_mib:  # Its node does not isolate.
            return list(lease.slices)
        page = self._files.control(token)
        limits = control.read_interrupted(page).limits
        if [limit.uuid for limit in limits] != [piece.uuid for piece in lease.slices]:
            raise InvalidControl(f"{page}: has other cards than its lease")
        return [_with_limit(*pair) for pair in zip(lease.slices, limits, strict=True)]

    def check(
        self, token: str, lease: Lease, before: Sequence[Slice], after: Sequence[Slice]
    ) -> None:
        """Check that programs hold no more than is left. Raises InUse, OSError, InvalidAccount."""
        limits = self._limits(lease, before), self._limits(lease, after)
        resize.check(self._files.slots(token), *limits)

    def apply(self, token: str, lease: Lease, slices: Sequence[Slice]) -> None:
        """Put slices in force for running programs. Raises InUse, OSError, InvalidControl, InvalidAccount."""
        page, slots = self._files.control(token), self._files.slots(token)
        resize.resize(page, slots, self._limits(lease, slices))

    def record(self, sizes: Sizes, holds: Sequence[Slice]) -> None:
        """Store the slices of tokens, and what their pod holds. Raises OSError."""
        for name, slices in sizes.items():
            token = self._store.tokens.get(name)
            if token is None or token.lease is None:
                continue
            lease = msgspec.structs.replace(
                token.lease,
                slices=list(slices),
                holds=list(holds),
                resized=token.lease.resized or list(slices) != token.lease.slices,
            )
            if lease != token.lease:
                self._store.put(msgspec.structs.replace(token, lease=lease))

    def _limits(self, lease: Lease, slices: Sequence[Slice]) -> tuple[Limit, ...]:
        lease = msgspec.structs.replace(lease, slices=list(slices))
        return card_limits(slices, self._contexts_mib, lease.compute)


def as_in_force(lease: Lease, limits: Sequence[Limit], cards: Collection[Card]) -> Lease:
    """Return a lease with the limits of its control page. Used when the store was lost.

    The page says what its programs may use; the pod's record, which its owner can write, does not.
    Raises InvalidControl.
    """
    placed: dict[str, Slice] = {piece.uuid: piece for piece in lease.slices}
    by_uuid: dict[str, Card] = {card.uuid: card for card in cards}
    slices = []
    for limit in limits:
        card = by_uuid.get(limit.uuid)
        if card is None:
            raise InvalidControl(
                f"the control page of {lease.pod} has card {limit.uuid}, which is not here"
            )
        piece = placed.get(limit.uuid, Slice(card.index, card.uuid, 0, 0))
        slices.append(_with_limit(piece, limit))
    limited = {piece.uuid for piece in slices}
    return msgspec.structs.replace(
        lease,
        slices=slices,
        holds=[piece for piece in lease.holds if piece.uuid in limited],
        resized=slices != lease.slices,
    )


def _with_limit(piece: Slice, limit: Limit) -> Slice:
    """Return a slice with the page's limit. There 100 % is either the slice's compute or no limit."""
    same = limit.compute_percent == (piece.compute or 100)
    compute = piece.compute if same else limit.compute_percent % 100
    return replace(piece, memory_mib=limit.memory_bytes // MIB, compute=compute)
