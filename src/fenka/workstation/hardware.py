"""The cards of this machine, of which one daemon owns each.

The lock of a card is a listening Unix socket in the abstract namespace whose name holds the card's UUID: the
kernel frees it when its owner dies, and whoever finds it taken can ask the kernel who holds it.
"""

import contextlib
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from fenka.core.cards import Card
from fenka.hardware.context import context_mib
from fenka.hardware.nvml import Driver, DriverLost, Reading
from fenka.workstation.peers import peer, user_name


class CardTaken(Exception):
    """Another daemon owns the card; the message says which process of whom."""


class Hardware:
    """The driver of this machine, opened again when it was lost."""

    def __init__(
        self, first: Callable[[], Driver], again: Callable[[], Driver] | None = None
    ) -> None:
        self._again = again or first
        self.driver = first()
        self.context_mib: dict[str, int] = {}
        """What a process's context takes, by card UUID; a card whose driver does not tell is not in it."""

    def measure(self, cards: Iterable[Card], library_dir: Path | None) -> None:
        """Find out what contexts take, once a model. Raises NoDriver."""
        by_model: dict[str, int | None] = {}
        for card in cards:
            if card.model not in by_model:
                by_model[card.model] = context_mib(self.driver, card, library_dir)
            taken = by_model[card.model]
            if taken is not None:
                self.context_mib[card.uuid] = taken

    def readings(self) -> dict[str, Reading]:
        """What each card does now, by UUID. Raises NoDriver."""
        try:
            readings = self.driver.readings()
        except DriverLost:
            self.driver.close()
            self.driver = self._again()
            readings = self.driver.readings()
        return {reading.uuid: reading for reading in readings}

    def close(self) -> None:
        """Give the driver back."""
        self.driver.close()


def lock_cards(cards: Iterable[Card]) -> contextlib.ExitStack:
    """Own these cards until the result is closed. Raises CardTaken."""
    with contextlib.ExitStack() as held:
        for card in cards:
            held.enter_context(_lock(card))
        return held.pop_all()


def _lock(card: Card) -> socket.socket:
    name = f"\0fenka/card/{card.uuid}"
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
    except OSError:
        lock.close()
        raise CardTaken(
            f"card {card.index} ({card.model}, {card.uuid}) is owned by {_owner(name)}: use that "
            "daemon, stop it with `fenka daemon --stop`, or leave the card out with --only"
        ) from None
    lock.listen(8)
    return lock


def _owner(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
        try:
            question.connect(name)
        except OSError:
            return "another daemon"
        pid, uid, _ = peer(question)
    return f"the daemon of {user_name(uid)} (process {pid})"
