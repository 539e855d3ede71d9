"""The account: how much device memory each process of a lease reports to hold.

Programs write it, so nothing in it is trusted, and impossible values count as zero. It is read by ``pread``,
because a program may truncate the file, and reading a truncated mapping would kill the reader.
"""

import fcntl
import os
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.isolation.lease_control import constant, layout

MAX_PLAUSIBLE_BYTES = 1 << 50
"""No card has a pebibyte of memory. A process that reports more is counted as holding nothing."""


_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit systems


INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the machine's initial PID namespace, whose processes see all others."""


class InvalidAccount(FenkaError):
    """The file is not an account."""


@dataclass(frozen=True, slots=True)
class AccountSlot:
    """The content of one slot."""

    pid: int
    """In the PID namespace `namespace`."""
    start_time: int
    """Low 32 bits of the clock ticks after boot, as read in the process's time namespace."""
    namespace: int
    """Inode of the process's PID namespace; 0 = unknown."""
    memory_bytes: tuple[int, ...]
    """Held memory by the card's number in the lease."""
    exported_bytes: tuple[int, ...] = ()
    """The part of memory_bytes that other processes may hold, too."""
    imported_bytes: tuple[int, ...] = ()
    """Memory in other processes' blocks, not included in memory_bytes."""
    time_namespace: int = 0
    """Inode; 0 if unknown, or if the kernel has no time namespaces."""
    orphaned: bool = False
    """The process has ended, and others may still hold what it exported."""
    locked: bool = False
    """The process, or a child that inherited its descriptors, has the driver open."""


@dataclass(frozen=True, slots=True)
class Account:
    """The usage that all processes of a lease report."""

    processes: tuple[AccountSlot, ...]
    charged_ns: tuple[int, ...] = ()
    """Time of each card that the lease has used so far, as its programs estimate it. Only if compute is
    limited."""
    released_bytes: tuple[int, ...] = ()
    """Memory of each card that its exporters have freed, but importers still hold."""
    peak_bytes: tuple[int, ...] = ()
    """Of each card the most that was held at a time."""
    refused: int = 0
    """How often memory was refused because it did not fit."""
    throttled_ns: tuple[int, ...] = ()
    """Of each card the time that threads have waited in launches so far because of the compute limit, all
    added up. Programs that were started by release 0.1.0 count neither this nor the next."""
    out_of_memory: tuple[int, ...] = ()
    """`refused` by card."""

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Totals by the card's number in the lease."""
        return total_memory(self.processes, self.released_bytes)

    def counts(self, card: int) -> tuple[float, int] | tuple[None, None]:
        """Return the seconds of throttling and the refused requests of a card; None if it was not readable.

        card: Its number in the lease.
        """
        if card >= min(len(self.throttled_ns), len(self.out_of_memory)):
            return None, None
        return self.throttled_ns[card] / 1e9, self.out_of_memory[card]


def total_memory(
    processes: Collection[AccountSlot], released: Collection[int] = ()
) -> tuple[int, ...]:
    """Return what processes hold together, by the card's number. lease.h defines the rule for shared memory.

    released: freed by its exporters but still imported, by card.
    """
    none = (0,) * constant("FENKA_MAX_CARDS")
    orphans = [process.orphaned for process in processes]

    def on(card: int, given_up: int) -> int:
        held, exported, imported = (
            [(getattr(process, field) or none)[card] for process in processes]
            for field in ("memory_bytes", "exported_bytes", "imported_bytes")
        )
        ownerless = given_up + sum(
            size for size, orphan in zip(exported, orphans, strict=True) if orphan
        )
        shared = given_up + sum(exported)
        return sum(held) + ownerless + sum(max(0, size - shared) for size in imported)

    return tuple(on(card, given_up) for card, given_up in enumerate(released or none))


def size() -> int:
    """Return the size of the file."""
    return int(layout().sizeof("struct fenka_account"))


def _header() -> bytes:
    return struct.pack(
        "<QII",
        constant("FENKA_ACCOUNT_MAGIC"),
        constant("FENKA_ACCOUNT_VERSION"),
        constant("FENKA_MAX_SLOTS"),
    )


def create(path: Path, owner: int | None = None) -> None:
    """Create an empty account. Raises FileExistsError if the file exists.

    Args:
        path: The file. The directories above it decide who may reach it.
        owner: The only user who may write it. None for every user who reaches it, because programs of a
            container or of a root's lease may run as any user.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, size())
        os.pwrite(fd, _header(), 0)
        if procfs.namespace_inode("self", "pid") != INITIAL_PID_NAMESPACE:
            os.pwrite(fd, struct.pack("<Q", 1), offset("nested_agent"))
        if owner is None:
            os.fchmod(fd, 0o666)
        elif owner != os.geteuid():
            os.fchown(fd, owner, -1)
    finally:
        os.close(fd)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open an account and return its descriptor. Raises InvalidAccount, OSError.

    Programs may replace the file by a pipe, a link or a device. They may also take an fcntl lease on it, for
    which opening without O_NONBLOCK would wait.
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
    """Return the offset of a field of the account."""
    return int(layout().offsetof("struct fenka_account", field))


def words(fd: int, field: str, row: int = 0) -> tuple[int, ...]:
    """Return one row of 64-bit words. Words beyond a truncated file's end are zero."""
    ffi = layout()
    kind = dict(ffi.typeof("struct fenka_account").fields)[field].type
    if kind.kind == "array" and kind.item.kind == "array":
        kind = kind.item
    length = kind.length if kind.kind == "array" else 1
    data = os.pread(fd, 8 * length, offset(field) + 8 * length * row).ljust(8 * length, b"\0")
    return struct.unpack(f"<{length}Q", data)


def lock_byte(identity: int) -> int:
    """Return the byte of an account that is locked while the owner's memory exists (lease.h)."""
    namespace = identity >> constant("FENKA_IDENTITY_NAMESPACE") & 0xFF
    return (
        identity >> constant("FENKA_IDENTITY_START") << constant("FENKA_OWNER_LOCK_START")
        | namespace << constant("FENKA_OWNER_LOCK_NAMESPACE")
        | identity & (1 << constant("FENKA_IDENTITY_RECLAIMING")) - 1
    )


def _is_locked(fd: int, identity: int) -> bool:
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, lock_byte(identity), 1, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, query))[0]
    return kind != fcntl.F_UNLCK


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
            continue  # free, or freed during this call
        if identity >> pid_bits & 1:
            continue  # the owner has ended, and its memory is being subtracted from the sum
        pid = identity & (1 << pid_bits) - 1
        index = identity >> namespace & (1 << orphaned - namespace) - 1
        ended = states[index] == constant("FENKA_NAMESPACE_ENDED")
        locked = _is_locked(fd, identity)
        if ended and not locked and not any(held[1]):
            continue  # ended, too: the next process that needs the memory empties the slot
        slot, given, taken = (
            tuple(0 if b >= MAX_PLAUSIBLE_BYTES else b for b in row)
            for row in (held if locked or not ended else (none, held[1], none))
        )
        inodes = namespaces[index] if index < constant("FENKA_MAX_NAMESPACES") else 0
        yield AccountSlot(
            pid,
            identity >> start,
            inodes & 0xFFFFFFFF,
            slot,
            given if any(given) else (),
            taken if any(taken) else (),
            inodes >> 32,
            bool((ended and not locked) or identity >> orphaned & 1),
            locked,
        )


def _budgets(fd: int) -> Any:
    """Return the cards' `struct fenka_compute_budget`."""
    ffi = layout()
    spending = dict(ffi.typeof("struct fenka_account").fields)["compute_budgets"]
    size = ffi.sizeof(spending.type)
    data = os.pread(fd, size, spending.offset).ljust(size, b"\0")
    return ffi.from_buffer(spending.type, data)


def read(path: Path) -> Account:
    """Read an account. Raises InvalidAccount, OSError."""
    fd = open_file(path)
    try:
        released, budgets = words(fd, "released"), _budgets(fd)
        (refused,) = words(fd, "refused")
        return Account(
            tuple(_processes(fd)),
            tuple(card.charged for card in budgets),
            _plausible(released) if any(released) else (),
            _plausible(words(fd, "peak")),
            refused,
            tuple(card.throttled_ns for card in budgets),
            tuple(card.out_of_memory for card in budgets),
        )
    finally:
        os.close(fd)


def refused(path: Path) -> int:
    """Return how often memory was refused. Raises InvalidAccount, OSError."""
    fd = open_file(path)
    try:
        return words(fd, "refused")[0]
    finally:
        os.close(fd)


def _plausible(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(0 if size >= MAX_PLAUSIBLE_BYTES else size for size in sizes)
