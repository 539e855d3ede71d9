"""The node's cards and their health: what the driver shows, and what it has reported since."""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from fenka.core.inventory import Card
from fenka.hardware.machine import Hardware
from fenka.hardware.nvml import NoDriver, Reading
from fenka.isolation.files import write_atomically

_LOG = logging.getLogger(__name__)

APPLICATION_XIDS: Mapping[int, str] = {
    13: "a program's kernel failed",
    31: "a program touched memory that is not its own",
    43: "a program's channel was stopped",
    45: "channels were cleaned up after an earlier error",
    68: "a program's video decoding failed",
    69: "a program's kernel was refused",
    94: "a memory error was contained: only the program that met it ends",
    109: "switching between programs took too long",
}
"""A program's own fault, or only its own trouble: the card is as good as before."""

INFO_XIDS: Mapping[int, str] = {
    63: "a row of memory will be replaced at the next reset",
    92: "many corrected memory errors",
}
"""Worth knowing, but the card goes on."""

LOST_XID = 79


def is_fatal_xid(xid: int) -> bool:
    """Whether a card that reports this is not to be used: every XID that is not known to be harmless."""
    return xid not in APPLICATION_XIDS and xid not in INFO_XIDS


class CardHealth:
    """The cards that were there at the start, and those that the node is known to have had before.

    One that is lost stays known, and may come back. notes: a file for what cards have reported, which this
    process's successor must know; in a place that a reboot empties, since that resets every card.
    returned: told of cards that are back. It may raise NoDriver.
    """

    def __init__(
        self,
        hardware: Hardware,
        notes: Path | None = None,
        returned: Callable[[Sequence[Card]], None] = lambda _: None,
    ) -> None:
        self._hardware, self._notes, self._returned = hardware, notes, returned
        self._cards = hardware.driver.cards()
        self._sick = _read(notes)
        self._noting = threading.Lock()
        self._lost: set[str] = set()
        self.readings: dict[str, Reading] = {}
        """By UUID, as of the last refresh."""
        self.trouble: str | None = None
        """Why the driver says nothing; None while it does."""

    @property
    def known(self) -> tuple[Card, ...]:
        """All cards as the driver described them when it last showed them."""
        return self._cards

    def remember(self, cards: Iterable[Card]) -> None:
        """The node had these: what the driver does not show of them is lost, and keeps its index.

        A driver that starts without one counts the others anew; pods' records go by the old index. Where a
        new card has taken the place of a lost one, that one was exchanged.
        """
        shown, had = {it.uuid for it in self._cards}, {it.uuid: it for it in cards}
        gone = [it for it in had.values() if it.uuid not in shown]
        if not gone:
            return
        kept = [replace(it, index=had[it.uuid].index) for it in self._cards if it.uuid in had]
        taken = {it.index for it in kept}
        for card in self._cards:
            if card.uuid not in had:
                index = card.index if card.index not in taken else _first_free(taken)
                taken.add(index)
                kept.append(replace(card, index=index))
        gone = [it for it in gone if it.index not in taken]
        self._lost |= {it.uuid for it in gone}
        self._cards = tuple(sorted((*kept, *gone), key=lambda it: it.index))

    def forget_lost(self) -> None:
        """CardHealth that are lost were taken out for good."""
        self._cards = tuple(it for it in self._cards if it.uuid not in self._lost)
        self._lost.clear()

    def report(self, uuid: str | None, xid: int) -> None:
        """The driver has reported an XID; without a UUID it is about all cards."""
        if is_fatal_xid(xid):
            found = [it.uuid for it in self._cards if uuid in (None, it.uuid)]
            self._note(lambda sick: {**sick, **dict.fromkeys(found, f"XID {xid}")})

    def reset(self, indexes: Collection[int]) -> None:
        """Somebody says that these were reset: whatever they had reported is over."""
        well = {it.uuid for it in self._cards if it.index in indexes}
        self._note(lambda sick: _without(sick, well))

    def refresh(self) -> None:
        """UsageSample at the cards. Takes as long as the driver takes."""
        try:
            self.readings, self.trouble = self._hardware.readings(), None
        except NoDriver as why:
            self.readings, self.trouble = {}, str(why)
        lost: set[str] = {it.uuid for it in self._cards if it.uuid not in self.readings}
        # One that came back does so only by a reset.
        back = self._lost - lost
        self._note(lambda sick: _without(sick, back))
        if back:
            with contextlib.suppress(NoDriver):
                self._returned([it for it in self._cards if it.uuid in back])
        self._lost = lost

    def now(self, cordoned: Collection[int]) -> tuple[Card, ...]:
        """The cards with their health as of the last refresh. cordoned: indexes."""
        return tuple(
            replace(card, healthy=self.why(card.uuid) is None, cordoned=card.index in cordoned)
            for card in self._cards
        )

    def why(self, uuid: str) -> str | None:
        """What is wrong with the card; None if nothing is."""
        if uuid in self._lost:
            return self.trouble or "it has fallen off the bus"
        return self._sick.get(uuid)

    def _note(self, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        with self._noting:
            before, self._sick = self._sick, change(self._sick)
            if self._sick == before or self._notes is None:
                return
            try:
                write_atomically(self._notes, msgspec.json.encode(self._sick))
            except OSError as why:
                _LOG.error("what cards have reported will be forgotten at the next start: %s", why)


def _without(sick: Mapping[str, str], well: Collection[str]) -> dict[str, str]:
    return {uuid: why for uuid, why in sick.items() if uuid not in well}


def _first_free(taken: Collection[int]) -> int:
    return next(index for index in range(len(taken) + 1) if index not in taken)


def _read(notes: Path | None) -> dict[str, str]:
    """What was written; nothing where it is not understood."""
    if notes is None:
        return {}
    try:
        return msgspec.json.decode(notes.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}
