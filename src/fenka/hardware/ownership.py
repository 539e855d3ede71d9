"""Of the cards of a machine one program owns each: a workstation's daemon, or a cluster's node program.

The lock of a card is a listening Unix socket in the abstract namespace whose name holds the card's UUID: the
kernel frees it when its owner dies, and whoever finds it taken can ask the kernel who holds it.
"""

import socket
from dataclasses import dataclass

from fenka.core.cards import Card
from fenka.hardware.peers import peer


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a card."""

    pid: int
    uid: int


class Owned(Exception):
    """Another program owns the card. owner: None where the kernel does not say who."""

    def __init__(self, card: Card, owner: Owner | None) -> None:
        super().__init__(f"card {card.index} ({card.model}, {card.uuid})")
        self.owner = owner


def own(card: Card) -> socket.socket:
    """Own the card, in this thread's network, until the result is closed. Raises Owned."""
    name = f"\0fenka/card/{card.uuid}"
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
    except OSError:
        lock.close()
        raise Owned(card, _owner(name)) from None
    lock.listen(8)
    return lock


def _owner(name: str) -> Owner | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
        try:
            question.connect(name)
            pid, uid, _ = peer(question)
        except OSError:
            return None
    return Owner(pid, uid)
