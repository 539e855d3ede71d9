"""The health of the node's cards: what the driver shows, and the errors that it has reported."""

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
from fenka.isolation.files import decode_json, write_atomically

_LOG = logging.getLogger(__name__)

APPLICATION_XIDS: Mapping[int, str] = {
    13: "a program's kernel failed",
    31: "a program accessed memory that is not its own",
    43: "a program's channel was stopped",
    45: "channels were cleaned up after an earlier error",
    68: "a program's video decoding failed",
    69: "a program's kernel was refused",
    94: "a memory error was contained: only the program that hit it ends",
    109: "switching between programs took too long",
}
"""Errors of a program, or that concern only one program: the card is not affected."""

INFO_XIDS: Mapping[int, str] = {
    63: "a row of memory will be replaced at the next reset",
    92: "many corrected memory errors",
}
"""Logged; the card stays usable."""

LOST_XID = 79


def is_fatal_xid(xid: int) -> bool:
    """Return whether a card that reports this XID is unusable: every XID not known to be harmless."""
    return xid not in APPLICATION_XIDS and xid not in INFO_XIDS


class CardHealth:
    """The cards that the driver shows, and those that the node is known to have had.

    A lost card stays known, and may return.
    """

    def __init__(
        self,
        hardware: Hardware,
        record: Path | None = None,
        on_return: Callable[[Sequence[Card]], None] = lambda _: None,
    ) -> None:
        """Read the cards.

        Args:
            hardware: The machine's driver.
            record: File of reported errors, for the next process. A reboot must empty its directory, since
                that resets every card.
            on_return: Called with lost cards that have returned. It may raise NoDriver.
        """
        self._hardware, self._record, self._on_return = hardware, record, on_return
        self._cards = hardware.driver.cards()
        self._errors = _read(record)
        """Reported errors by UUID."""
        self._recording = threading.Lock()
        self._lost: set[str] = set()
        self.readings: dict[str, Reading] = {}
        """By UUID, as of the last refresh."""
        self._driver_error: str | None = None

    @property
    def known(self) -> tuple[Card, ...]:
        """All cards as the driver described them when it last showed them."""
        return self._cards

    def cards(self, cordoned: Collection[int]) -> tuple[Card, ...]:
        """Return the cards with their health as of the last refresh. cordoned: indexes."""
        return tuple(
            replace(card, healthy=self.error(card.uuid) is None, cordoned=card.index in cordoned)
            for card in self._cards
        )

    def error(self, uuid: str) -> str | None:
        """Return why the card is unhealthy; None if it is healthy."""
        if uuid in self._lost:
            return self._driver_error or "it has fallen off the bus"
        return self._errors.get(uuid)

    def restore(self, published: Iterable[Card]) -> None:
        """Add the cards that the node published before. Those that the driver does not show are lost.

        Cards keep their published indexes, because pods' records use them, and a driver that starts with a
        card less counts the others differently. A new card at a lost card's index has replaced it.
        """
        former = {card.uuid: card for card in published}
        shown = {card.uuid for card in self._cards}
        lost = [card for card in former.values() if card.uuid not in shown]
        if not lost:
            return
        cards = [
            replace(card, index=former[card.uuid].index)
            for card in self._cards
            if card.uuid in former
        ]
        used = {card.index for card in cards}
        for card in self._cards:
            if card.uuid not in former:
                index = card.index if card.index not in used else _first_free(used)
                used.add(index)
                cards.append(replace(card, index=index))
        lost = [card for card in lost if card.index not in used]
        self._lost |= {card.uuid for card in lost}
        self._cards = tuple(sorted((*cards, *lost), key=lambda card: card.index))

    def forget_lost(self) -> None:
        """Remove the lost cards: they were taken out of the machine."""
        self._cards = tuple(card for card in self._cards if card.uuid not in self._lost)
        self._lost.clear()

    def report_xid(self, uuid: str | None, xid: int, instance: str = "") -> None:
        """Record an XID that the driver reports. Without a UUID it concerns all cards.

        instance: the key of the MIG instance that it concerns alone. It begins with its card's UUID.
        """
        if is_fatal_xid(xid):
            affected: list[str] = [card.uuid for card in self._cards if uuid in (None, card.uuid)]
            keys = [instance] if instance else affected
            self._update(lambda errors: {**errors, **dict.fromkeys(keys, f"XID {xid}")})

    def instance_error(self, key: str) -> str | None:
        """Return why a MIG instance is unhealthy; None if it is healthy."""
        return self._errors.get(key)

    def reset(self, indexes: Collection[int]) -> None:
        """Clear the errors of cards that a user has reset, and of their instances."""
        reset = {card.uuid for card in self._cards if card.index in indexes}
        self._update(
            lambda errors: _without(
                errors, [key for key in errors if key.partition("/")[0] in reset]
            )
        )

    def refresh(self) -> None:
        """Read the cards. Takes as long as the driver takes."""
        try:
            self.readings, self._driver_error = self._hardware.readings(), None
        except NoDriver as error:
            self.readings, self._driver_error = {}, str(error)
        lost: set[str] = {card.uuid for card in self._cards if card.uuid not in self.readings}
        # A lost card returns only by a reset.
        returned = self._lost - lost
        self._update(lambda errors: _without(errors, returned))
        if returned:
            with contextlib.suppress(NoDriver):
                self._on_return([card for card in self._cards if card.uuid in returned])
        self._lost = lost

    def _update(self, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        with self._recording:
            before, self._errors = self._errors, change(self._errors)
            if self._errors == before or self._record is None:
                return
            try:
                write_atomically(self._record, msgspec.json.encode(self._errors))
            except OSError as error:
                _LOG.error("reported errors will be forgotten at the next start: %s", error)


def _without(errors: Mapping[str, str], uuids: Collection[str]) -> dict[str, str]:
    return {uuid: error for uuid, error in errors.items() if uuid not in uuids}


def _first_free(used: Collection[int]) -> int:
    return next(index for index in range(len(used) + 1) if index not in used)


def _read(record: Path | None) -> dict[str, str]:
    """Return the recorded errors; none where the file is missing or invalid."""
    if record is None:
        return {}
    try:
        return decode_json(msgspec.json.Decoder(dict[str, str]), record.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
