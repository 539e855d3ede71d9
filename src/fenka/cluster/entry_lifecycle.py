"""The life of a queue entry for which nodes are reserved. Pure: the time is an argument.

kube-scheduler does not report what it does with a pod. An entry that fits but is not bound within
RESERVATION_TTL_S is blocked by something that fenka does not see. Its reservation then ends, so that it does
not block the entries behind it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf

RESERVATION_TTL_S = 15.0
"""kube-scheduler retries a pod within 10 s after it could be placed, and binds it at once."""

REQUEUE_AFTER_S = 0.5
"""By then kube-scheduler has usually retried a pod by itself."""


class Phase(Enum):
    """Where an entry is in its life."""

    WAITING = "waiting"
    """Nothing fits now."""
    RESERVED = "reserved"
    """Nodes are reserved: it fits, and kube-scheduler has to bind it."""
    STALLED = "stalled"
    """kube-scheduler did not try it in time: it is out of the queue until it is tried again."""
    EXCLUDED = "excluded"
    """kube-scheduler tried it without the reserved nodes: it waits for others."""


class Event(Enum):
    """What happens to an entry."""

    FITS = "fits"
    FITS_NO_MORE = "fits no more"
    EXPIRED_UNTRIED = "reservation expired, not tried since"
    EXPIRED_REJECTED = "reservation expired, tried and rejected since"
    REFUSED = "kube-scheduler finds no node for another reason"
    NODES_MISSING = "kube-scheduler offers other nodes than the reserved ones"
    REJECTED = "tried again and rejected"
    SHORTAGE_REPORTED = "kube-scheduler reports that a GPU resource is lacking"
    NODES_OFFERED = "kube-scheduler offers all excluded nodes again"


TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (Phase.WAITING, Event.FITS): Phase.RESERVED,
    (Phase.EXCLUDED, Event.FITS): Phase.RESERVED,
    (Phase.RESERVED, Event.FITS_NO_MORE): Phase.WAITING,
    (Phase.RESERVED, Event.EXPIRED_UNTRIED): Phase.STALLED,
    (Phase.RESERVED, Event.EXPIRED_REJECTED): Phase.EXCLUDED,
    (Phase.RESERVED, Event.REFUSED): Phase.STALLED,
    (Phase.RESERVED, Event.NODES_MISSING): Phase.EXCLUDED,
    (Phase.STALLED, Event.REJECTED): Phase.WAITING,
    (Phase.STALLED, Event.SHORTAGE_REPORTED): Phase.WAITING,
    (Phase.EXCLUDED, Event.NODES_OFFERED): Phase.WAITING,
}
"""All other events leave the phase as it is. An entry that would be WAITING while nodes are excluded for it
is EXCLUDED instead."""


@dataclass(slots=True)
class _Entry:
    phase: Phase = Phase.WAITING
    reserved_at: float = 0.0
    rejected: bool = False
    """Since the reservation was made."""
    requeued: bool = False
    """Since the reservation was made."""
    excluded: frozenset[str] = frozenset()
    message: str = ""
    """kube-scheduler's, when the entry stalled."""

    def apply(self, event: Event) -> bool:
        """Return whether the phase changes."""
        after = TRANSITIONS.get((self.phase, event), self.phase)
        if after is Phase.WAITING and self.excluded:
            after = Phase.EXCLUDED
        changed = after is not self.phase
        self.phase = after
        return changed


class EntryLifecycle:
    """Keeps the phase of each entry, by its ID. An entry that is not known is WAITING."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self.version = 0
        """Changes whenever the queue has to be scheduled again."""

    # ---- queries ----

    def phase(self, entry_id: str) -> Phase:
        """Return the entry's phase."""
        entry = self._entries.get(entry_id)
        return entry.phase if entry else Phase.WAITING

    def is_stalled(self, entry_id: str) -> bool:
        """Return whether the entry is out of the queue."""
        return self.phase(entry_id) is Phase.STALLED

    def excluded_nodes(self) -> dict[str, frozenset[str]]:
        """Return the nodes that may not be reserved for an entry, by entry."""
        return {name: entry.excluded for name, entry in self._entries.items() if entry.excluded}

    def next_expiry(self) -> float:
        """Return when the first reservation expires; infinite if there is none."""
        reserved = (
            entry.reserved_at for entry in self._entries.values() if entry.phase is Phase.RESERVED
        )
        return min(reserved, default=inf) + RESERVATION_TTL_S

    def needs_requeue(self, entry_id: str, now: float) -> bool:
        """Return whether kube-scheduler has not tried the entry although it has fitted for long enough."""
        entry = self._entries.get(entry_id)
        return (
            entry is not None
            and entry.phase is Phase.RESERVED
            and not entry.requeued
            and now - entry.reserved_at >= REQUEUE_AFTER_S
        )

    # ---- events ----

    def fitting(self, entry_ids: Collection[str], now: float) -> dict[str, float]:
        """Record which entries fit now.

        Returns:
            Entries whose reservation has expired, with the time at which it was made. The caller ends each
            with `expire`.
        """
        for entry_id in [name for name in self._entries if name not in entry_ids]:
            self._apply(entry_id, Event.FITS_NO_MORE)
        expired = {}
        for entry_id in entry_ids:
            entry = self._entries.setdefault(entry_id, _Entry())
            if entry.apply(Event.FITS):
                entry.reserved_at, entry.rejected, entry.requeued = now, False, False
            elif entry.phase is Phase.RESERVED and now - entry.reserved_at >= RESERVATION_TTL_S:
                expired[entry_id] = entry.reserved_at
        return expired

    def expire(self, entry_id: str, nodes: Iterable[str], message: str) -> None:
        """End a reservation.

        Args:
            entry_id: an entry that `fitting` has returned.
            nodes: the reserved nodes. They are excluded if kube-scheduler has tried the entry meanwhile: it
                did not offer them.
            message: what kube-scheduler says of the entry now.
        """
        entry = self._entries[entry_id]
        if entry.rejected:
            entry.excluded |= frozenset(nodes)
            self._apply(entry_id, Event.EXPIRED_REJECTED)
        else:
            entry.message = message
            self._apply(entry_id, Event.EXPIRED_UNTRIED)

    def refuse(self, entry_id: str, missing: Iterable[str], message: str) -> None:
        """End a reservation that kube-scheduler cannot use, whatever fenka says.

        Args:
            entry_id: an entry that is RESERVED.
            missing: the reserved nodes, if kube-scheduler asked about others; empty if it asked about none.
            message: what it says of the entry now.
        """
        entry, excluded = self._entries[entry_id], frozenset(missing)
        entry.excluded |= excluded
        entry.message = message
        self._apply(entry_id, Event.NODES_MISSING if excluded else Event.REFUSED)

    def reject(self, entry_id: str, nodes: Iterable[str]) -> bool:
        """Record that kube-scheduler tried the entry and that none of the offered nodes fits.

        Returns:
            Whether the entry was stalled and is in the queue again.
        """
        entry = self._entries.get(entry_id)
        if entry is None:
            return False
        entry.rejected = True
        excluded = entry.excluded.difference(nodes)
        if excluded != entry.excluded:
            entry.excluded = excluded
            self.version += 1
        readmitted = self._apply(entry_id, Event.REJECTED)
        if not entry.excluded:
            self._apply(entry_id, Event.NODES_OFFERED)
        return readmitted

    def report(self, entry_id: str, message: str, resources: Iterable[str]) -> bool:
        """Record what kube-scheduler says of the entry; the resources are those that fenka places.

        Returns:
            Whether the entry was stalled and is in the queue again.
        """
        entry = self._entries.get(entry_id)
        if entry is None or entry.phase is not Phase.STALLED or message == entry.message:
            return False
        shortage = any(f"Insufficient {name}" in message for name in resources)
        return shortage and self._apply(entry_id, Event.SHORTAGE_REPORTED)

    def mark_requeued(self, entry_id: str) -> None:
        """Record that kube-scheduler was asked to try the entry."""
        self._entries[entry_id].requeued = True

    def forget(self, entry_id: str) -> None:
        """Remove an entry that is bound or deleted."""
        self._entries.pop(entry_id, None)

    def _apply(self, entry_id: str, event: Event) -> bool:
        entry = self._entries.get(entry_id)
        if entry is None or not entry.apply(event):
            return False
        if entry.phase is Phase.WAITING:
            del self._entries[entry_id]
        self.version += 1
        return True
