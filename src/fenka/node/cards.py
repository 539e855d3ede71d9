"""The node's cards and their health: what the driver shows, and what it has reported since."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from fenka.core.cards import Card
from fenka.hardware.machine import Hardware
from fenka.hardware.nvml import NoDriver, Reading

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

NOTES_XIDS: Mapping[int, str] = {
    63: "a row of memory will be replaced at the next reset",
    92: "many corrected memory errors",
}
"""Worth knowing, but the card goes on."""

LOST_XID = 79


def is_sick(xid: int) -> bool:
    """Whether a card that reports this is not to be used: every XID that is not known to be harmless."""
    return xid not in APPLICATION_XIDS and xid not in NOTES_XIDS


class Cards:
    """The cards that were there at the start. One that is lost stays known, and may come back."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._cards = hardware.driver.cards()
        self._sick: dict[str, str] = {}
        self._lost: set[str] = set()
        self.readings: dict[str, Reading] = {}
        """By UUID, as of the last refresh."""
        self.trouble: str | None = None
        """Why the driver says nothing; None while it does."""

    @property
    def known(self) -> tuple[Card, ...]:
        """All cards as the driver described them at the start."""
        return self._cards

    def report(self, uuid: str | None, xid: int) -> None:
        """The driver has reported an XID; without a UUID it is about all cards."""
        for card in self._cards:
            if uuid in (None, card.uuid) and is_sick(xid):
                self._sick[card.uuid] = f"XID {xid}"

    def refresh(self) -> None:
        """Look at the cards. Takes as long as the driver takes."""
        try:
            self.readings, self.trouble = self._hardware.readings(), None
        except NoDriver as why:
            self.readings, self.trouble = {}, str(why)
        for card in self._cards:
            if card.uuid not in self.readings:
                self._lost.add(card.uuid)
            elif card.uuid in self._lost:
                # It came back, which it does only by a reset: whatever it had reported is over.
                self._lost.discard(card.uuid)
                self._sick.pop(card.uuid, None)

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
