"""Of the cards of a machine one program owns each: a workstation's daemon, or the node's agent.

The lock's name (hardware/card_lock.py) belongs to a network, and a pod has one of its own: the sockets are
made in the network of the machine's first process.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from fenka.core.cards import Card
from fenka.hardware.card_lock import CardLocked, Owner, acquire

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


def _lock(card: Card) -> contextlib.ExitStack:
    try:
        return acquire(card)
    except CardLocked as it:
        raise CardTaken(
            f"{it} is owned by {_named(it.owner)}: stop it with "
            f"`fenka daemon --stop`, or take the card from it with --only"
        ) from None


def _named(owner: Owner | None) -> str:
    if owner is None:
        return "another program of this machine"
    return f"process {owner.pid} of user {owner.uid}, fenka's daemon or another of its agents"


def _in_network(network: Path, make: Callable[[], contextlib.ExitStack]) -> contextlib.ExitStack:
    """A socket stays in the network in which it was made; only one thread, which ends, goes there."""
    made: list[contextlib.ExitStack] = []
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
