"""The placements that hold now: assumed -> confirmed -> released. `TRANSITIONS` is all that can happen.

An assumption holds like a confirmed placement until it is confirmed or expires, because whoever was
told of it may still act on it. The totals are kept as entries come and go; they equal what a
recomputation from the entries gives.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Placement, Slice
from fenka.core.usage import CardUsage, UsageTotals


class Conflict(FenkaError):
    """The change is not allowed; the message says why. Nothing was changed."""


class EntryState(StrEnum):
    """Of an id."""

    ABSENT = "not held"
    ASSUMED = "assumed"
    CONFIRMED = "confirmed"


class EntryEvent(StrEnum):
    """What can happen to an id."""

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
"""Everything else is a Conflict. An assumption that is adopted is assumed again."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A placement that holds. expires_at: in the caller's time, None once confirmed."""

    placement: Placement
    state: EntryState
    expires_at: float | None


class Ledger:
    """Who holds what on these nodes. A View for `evaluate`."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._cards: dict[tuple[str, DeviceId], Card] = {
            (node.name, card.uuid): card for node in self._nodes.values() for card in node.cards
        }
        self._tally = UsageTotals()
        self._entries: dict[str, Entry] = {}

    @property
    def entries(self) -> dict[str, Entry]:
        """A copy, by id."""
        return dict(self._entries)

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """Return what is allocated of this card."""
        return self._tally.card_usage(node, device)

    def host_usage(self, node: str) -> tuple[int, int]:
        """CPU (thousandths of a core) and host memory (MiB) held on this node."""
        return self._tally.host_usage(node)

    def generation(self, node: str) -> int:
        """Return a number that changes with every entry on this node."""
        return self._tally.generation(node)

    def totals(self) -> UsageTotals:
        """A copy of the totals, to try out placements on."""
        return self._tally.copy()

    def state(self, entry_id: str) -> EntryState:
        """Of any id; ABSENT for one that was never seen."""
        entry = self._entries.get(entry_id)
        return entry.state if entry else EntryState.ABSENT

    def assume(self, entry_id: str, placement: Placement, expires_at: float) -> None:
        """Hold the placement until it is confirmed, released or expires.

        Raises Conflict if the id is held already, or a card or the node's host would be overcommitted.
        """
        self._hold(entry_id, EntryEvent.ASSUME, placement, expires_at)

    def confirm(self, entry_id: str) -> None:
        """The placement is real now and does not expire. Raises Conflict if it is not assumed."""
        state = self._next(entry_id, EntryEvent.CONFIRM)
        self._entries[entry_id] = replace(self._entries[entry_id], state=state, expires_at=None)

    def adopt(self, entry_id: str, placement: Placement, expires_at: float | None = None) -> None:
        """Take over what a former ledger recorded: assumed if it expires, else confirmed.

        Raises Conflict as `assume` does.
        """
        event = EntryEvent.ADOPT if expires_at is None else EntryEvent.ASSUME
        self._hold(entry_id, event, placement, expires_at)

    def release(self, entry_id: str) -> None:
        """The placement holds no longer. Raises Conflict for an id that holds nothing."""
        self._let_go(entry_id, EntryEvent.RELEASE)

    def expire(self, now: float) -> list[str]:
        """Release the assumptions whose time is over; their ids."""
        over = [
            entry_id
            for entry_id, entry in self._entries.items()
            if entry.expires_at is not None and entry.expires_at <= now
        ]
        for entry_id in over:
            self._let_go(entry_id, EntryEvent.EXPIRE)
        return over

    def _next(self, entry_id: str, event: EntryEvent) -> EntryState:
        state = self.state(entry_id)
        if (state, event) not in TRANSITIONS:
            raise Conflict(f"cannot {event} {entry_id}: it is {state}")
        return TRANSITIONS[state, event]

    def _hold(
        self, entry_id: str, event: EntryEvent, placement: Placement, expires_at: float | None
    ) -> None:
        state = self._next(entry_id, event)
        self._check(placement)
        self._entries[entry_id] = Entry(placement, state, expires_at)
        self._tally.add(placement)

    def _let_go(self, entry_id: str, event: EntryEvent) -> None:
        self._next(entry_id, event)
        self._tally.remove(self._entries.pop(entry_id).placement)

    def _check(self, placement: Placement) -> None:
        """Raises Conflict unless the cards exist, are different ones, and have room, as has the host."""
        node = self._nodes.get(placement.node)
        if node is None:
            raise Conflict(f"there is no node {placement.node}")
        if len({piece.uuid for piece in placement.slices}) < len(placement.slices):
            raise Conflict("a placement has one slice on a card, not several")
        amounts = [amount for it in placement.slices for amount in (it.memory_mib, it.compute)]
        if min(placement.cpu_milli, placement.host_memory_mib, *amounts) < 0:
            raise Conflict("nobody can hold less than nothing")
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
