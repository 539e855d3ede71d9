"""Of the cards of a machine one program owns each: a workstation's daemon, or the node's agent.

The lock is the workstation's: a listening Unix socket in the abstract namespace whose name holds the card's
UUID. Such names belong to a network, and a pod has one of its own: the sockets are made in the network
of the machine's first process.
"""

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from fenka.core.cards import Card

_NEW_NETWORK = 0x40000000


class CardTaken(Exception):
    """Another program owns the card; one sentence that says who."""


def hold_cards(cards: Iterable[Card], proc: Path = Path("/proc")) -> contextlib.ExitStack:
    """Own these cards until the result is closed. Raises CardTaken."""
    network = proc / "1/ns/net"
    held = contextlib.ExitStack()
    with contextlib.ExitStack() as undo:
        undo.enter_context(held)
        for card in cards:
            held.enter_context(_in_network(network, lambda card=card: _lock(card)))  # type: ignore[misc]
        undo.pop_all()
    return held


def _lock(card: Card) -> socket.socket:
    name = f"\0fenka/card/{card.uuid}"
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
    except OSError:
        lock.close()
        raise CardTaken(
            f"card {card.index} ({card.model}, {card.uuid}) is owned by {_owner(name)}: stop it with "
            f"`fenka daemon --stop`, or take the card from it with --only"
        ) from None
    lock.listen(8)
    return lock


def _owner(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
        try:
            question.connect(name)
            credentials = question.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return "another program of this machine"
    pid = int.from_bytes(credentials[:4], "little")
    uid = int.from_bytes(credentials[4:8], "little")
    return f"process {pid} of user {uid}, fenka's daemon or another of its agents"


def _in_network(network: Path, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket stays in the network in which it was made; only one thread, which ends, goes there."""
    made: list[socket.socket] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            _enter(network)
            made.append(make())
        except (OSError, CardTaken) as why:
            failed.append(why)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _enter(network: Path) -> None:
    """For this thread alone. Where that is not allowed the machine's network is not another's: stay."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(network, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(network))
        finally:
            os.close(descriptor)
