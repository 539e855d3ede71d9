"""Changes the limits of a lease while its programs run, for the workstation's daemon and the node program."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.core.inventory import Node
from fenka.core.request import InvalidRequest, Memory, Slice
from fenka.core.units import MIB
from fenka.isolation import account, lease_control
from fenka.isolation.account import AccountSlot, InvalidAccount
from fenka.isolation.lease_control import Control, Limit, constant
from fenka.isolation.pid_namespaces import in_initial_namespace


class InUse(FenkaError):
    """Programs hold more than would be left. The message is one sentence for the user."""


def resize(page: Path, slots: Path, limits: tuple[Limit, ...]) -> Control:
    """Put limits in force for running programs, from their next allocation on, and return the page.

    A program may allocate during the check, which is therefore repeated: then none can take more.

    Args:
        page: The lease's control page.
        slots: Its account.
        limits: For the same cards in the same order.

    Raises:
        InUse: Programs hold more. The former limits are in force again.
        InvalidControl, InvalidAccount, OSError: A file cannot be read or written.
    """
    before = lease_control.read_interrupted(page)
    check(slots, before.limits, limits)
    after = lease_control.update(page, Control(before.lease, limits))
    try:
        check(slots, before.limits, limits)
    except InUse:
        lease_control.update(page, before)
        raise
    return after


def check(slots: Path, before: Iterable[Limit], after: Iterable[Limit]) -> None:
    """Check that programs hold no more of any card than is left. Raises InUse, InvalidAccount, OSError."""
    content, owners = account.read(slots), _SlotOwners()
    remaining = [owners.remaining(slot) for slot in content.processes]
    held = account.total_memory(remaining, content.released_bytes)
    for old, new, used in zip(before, after, held, strict=False):
        if new.memory_bytes < old.memory_bytes and new.memory_bytes < used:
            raise InUse(
                f"{new.uuid} cannot shrink to {new.memory_bytes // MIB} MiB: the lease's programs hold "
                f"{-(-used // MIB)} MiB of it; end some of them, or leave it at least that much"
            )


class _SlotOwners:
    """Finds the processes of slots: those of this PID namespace, and of those nested in it."""

    def __init__(self) -> None:
        self._own = procfs.namespace_inode("self", "pid")
        self._time = _time_namespace()
        self._nested: dict[int, set[tuple[int, int]] | None] = {}

    def remaining(self, slot: AccountSlot) -> AccountSlot:
        """Return the slot; of a process that has ended only what others may still hold of it."""
        if slot.locked or (not slot.orphaned and not self._has_ended(slot)):
            return slot
        return replace(slot, memory_bytes=(), imported_bytes=(), orphaned=True)

    def _has_ended(self, slot: AccountSlot) -> bool:
        """Return whether the process has certainly ended."""
        # In another time namespace a process reads other start times.
        same_time = slot.time_namespace in (0, self._time)
        if slot.namespace == self._own:
            start = _start_time(slot.pid)
            if start is None:
                return not _hides_processes()
            return same_time and start != slot.start_time
        if not slot.namespace:
            return False
        if slot.namespace not in self._nested:
            self._nested[slot.namespace] = _members(slot.namespace)
        members = self._nested[slot.namespace]
        if members is None:
            return False
        if same_time:
            return (slot.pid, slot.start_time) not in members
        return slot.pid not in {pid for pid, _ in members}


def _time_namespace() -> int:
    """Return the inode of this process's time namespace; 0 if the kernel has none."""
    try:
        return procfs.namespace_inode("self", "time")
    except FileNotFoundError:
        return 0


def _start_time(pid: int) -> int | None:
    """Return a start time as in accounts; -1 for a zombie, None if there is no process."""
    start = procfs.start_ticks(pid)
    if start is None:
        return -1 if (procfs.PROC / str(pid)).exists() else None
    return start & (1 << 64 - constant("FENKA_IDENTITY_START")) - 1


def _members(namespace: int) -> set[tuple[int, int]] | None:
    """Return PID and start time of each process in a nested namespace; None if not all are visible.

    All processes of a namespace are visible if one is. In the initial namespace all processes are.
    """
    members: set[tuple[int, int]] = set()
    for pid in procfs.pids():
        start = _start_time(pid)
        if start in (None, -1):
            continue
        try:
            numbers = procfs.namespace_pids(pid)
            # A process with one number is in this namespace itself.
            if len(numbers) > 1 and procfs.namespace_inode(pid, "pid") == namespace:
                members.add((numbers[-1], start or 0))
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            return None
    return members if members or in_initial_namespace() else None


def _hides_processes() -> bool:
    """Return whether /proc may hide other users' processes (hidepid), so that absence proves nothing."""
    return os.geteuid() != 0 and not (procfs.PROC / "1/stat").exists()


Sizes = Mapping[str, Sequence[Slice]]
"""Slices by lease, in the order of the lease's control page."""


@dataclass(frozen=True, slots=True)
class ResizePlan:
    """A resize of leases. before: the sizes that are in force.

    1. Record `reserved`.
    2. `enforce` the new sizes on the control pages.
    3. Record `after`; if step 2 was refused, record `before`.

    A process that is killed at any moment leaves records of at least what programs may use, and the same
    resize can be repeated to complete it.
    """

    before: Sizes
    after: Sizes

    @property
    def reserved(self) -> dict[str, list[Slice]]:
        """The larger of both sizes, which may be in use during the resize."""
        return {
            lease: [larger(*pair) for pair in zip(slices, self.after[lease], strict=True)]
            for lease, slices in self.before.items()
        }

    @property
    def grows(self) -> bool:
        """Whether any slice becomes larger, so that step 1 is needed."""
        return any([*slices] != [*self.before[lease]] for lease, slices in self.reserved.items())

    def enforce(self, apply: Callable[[str, Sequence[Slice]], object]) -> None:
        """Apply the new sizes lease by lease.

        Leases that shrink come first, because only these can be refused: what must be undone then has only
        shrunk, and there is room for it.

        Args:
            apply: Puts the slices of a lease in force.

        Raises:
            InUse, InvalidAccount: Raised by `apply`; the sizes before are in force again.
        """
        applied: list[str] = []
        try:
            for lease in self._order():
                apply(lease, self.after[lease])
                applied.append(lease)
        except (InUse, InvalidAccount):
            for lease in applied:
                apply(lease, self.before[lease])
            raise

    def _order(self) -> list[str]:
        changed = [lease for lease in self.after if [*self.after[lease]] != [*self.before[lease]]]
        return sorted(changed, key=lambda lease: not self._shrinks(lease))

    def _shrinks(self, lease: str) -> bool:
        pairs = zip(self.before[lease], self.after[lease], strict=True)
        return any(new.memory_mib < old.memory_mib for old, new in pairs)


def larger(piece: Slice, other: Slice) -> Slice:
    """Return a slice with the larger memory and the larger compute of two slices of one card."""
    return replace(
        piece,
        memory_mib=max(piece.memory_mib, other.memory_mib),
        compute=max(piece.compute, other.compute),
    )


def resized(
    slices: Sequence[Slice], memory: Memory | None, compute: int | None, node: Node
) -> list[Slice]:
    """Return slices of a node's cards in other sizes; None keeps a size.

    Raises InvalidRequest if a card is too small.
    """
    sizes = {card.uuid: card.memory_mib for card in node.cards}

    def changed(piece: Slice) -> Slice:
        size = sizes.get(piece.uuid, 0)
        mib = memory.mib_on(size, node.unit_mib) if memory else piece.memory_mib
        if mib is None:
            nominal = memory.nominal_mib(node.unit_mib) if memory else 0
            raise InvalidRequest(
                f"card {piece.card} has {size} MiB: {nominal} MiB are more than all of it"
            )
        return replace(piece, memory_mib=mib, compute=piece.compute if compute is None else compute)

    return [changed(piece) for piece in slices]
