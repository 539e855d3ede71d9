"""Of the cards of a machine one program owns each: a workstation's daemon, or a cluster's node program.

The lock of a card is a listening Unix socket in the abstract namespace whose name holds the card's UUID: the
kernel frees it when its owner dies, and whoever finds it taken can ask the kernel who holds it. Anybody can
take such a name, so it binds ordinary users alone. Root's programs lock where only root can:

    /run/fenka/cards/UUID.lock    locked (flock) by the owner
    /run/fenka/cards/UUID         the owner listens here, so that ordinary users' daemons see it

Root's claim goes before an ordinary user's: a name that such a user holds keeps no root program away. A
daemon of that user finds root's claim before it gives anything away (:func:`taken`), and gives no more of
that card. Where root cannot write to /run, or is not the machine's root, the name alone decides.
"""

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fenka.core.cards import Card
from fenka.hardware.peer_credentials import peer

PLACE = Path("/run/fenka/cards")
"""Root's locks."""

_EVERY_USER = "0 0 4294967295"
"""What the kernel says of users where they have not been mapped to others."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a card."""

    pid: int
    uid: int


class CardLocked(Exception):
    """Another program owns the card. owner: None where the kernel does not say who."""

    def __init__(self, card: Card, owner: Owner | None) -> None:
        super().__init__(f"card {card.index} ({card.model}, {card.uuid})")
        self.owner = owner


def acquire(card: Card, over: Callable[[Owner], None] = lambda _: None) -> contextlib.ExitStack:
    """Own the card, in this thread's network, until the result is closed. Raises CardLocked.

    over: told of an ordinary user's process that holds the name of a card that root takes.
    """
    with contextlib.ExitStack() as held:
        if _is_root() and _made():
            _lock(card, held)
            try:
                held.enter_context(_listen(_name(card)))
            except OSError:
                owner = _listener(_name(card)).owner
                if owner and owner.uid == 0:  # One that does not see our /run.
                    raise CardLocked(card, owner) from None
                if owner:
                    over(owner)
            return held.pop_all()
        root = _listener(str(_socket(card)))
        if root.there:
            raise CardLocked(card, root.owner)
        try:
            held.enter_context(_listen(_name(card)))
        except OSError:
            raise CardLocked(card, _listener(_name(card)).owner) from None
        return held.pop_all()


def taken(card: Card) -> bool:
    """Whether a program of root's owns a card of which this ordinary user's daemon has the name."""
    return not _is_root() and _listener(str(_socket(card))).there


def _name(card: Card) -> str:
    return f"\0fenka/card/{card.uuid}"


def _socket(card: Card) -> Path:
    return PLACE / card.uuid.replace("/", "_")


def _is_root() -> bool:
    """Whether this is the machine's root, not that of a user namespace."""
    users = " ".join(Path("/proc/self/uid_map").read_text().split())
    return os.geteuid() == 0 and users == _EVERY_USER


def _made() -> bool:
    """Whether root's locks have a place that is root's alone."""
    others = stat.S_IWGRP | stat.S_IWOTH
    for directory in (PLACE.parent, PLACE):
        try:
            directory.mkdir(mode=0o755, exist_ok=True)
            found = directory.lstat()
        except OSError:
            return False
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & others:
            return False
    return True


def _lock(card: Card, held: contextlib.ExitStack) -> None:
    """Lock as root, and let others see it. Raises CardLocked."""
    path = _socket(card).with_name(f"{_socket(card).name}.lock")
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        held.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 20).decode()
            raise CardLocked(card, Owner(int(holder), 0) if holder.isdecimal() else None) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                break
        # Its owner removed it just now, and somebody else may lock another of that name.
    held.callback(path.unlink, missing_ok=True)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    _socket(card).unlink(missing_ok=True)
    held.callback(_socket(card).unlink, missing_ok=True)
    held.enter_context(_listen(str(_socket(card))))
    _socket(card).chmod(0o666)


def _listen(address: str) -> socket.socket:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(address)
    except OSError:
        lock.close()
        raise
    lock.listen(128)
    return lock


@dataclass(frozen=True, slots=True)
class _Listener:
    there: bool
    owner: Owner | None = None


def _listener(address: str) -> _Listener:
    """Who listens there. One that lets nobody in any more is there all the same, and keeps nobody waiting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
        question.setblocking(False)
        try:
            question.connect(address)
            pid, uid, _ = peer(question)
        except BlockingIOError:
            return _Listener(there=True)
        except OSError:
            return _Listener(there=False)
    return _Listener(there=True, owner=Owner(pid, uid))
