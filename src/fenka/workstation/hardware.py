"""Of the cards of this machine one daemon owns each.

The lock of a card is a listening Unix socket in the abstract namespace whose name holds the card's UUID: the
kernel frees it when its owner dies, and whoever finds it taken can ask the kernel who holds it.
"""

import contextlib
import socket
from collections.abc import Iterable

from fenka.core.cards import Card
from fenka.workstation.peers import peer, user_name


class CardTaken(Exception):
    """Another daemon owns the card; the message says which process of whom."""


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
