"""The placements that hold now: assumed -> confirmed -> released.

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
    """Of an entry; a released one is gone."""

    ASSUMED = "assumed"
    CONFIRMED = "confirmed"


@dataclass(frozen=True, slots=True)
class Entry:
    """A placement that holds. expires_at: in the caller's time, None once confirmed."""

    placement: Placement
    state: State
    expires_at: float | None


class Tally:
    """Totals of placements. A View for `evaluate`."""

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
                placement.whole and sign > 0,
            )
        cpu, memory = self.host_used(placement.node)
        self._host[placement.node] = (
            cpu + sign * placement.cpu_milli,
            memory + sign * placement.host_memory_mib,
        )


class Ledger:
    """Who holds what on these nodes. A View for `evaluate`."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._cards: dict[tuple[str, int], Card] = {
            (node.name, card.index): card for node in nodes for card in node.cards
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

    def assume(self, entry_id: str, placement: Placement, expires_at: float) -> None:
        """Hold the placement until it is confirmed, released or expires.

        Raises Conflict if the id is held already, or a card or its compute would be overcommitted.
        """
        self._add(entry_id, Entry(placement, State.ASSUMED, expires_at))

    def confirm(self, entry_id: str) -> None:
        """The placement is real now and does not expire. Raises Conflict if it is not assumed."""
        entry = self._entries.get(entry_id)
        if entry is None or entry.state is not State.ASSUMED:
            raise Conflict(f"{entry_id} is not assumed")
        self._entries[entry_id] = replace(entry, state=State.CONFIRMED, expires_at=None)

    def adopt(self, entry_id: str, placement: Placement, expires_at: float | None = None) -> None:
        """Take over what a former ledger recorded: assumed if it expires, else confirmed.

        Raises Conflict as `assume` does.
        """
        state = State.CONFIRMED if expires_at is None else State.ASSUMED
        self._add(entry_id, Entry(placement, state, expires_at))

    def release(self, entry_id: str) -> None:
        """The placement holds no longer. Raises Conflict for an unknown id."""
        entry = self._entries.pop(entry_id, None)
        if entry is None:
            raise Conflict(f"{entry_id} holds nothing")
        self._tally.remove(entry.placement)

    def expire(self, now: float) -> list[str]:
        """Release the assumptions whose time is over; their ids."""
        over = [
            entry_id
            for entry_id, entry in self._entries.items()
            if entry.expires_at is not None and entry.expires_at <= now
        ]
        for entry_id in over:
            self.release(entry_id)
        return over

    def _add(self, entry_id: str, entry: Entry) -> None:
        if entry_id in self._entries:
            raise Conflict(f"{entry_id} holds a placement already")
        for piece in entry.placement.slices:
            self._check(entry.placement, piece)
        self._entries[entry_id] = entry
        self._tally.add(entry.placement)

    def _check(self, placement: Placement, piece: Slice) -> None:
        card = self._cards.get((placement.node, piece.card))
        if card is None or card.uuid != piece.uuid:
            raise Conflict(f"there is no card {piece.card} ({piece.uuid}) on {placement.node}")
        used = self.used(placement.node, piece.card)
        over = (
            used.memory_mib + piece.memory_mib > card.memory_mib
            or used.compute + piece.compute > card.compute
            or used.whole
            or (placement.whole and used.holders > 0)
        )
        if over:
            raise Conflict(f"card {piece.card} of {placement.node} has no room for this slice")
