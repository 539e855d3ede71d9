"""The placements that hold now: assumed -> confirmed -> released. `TRANSITIONS` is all that can happen.

An assumption holds like a confirmed placement until it is confirmed or expires, because whoever was
told of it may still act on it. The totals are kept as entries come and go; they equal what a
recomputation from the entries gives.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from fenka.core.cards import Card, Node
from fenka.core.evaluate import NOTHING, Used
from fenka.core.requests import Placement, Slice


class Conflict(Exception):
    """The change is not allowed; the message says why. Nothing was changed."""


class State(StrEnum):
    """Of an id."""

    ABSENT = "not held"
    ASSUMED = "assumed"
    CONFIRMED = "confirmed"


class Event(StrEnum):
    """What can happen to an id."""

    ASSUME = "assume"
    ADOPT = "adopt"
    CONFIRM = "confirm"
    RELEASE = "release"
    EXPIRE = "expire"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.ABSENT, Event.ASSUME): State.ASSUMED,
    (State.ABSENT, Event.ADOPT): State.CONFIRMED,
    (State.ASSUMED, Event.CONFIRM): State.CONFIRMED,
    (State.ASSUMED, Event.RELEASE): State.ABSENT,
    (State.ASSUMED, Event.EXPIRE): State.ABSENT,
    (State.CONFIRMED, Event.RELEASE): State.ABSENT,
}
"""Everything else is a Conflict. An assumption that is adopted is assumed again."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A placement that holds. expires_at: in the caller's time, None once confirmed."""

    placement: Placement
    state: State
    expires_at: float | None


class Tally:
    """Totals of placements. A View for `evaluate`.

    It checks nothing: also a record that overcommits a card is counted as it stands.
    """

    def __init__(self) -> None:
        self._used: dict[tuple[str, int], Used] = {}
        self._host: dict[str, tuple[int, int]] = {}

    def used(self, node: str, card: int) -> Used:
        """What is held of this card."""
        return self._used.get((node, card), NOTHING)

    def host_used(self, node: str) -> tuple[int, int]:
        """CPU (thousandths of a core) and host memory (MiB) held on this node."""
        return self._host.get(node, (0, 0))

    def add(self, placement: Placement) -> None:
        """Count a placement in."""
        self._count(placement, +1)

    def remove(self, placement: Placement) -> None:
        """Count out a placement that was counted in."""
        self._count(placement, -1)

    def copy(self) -> "Tally":
        """A tally that goes its own way from here."""
        twin = Tally()
        twin._used, twin._host = dict(self._used), dict(self._host)
        return twin

    def _count(self, placement: Placement, sign: int) -> None:
        for piece in placement.slices:
            used = self.used(placement.node, piece.card)
            self._used[placement.node, piece.card] = Used(
                used.memory_mib + sign * piece.memory_mib,
                used.compute + sign * piece.compute,
                used.holders + sign,
                used.whole + sign * placement.whole,
            )
        cpu, memory = self.host_used(placement.node)
        self._host[placement.node] = (
            cpu + sign * placement.cpu_milli,
            memory + sign * placement.host_memory_mib,
        )


class Ledger:
    """Who holds what on these nodes. A View for `evaluate`."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._cards: dict[tuple[str, int], Card] = {
            (node.name, card.index): card for node in self._nodes.values() for card in node.cards
        }
        self._tally = Tally()
        self._entries: dict[str, Entry] = {}

    @property
    def entries(self) -> dict[str, Entry]:
        """A copy, by id."""
        return dict(self._entries)

    def used(self, node: str, card: int) -> Used:
        """What is held of this card."""
        return self._tally.used(node, card)

    def host_used(self, node: str) -> tuple[int, int]:
        """CPU (thousandths of a core) and host memory (MiB) held on this node."""
        return self._tally.host_used(node)

    def tally(self) -> Tally:
        """A copy of the totals, to try out placements on."""
        return self._tally.copy()

    def state(self, entry_id: str) -> State:
        """Of any id; ABSENT for one that was never seen."""
        entry = self._entries.get(entry_id)
        return entry.state if entry else State.ABSENT

    def assume(self, entry_id: str, placement: Placement, expires_at: float) -> None:
        """Hold the placement until it is confirmed, released or expires.

        Raises Conflict if the id is held already, or a card or the node's host would be overcommitted.
        """
        self._hold(entry_id, Event.ASSUME, placement, expires_at)

    def confirm(self, entry_id: str) -> None:
        """The placement is real now and does not expire. Raises Conflict if it is not assumed."""
        state = self._next(entry_id, Event.CONFIRM)
        self._entries[entry_id] = replace(self._entries[entry_id], state=state, expires_at=None)

    def adopt(self, entry_id: str, placement: Placement, expires_at: float | None = None) -> None:
        """Take over what a former ledger recorded: assumed if it expires, else confirmed.

        Raises Conflict as `assume` does.
        """
        event = Event.ADOPT if expires_at is None else Event.ASSUME
        self._hold(entry_id, event, placement, expires_at)

    def release(self, entry_id: str) -> None:
        """The placement holds no longer. Raises Conflict for an id that holds nothing."""
        self._let_go(entry_id, Event.RELEASE)

    def expire(self, now: float) -> list[str]:
        """Release the assumptions whose time is over; their ids."""
        over = [
            entry_id
            for entry_id, entry in self._entries.items()
            if entry.expires_at is not None and entry.expires_at <= now
        ]
        for entry_id in over:
            self._let_go(entry_id, Event.EXPIRE)
        return over

    def _next(self, entry_id: str, event: Event) -> State:
        state = self.state(entry_id)
        if (state, event) not in TRANSITIONS:
            raise Conflict(f"cannot {event} {entry_id}: it is {state}")
        return TRANSITIONS[state, event]

    def _hold(
        self, entry_id: str, event: Event, placement: Placement, expires_at: float | None
    ) -> None:
        state = self._next(entry_id, event)
        self._check(placement)
        self._entries[entry_id] = Entry(placement, state, expires_at)
        self._tally.add(placement)

    def _let_go(self, entry_id: str, event: Event) -> None:
        self._next(entry_id, event)
        self._tally.remove(self._entries.pop(entry_id).placement)

    def _check(self, placement: Placement) -> None:
        """Raises Conflict unless the cards exist, are different ones, and have room, as has the host."""
        node = self._nodes.get(placement.node)
        if node is None:
            raise Conflict(f"there is no node {placement.node}")
        if len({piece.card for piece in placement.slices}) < len(placement.slices):
            raise Conflict("a placement has one slice on a card, not several")
        amounts = [amount for it in placement.slices for amount in (it.memory_mib, it.compute)]
        if min(placement.cpu_milli, placement.host_memory_mib, *amounts) < 0:
            raise Conflict("nobody can hold less than nothing")
        for piece in placement.slices:
            self._check_card(placement, piece)
        cpu, memory = self.host_used(node.name)
        if _over(cpu, placement.cpu_milli, node.cpu_milli):
            raise Conflict(f"{node.name} has too little CPU left")
        if _over(memory, placement.host_memory_mib, node.memory_mib):
            raise Conflict(f"{node.name} has too little host memory left")

    def _check_card(self, placement: Placement, piece: Slice) -> None:
        card = self._cards.get((placement.node, piece.card))
        if card is None or card.uuid != piece.uuid:
            raise Conflict(f"there is no card {piece.card} ({piece.uuid}) on {placement.node}")
        used = self.used(placement.node, piece.card)
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
