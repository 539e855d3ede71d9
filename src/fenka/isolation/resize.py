"""Changing what a lease may have while its programs run.

The control page alone says what is in force; this module refuses what would leave programs with more than
they may have. Called by whoever owns the lease's files. A program may allocate while we look, so the look
is repeated once the new limits are in force: from then on nobody can take more than they allow.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.isolation import account, control
from fenka.isolation.account import AccountSlot
from fenka.isolation.control import Control, Limit
from fenka.isolation.layout import constant

__all__ = ["InUse", "check", "resize"]

_MIB = 1 << 20
_FIRST_NAMESPACE = 0xEFFFFFFC
"""The kernel's number for the machine's first PID namespace."""


class InUse(FenkaError):
    """Programs hold more than they are to be left with; the message is one sentence for the user."""


def resize(page: Path, slots: Path, limits: tuple[Limit, ...]) -> Control:
    """Puts the limits in force for running programs, from their next allocation on; what is then in force.

    page: the lease's control page. slots: its account. limits: the same cards in the same order.
    Raises InUse, and then the former limits hold; InvalidControl, InvalidAccount; OSError.
    """
    before = control.read_interrupted(page)
    check(slots, before.limits, limits)
    after = control.update(page, Control(before.lease, limits))
    try:
        check(slots, before.limits, limits)
    except InUse:
        control.update(page, before)
        raise
    return after


def check(slots: Path, before: Iterable[Limit], wanted: Iterable[Limit]) -> None:
    """Raises InUse where programs hold more than is wanted now; InvalidAccount, OSError."""
    said = account.read(slots)
    there = _Processes()
    held = account.total_memory([there.left_of(p) for p in said.processes], said.released_bytes)
    for old, new, used in zip(before, wanted, held, strict=False):
        if new.memory_bytes < old.memory_bytes and new.memory_bytes < used:
            raise InUse(
                f"{new.uuid} cannot shrink to {new.memory_bytes // _MIB} MiB: the lease's programs hold "
                f"{-(-used // _MIB)} MiB of it; end some of them, or leave it at least that much"
            )


class _Processes:
    """Which processes run, as far as we see: of our own PID namespace, and of those below it."""

    def __init__(self) -> None:
        self._own = Path("/proc/self/ns/pid").stat().st_ino
        self._time = _inode("/proc/self/ns/time")
        self._below: dict[int, set[tuple[int, int]] | None] = {}

    def left_of(self, process: AccountSlot) -> AccountSlot:
        """The process; of one that is gone, what others may hold of it still."""
        if not process.orphaned and not self.gone(process):
            return process
        return replace(process, memory_bytes=(), imported_bytes=(), orphaned=True)

    def gone(self, process: AccountSlot) -> bool:
        """Whether the slot was left by a process that surely runs no more; one of its kind would take it
        over."""
        if process.namespace == self._own:
            start = _start_time(process.pid)
            if start is None:
                return not _hidden()
            same_time = process.time_namespace in (0, self._time)  # else it reads other start times
            return same_time and start != process.start_time
        if not process.namespace:  # unknown
            return False
        if process.namespace not in self._below:
            self._below[process.namespace] = _members(process.namespace, self._own)
        members = self._below[process.namespace]
        if process.time_namespace not in (0, self._time):
            return members is not None and process.pid not in {pid for pid, _ in members}
        return members is not None and (process.pid, process.start_time) not in members


def _inode(path: str) -> int:
    """0 where the kernel has no such namespaces."""
    try:
        return Path(path).stat().st_ino
    except FileNotFoundError:
        return 0


def _start_time(pid: int | str) -> int | None:
    """As accounts have it; -1 of one that is dead and not buried, None of one that is not there."""
    start = procfs.start_ticks(pid)
    if start is None:
        return -1 if Path(f"/proc/{pid}").exists() else None
    return start & (1 << 64 - constant("FENKA_IDENTITY_START")) - 1


def _members(namespace: int, own: int) -> set[tuple[int, int]] | None:
    """Those of another namespace, by their number there and their start; None where we may not see all.

    Who sees one process of a namespace sees all of them, and the machine's first namespace sees everybody.
    """
    found: set[tuple[int, int]] = set()
    seen = own == _FIRST_NAMESPACE
    for name in filter(str.isdecimal, os.listdir("/proc")):
        start = _start_time(name)
        if start in (None, -1):
            continue
        try:
            numbers = procfs.namespace_pids(name)
            # One number alone is one of our own namespace.
            if len(numbers) == 1 or Path(f"/proc/{name}/ns/pid").stat().st_ino != namespace:
                continue
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            return None
        found.add((numbers[-1], start or 0))
        seen = True
    return found if seen else None


def _hidden() -> bool:
    """Whether /proc may keep other users' processes from us (hidepid), so that absence says nothing."""
    return os.geteuid() != 0 and not Path("/proc/1/stat").exists()
