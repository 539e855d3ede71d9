"""The account: how much device memory each process of a lease says it holds.

Programs write it, so nothing in it is trusted: what cannot be true is marked, never believed into a
crash. It is read by ``pread``: a program may shorten the file, and reading a shortened mapping kills.
"""

import os
import stat
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fenka.core.errors import FenkaError
from fenka.isolation.layout import constant, layout

__all__ = [
    "Account",
    "AccountSlot",
    "InvalidAccount",
    "create",
    "offset",
    "open_file",
    "read",
    "size",
    "total_memory",
    "words",
]

MAX_PLAUSIBLE_BYTES = 1 << 50
"""No card has a pebibyte of memory; a process that says so is marked and counted as holding nothing."""


class InvalidAccount(FenkaError):
    """The file is not an account at all; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class AccountSlot:
    """What one slot says."""

    pid: int
    """In the PID namespace `namespace`."""
    start_time: int
    """Clock ticks after boot, the low 32 bits, as a process of the same time namespace reads it."""
    namespace: int
    """Inode of the process's PID namespace; 0 = unknown."""
    memory_bytes: tuple[int, ...]
    """Held, by number of the card in the lease."""
    suspect: bool = False
    """Holds what cannot be: an impossible number of bytes, or memory without an owner."""
    exported_bytes: tuple[int, ...] = ()
    """Of memory_bytes, what other processes may hold as well."""
    imported_bytes: tuple[int, ...] = ()
    """Held of blocks that another process made, on top of memory_bytes."""
    time_namespace: int = 0
    """Inode; 0 = unknown, or the kernel has none."""
    orphaned: bool = False
    """It is dead, and what it exported may still be held by others."""


@dataclass(frozen=True, slots=True)
class Account:
    """What all processes of a lease say they hold."""

    processes: tuple[AccountSlot, ...]
    charged_ns: tuple[int, ...] = ()
    """Of each card's time, as the programs estimate it: all that ever ran in the lease, where compute is
    limited."""
    released_bytes: tuple[int, ...] = ()
    """Of each card: given up by its makers, but held by processes that imported it."""

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Totals, by number of the card in the lease."""
        return total_memory(self.processes, self.released_bytes)

    @property
    def suspect(self) -> bool:
        """Whether any slot holds what cannot be."""
        return any(process.suspect for process in self.processes)


def total_memory(
    processes: Collection[AccountSlot], released: Collection[int] = ()
) -> tuple[int, ...]:
    """What they hold together, by number of the card; memory that they share as lease.h says.

    released: what the account says of each card, beside its processes.
    """
    none = (0,) * constant("FENKA_MAX_CARDS")
    orphans = [process.orphaned for process in processes]

    def on(card: int, given_up: int) -> int:
        held, exported, imported = (
            [(getattr(process, field) or none)[card] for process in processes]
            for field in ("memory_bytes", "exported_bytes", "imported_bytes")
        )
        left = given_up + sum(it for it, orphan in zip(exported, orphans, strict=True) if orphan)
        shared = given_up + sum(exported)
        return sum(held) + left + sum(max(0, it - shared) for it in imported)

    return tuple(on(card, it) for card, it in enumerate(released or none))


def size() -> int:
    """Bytes of the file."""
    return int(layout().sizeof("struct fenka_account"))


def _header() -> bytes:
    return struct.pack(
        "<QII",
        constant("FENKA_ACCOUNT_MAGIC"),
        constant("FENKA_ACCOUNT_VERSION"),
        constant("FENKA_MAX_SLOTS"),
    )


def create(path: Path, owner: int | None = None) -> None:
    """Make an empty account. Raises FileExistsError where there is a file already.

    Args:
        path: The file. Who may reach it is decided by the directories above it.
        owner: The only user who may write it. None: every user who reaches it, because a container's programs
            run as any user, and so do those that root starts in a lease.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, size())
        os.pwrite(fd, _header(), 0)
        if owner is None:
            os.fchmod(fd, 0o666)
        elif owner != os.geteuid():
            os.fchown(fd, owner, -1)
    finally:
        os.close(fd)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of an account. Raises InvalidAccount, OSError.

    Programs can write the file and may replace it by a pipe, a link or a device. They can also lock it with a
    lease of fcntl, which an opening without O_NONBLOCK would wait for.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    try:
        _check(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(fd: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise InvalidAccount(f"{path}: is not a regular file")
    if os.pread(fd, len(_header()), 0) != _header():
        raise InvalidAccount(f"{path}: does not begin as an account of this version does")


def offset(field: str) -> int:
    """Return where a field of the account begins."""
    return int(layout().offsetof("struct fenka_account", field))


def words(fd: int, field: str, row: int = 0) -> tuple[int, ...]:
    """Return one row of 64-bit words; what a program has cut off reads as zero."""
    ffi = layout()
    kind = dict(ffi.typeof("struct fenka_account").fields)[field].type
    if kind.kind == "array" and kind.item.kind == "array":
        kind = kind.item
    length = kind.length if kind.kind == "array" else 1
    data = os.pread(fd, 8 * length, offset(field) + 8 * length * row).ljust(8 * length, b"\0")
    return struct.unpack(f"<{length}Q", data)


def _processes(fd: int) -> Iterator[AccountSlot]:
    before = words(fd, "identity")
    cards = range(constant("FENKA_MAX_CARDS"))
    none = (0,) * len(cards)
    memory, exported, imported = (
        zip(*(words(fd, field, card) for card in cards), strict=True)
        for field in ("memory", "exported", "imported")
    )
    identities = words(fd, "identity")
    namespaces, states = words(fd, "pid_namespaces"), words(fd, "namespace_states")
    start = constant("FENKA_IDENTITY_START")
    namespace = constant("FENKA_IDENTITY_NAMESPACE")
    orphaned = constant("FENKA_IDENTITY_ORPHANED")
    pid_bits = constant("FENKA_IDENTITY_RECLAIMING")
    for earlier, identity, *held in zip(
        before, identities, memory, exported, imported, strict=True
    ):
        if not identity and (earlier or not any(map(any, held))):
            continue  # free, or given up while we read
        if identity >> pid_bits & 1:
            continue  # the owner is dead, and what it held is being taken out of the sum right now
        pid = identity & (1 << pid_bits) - 1
        index = identity >> namespace & (1 << orphaned - namespace) - 1
        ended = states[index] == constant("FENKA_NAMESPACE_ENDED")
        if ended and not any(held[1]):
            continue  # dead too: its slot is emptied by the next process that needs the memory
        impossible = max(map(max, held)) >= MAX_PLAUSIBLE_BYTES
        slot, given, taken = (
            tuple(0 if b >= MAX_PLAUSIBLE_BYTES else b for b in row)
            for row in (held if not ended else (none, held[1], none))
        )
        inodes = namespaces[index] if index < constant("FENKA_MAX_NAMESPACES") else 0
        yield AccountSlot(
            pid,
            identity >> start,
            inodes & 0xFFFFFFFF,
            slot,
            impossible or not pid,
            given if any(given) else (),
            taken if any(taken) else (),
            inodes >> 32,
            bool(ended or identity >> orphaned & 1),
        )


def _charged(fd: int) -> tuple[int, ...]:
    ffi = layout()
    spending = dict(ffi.typeof("struct fenka_account").fields)["compute_budgets"]
    size = ffi.sizeof(spending.type)
    data = os.pread(fd, size, spending.offset).ljust(size, b"\0")
    return tuple(card.charged for card in ffi.from_buffer(spending.type, data))


def read(path: Path) -> Account:
    """Return what the account says now. Raises InvalidAccount where the file is none, else OSError."""
    fd = open_file(path)
    try:
        released = words(fd, "released")
        return Account(
            tuple(_processes(fd)),
            _charged(fd),
            tuple(0 if it >= MAX_PLAUSIBLE_BYTES else it for it in released)
            if any(released)
            else (),
        )
    finally:
        os.close(fd)
