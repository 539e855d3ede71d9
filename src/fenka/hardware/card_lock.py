"""Locks cards, so that each card of a machine has one owner: a workstation's daemon or a node program.

The lock of a card is a listening Unix socket in the abstract namespace, which the kernel frees and whose
owner it names. Root's lock is a file in /run/fenka/cards, and precedes a name that an ordinary user holds.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.core.inventory import Card
from fenka.hardware.peer_credentials import Peer, peer, user_name

MACHINE = Path("/proc/1/ns/net")
"""The machine's, for a program that sees its PIDs."""

_CLONE_NEWNET = 0x40000000

_Value = TypeVar("_Value")


def call_inside(network: Path, function: Callable[[], _Value]) -> _Value:
    """Call a function whose sockets belong to a network namespace, and return its result.

    A socket stays in the namespace in which it was made. Only a thread enters it, and then ends.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_enter, network).result()
        return thread.submit(function).result()


def _enter(network: Path) -> None:
    """Move this thread into a network namespace. Without the right to do so the thread stays: outside of a
    container its namespace is the machine's."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(network, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(network))
        finally:
            os.close(descriptor)


LOCKS = Path("/run/fenka/cards")
"""Directory of root's locks."""


class CardLocked(FenkaError):
    """Another program owns the card. `owner` is None where the kernel does not name it."""

    def __init__(self, card: Card, owner: Peer | None) -> None:
        holder = (
            f"process {owner.pid} of user {user_name(owner.uid)}"
            if owner
            else "another program of this machine"
        )
        super().__init__(
            f"card {card.index} ({card.model}, {card.uuid}) is owned by {holder}: stop that program "
            f"(a daemon with `fenka daemon --stop`), or exclude the card from a daemon with --only"
        )
        self.owner = owner


def acquire(
    cards: Iterable[Card],
    on_displaced: Callable[[Card, Peer], None] = lambda _card, _owner: None,
    network: Path | None = None,
) -> contextlib.ExitStack:
    """Lock the cards until the result is closed: all of them, or none.

    Programs that run as root lock where only root can write:

        /run/fenka/cards/UUID.lock    locked (flock) by the owner
        /run/fenka/cards/UUID         a socket of the owner's, so that ordinary users' daemons see it

    Where root cannot write to /run, or is not the machine's root, the name alone decides. Names belong to a
    network namespace.

    Args:
        cards: The cards to lock.
        on_displaced: Called when root locks a card whose name an ordinary user's process holds.
        network: Network namespace in which the names are taken; by default the caller's.

    Raises:
        CardLocked: Another program owns one of the cards.
    """

    def lock_all() -> contextlib.ExitStack:
        with contextlib.ExitStack() as locks:
            for card in cards:
                _acquire(card, locks, on_displaced)
            return locks.pop_all()

    return lock_all() if network is None else call_inside(network, lock_all)


def locked_by_root(card: Card) -> bool:
    """Return whether root has locked a card whose name this ordinary user's daemon holds."""
    return not _is_root() and _listener(str(_socket_path(card))).exists


def _acquire(
    card: Card, locks: contextlib.ExitStack, on_displaced: Callable[[Card, Peer], None]
) -> None:
    if _is_root() and _make_directory():
        _lock_as_root(card, locks)
        try:
            locks.enter_context(_listen(_name(card)))
        except OSError:
            owner = _listener(_name(card)).owner
            if owner and owner.uid == 0:  # A root program that does not see this /run.
                raise CardLocked(card, owner) from None
            if owner:
                on_displaced(card, owner)
        return
    root = _listener(str(_socket_path(card)))
    if root.exists:
        raise CardLocked(card, root.owner)
    try:
        locks.enter_context(_listen(_name(card)))
    except OSError:
        raise CardLocked(card, _listener(_name(card)).owner) from None


def _name(card: Card) -> str:
    return f"\0fenka/card/{card.uuid}"


def _socket_path(card: Card) -> Path:
    return LOCKS / card.uuid.replace("/", "_")


def _is_root() -> bool:
    """Return whether this process is the machine's root, not that of a user namespace."""
    return os.geteuid() == 0 and procfs.maps_all_users()


def _make_directory() -> bool:
    """Make the directory of root's locks. Return False where others could write to it."""
    others = stat.S_IWGRP | stat.S_IWOTH
    for directory in (LOCKS.parent, LOCKS):
        try:
            directory.mkdir(mode=0o755, exist_ok=True)
            status = directory.lstat()
        except OSError:
            return False
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0 or status.st_mode & others:
            return False
    return True


def _lock_as_root(card: Card, locks: contextlib.ExitStack) -> None:
    """Lock the file, and listen beside it so that ordinary users see the lock. Raises CardLocked."""
    path = _socket_path(card).with_name(f"{_socket_path(card).name}.lock")
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        locks.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 20).decode()
            raise CardLocked(card, Peer(int(holder), 0) if holder.isdecimal() else None) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                break
        # Its owner removed the file just now. Another process may already lock a new file of that name.
    locks.callback(path.unlink, missing_ok=True)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    _socket_path(card).unlink(missing_ok=True)
    locks.callback(_socket_path(card).unlink, missing_ok=True)
    locks.enter_context(_listen(str(_socket_path(card))))
    _socket_path(card).chmod(0o666)


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
    exists: bool
    owner: Peer | None = None


def _listener(address: str) -> _Listener:
    """Return the process that listens at an address. A full queue of connections counts as a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            owner = peer(probe)
        except BlockingIOError:
            return _Listener(exists=True)
        except OSError:
            return _Listener(exists=False)
    return _Listener(exists=True, owner=owner)
