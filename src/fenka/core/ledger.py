"""The placements in force: assumed -> confirmed -> released. `TRANSITIONS` lists every change.

An assumed placement counts like a confirmed one until it is confirmed or expires, because the client that it
was granted to may still use it. The totals are updated with every entry and equal the sum of the entries.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Placement, Slice
from fenka.core.usage import CardUsage, UsageTotals


class Conflict(FenkaError):
    """The change is not allowed; the message says why, and nothing has changed."""


class EntryState(StrEnum):
    """The state of an entry."""

    ABSENT = "not held"
    ASSUMED = "assumed"
    CONFIRMED = "confirmed"


class EntryEvent(StrEnum):
    """The events of an entry."""

    ASSUME = "assume"
    ADOPT = "adopt"
    CONFIRM = "confirm"
    RELEASE = "release"
    EXPIRE = "expire"


TRANSITIONS: dict[tuple[EntryState, EntryEvent], EntryState] = {
    (EntryState.ABSENT, EntryEvent.ASSUME): EntryState.ASSUMED,
    (EntryState.ABSENT, EntryEvent.ADOPT): EntryState.CONFIRMED,
    (EntryState.ASSUMED, EntryEvent.CONFIRM): EntryState.CONFIRMED,
    (EntryState.ASSUMED, EntryEvent.RELEASE): EntryState.ABSENT,
    (EntryState.ASSUMED, EntryEvent.EXPIRE): EntryState.ABSENT,
    (EntryState.CONFIRMED, EntryEvent.RELEASE): EntryState.ABSENT,
}
"""Everything else is a Conflict. An assumed entry that is adopted becomes assumed again."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A placement in force. expires_at: in the caller's time, None once confirmed."""

    placement: Placement
    state: EntryState
    expires_at: float | None


class Ledger:
    """The placements on these nodes, by id. It is a UsageView."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes: dict[str, Node] = {}
        self._cards: dict[tuple[str, DeviceId], Card] = {}
        for node in nodes:
            self.set_node(node)
        self._totals = UsageTotals()
        self._entries: dict[str, Entry] = {}

    @property
    def entries(self) -> dict[str, Entry]:
        """Return a copy of all entries, by id."""
        return dict(self._entries)

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """Return what is allocated of this card."""
        return self._totals.card_usage(node, device)

    def host_usage(self, node: str) -> tuple[int, int]:
        """Return the CPU (thousandths of a core) and host memory (MiB) allocated on this node."""
        return self._totals.host_usage(node)

    def set_node(self, node: Node) -> None:
        """Add a node, or replace its cards. Entries stay, also on cards that it no longer has."""
        self._nodes[node.name] = node
        self._cards = {key: card for key, card in self._cards.items() if key[0] != node.name}
        self._cards |= {(node.name, card.uuid): card for card in node.cards}

    def state(self, entry_id: str) -> EntryState:
        """Return the state of an id; ABSENT for an unknown one."""
        entry = self._entries.get(entry_id)
        return entry.state if entry else EntryState.ABSENT

    def assume(self, entry_id: str, placement: Placement, expires_at: float) -> None:
        """Add a placement until it is confirmed, released or expires.

        Raises:
            Conflict: if the id has one already, or a card or the node's host would be overcommitted.
        """
        self._add(entry_id, EntryEvent.ASSUME, placement, expires_at)

    def confirm(self, entry_id: str) -> None:
        """Make an assumed placement permanent. Raises Conflict if it is not assumed."""
        state = self._next(entry_id, EntryEvent.CONFIRM)
        self._entries[entry_id] = replace(self._entries[entry_id], state=state, expires_at=None)

    def adopt(self, entry_id: str, placement: Placement, expires_at: float | None = None) -> None:
        """Add what an earlier ledger recorded: assumed if it expires, else confirmed.

        Raises:
            Conflict: as `assume` does.
        """
        event = EntryEvent.ADOPT if expires_at is None else EntryEvent.ASSUME
        self._add(entry_id, event, placement, expires_at)

    def release(self, entry_id: str) -> None:
        """Remove a placement. Raises Conflict for an id that has none."""
        self._remove(entry_id, EntryEvent.RELEASE)

    def expire(self, now: float) -> list[str]:
        """Remove the assumed placements that have expired, and return their ids."""
        expired = [
            entry_id
            for entry_id, entry in self._entries.items()
            if entry.expires_at is not None and entry.expires_at <= now
        ]
        for entry_id in expired:
            self._remove(entry_id, EntryEvent.EXPIRE)
        return expired

    def _next(self, entry_id: str, event: EntryEvent) -> EntryState:
        state = self.state(entry_id)
        if (state, event) not in TRANSITIONS:
            raise Conflict(f"cannot {event} {entry_id}: it is {state}")
        return TRANSITIONS[state, event]

    def _add(
        self, entry_id: str, event: EntryEvent, placement: Placement, expires_at: float | None
    ) -> None:
        state = self._next(entry_id, event)
        self._check(placement)
        self._entries[entry_id] = Entry(placement, state, expires_at)
        self._totals.add(placement)

    def _remove(self, entry_id: str, event: EntryEvent) -> None:
        self._next(entry_id, event)
        self._totals.remove(self._entries.pop(entry_id).placement)

    def _check(self, placement: Placement) -> None:
        """Raise Conflict unless the cards exist, are different, and have room, and so has the host."""
        node = self._nodes.get(placement.node)
        if node is None:
            raise Conflict(f"there is no node {placement.node}")
        if len({piece.uuid for piece in placement.slices}) < len(placement.slices):
            raise Conflict("a placement has at most one slice on each card")
        amounts = [
            amount for piece in placement.slices for amount in (piece.memory_mib, piece.compute)
        ]
        if min(placement.cpu_milli, placement.host_memory_mib, *amounts) < 0:
            raise Conflict("amounts of a placement cannot be negative")
        for piece in placement.slices:
            self._check_card(placement, piece)
        cpu, memory = self.host_usage(node.name)
        if _over(cpu, placement.cpu_milli, node.cpu_milli):
            raise Conflict(f"{node.name} has too little CPU left")
        if _over(memory, placement.host_memory_mib, node.memory_mib):
            raise Conflict(f"{node.name} has too little host memory left")

    def _check_card(self, placement: Placement, piece: Slice) -> None:
        card = self._cards.get((placement.node, piece.uuid))
        if card is None:
            raise Conflict(f"there is no card {piece.card} ({piece.uuid}) on {placement.node}")
        used = self.card_usage(placement.node, piece.uuid)
        over = (
            used.memory_mib + piece.memory_mib > card.memory_mib
            or used.compute + piece.compute > card.compute
            or used.whole
            or (placement.whole and used.holders)
        )
        if over:
            raise Conflict(f"card {piece.card} of {placement.node} has no room for this slice")


def _over(used: int, more: int, total: int | None) -> bool:
    return total is not None and used + more > total
