"""Changing what a lease may have while its programs run.

The control page alone says what is in force; this module refuses what would leave programs with more than
they may have. Called by whoever owns the lease's files. A program may allocate while we look, so the look
is repeated once the new limits are in force: from then on nobody can take more than they allow.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from fenka.isolation import account, control
from fenka.isolation.account import Process
from fenka.isolation.control import Control, Limit
from fenka.isolation.layout import constant

__all__ = ["InUse", "check", "resize"]

_MIB = 1 << 20
_STATE, _START_TIME = 0, 19
"""Fields of ``/proc/PID/stat`` behind the name."""


class InUse(Exception):
    """Programs hold more than they are to be left with; the message is one sentence for the user."""


def resize(page: Path, slots: Path, limits: tuple[Limit, ...]) -> Control:
    """Puts the limits in force for running programs, from their next allocation on; what is then in force.

    page: the lease's control page. slots: its account. limits: the same cards in the same order.
    Raises InUse, and then the former limits hold; BadControl, BadAccount; OSError.
    """
    before = control.current(page)
    check(slots, before.limits, limits)
    after = control.update(page, Control(before.lease, limits))
    try:
        check(slots, before.limits, limits)
    except InUse:
        control.update(page, before)
        raise
    return after


def check(slots: Path, before: Iterable[Limit], wanted: Iterable[Limit]) -> None:
    """Raises InUse where programs hold more than is wanted now; BadAccount, OSError."""
    said = account.read(slots)
    held = account.held_by([p for p in said.processes if not _gone(p)])
    for old, new, used in zip(before, wanted, held, strict=False):
        if new.memory_bytes < old.memory_bytes and new.memory_bytes < used:
            raise InUse(
                f"{new.uuid} cannot shrink to {new.memory_bytes // _MIB} MiB: the lease's programs hold "
                f"{-(-used // _MIB)} MiB of it; end some of them, or leave it at least that much"
            )


def _gone(process: Process) -> bool:
    """Whether the slot was left by a process that surely runs no more; one of its kind would take it over."""
    if process.namespace != Path("/proc/self/ns/pid").stat().st_ino:
        return False
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return not _hidden()
    low_bits = (1 << 64 - constant("FENKA_IDENTITY_START")) - 1
    return int(fields[_START_TIME]) & low_bits != process.start_time or fields[_STATE] in "ZX"


def _hidden() -> bool:
    """Whether /proc may keep other users' processes from us (hidepid), so that absence says nothing."""
    return os.geteuid() != 0 and not Path("/proc/1/stat").exists()
