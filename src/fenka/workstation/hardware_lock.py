"""One daemon owns a card on a machine.

The lock is a listening Unix socket in the abstract namespace whose name holds the card's UUID: the
kernel frees it when its owner dies, and whoever finds it taken can ask the kernel who holds it.
"""

import contextlib
import pwd
import socket
import struct
from collections.abc import Iterable

from fenka.core.cards import Card


class CardTaken(Exception):
    """Another daemon owns the card; the message says which process of whom."""


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """PID, user id and group id of the other end, from the kernel."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, gid = struct.unpack("3i", credentials)
    return pid, uid, gid


def user_name(uid: int) -> str:
    """The user's name, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


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
