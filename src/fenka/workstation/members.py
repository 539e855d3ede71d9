"""Which processes hold a lease: the tree that began with the client, however it is killed or detached.

A lease's processes are those that see its control page: a descendant cannot leave the mount namespace
it was born in (a namespace that it makes itself inherits the mounts). So closing descriptors, double
forks and a killed parent hide nothing, and a restarted daemon finds the same processes again. In
cooperative mode the inherited environment stands in for the mounts, which a program can undo.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from fenka.isolation.control import BadControl, read
from fenka.isolation.sandbox import lease_of


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (clock ticks after boot), or None if there is no such process.

    A PID alone is used again; with its start time it names one process until the next boot.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    # A zombie holds nothing any more; its parent may never reap it.
    return None if state in "ZX" else int(fields[18])


def parent(pid: int) -> int | None:
    """The process that started this one and still lives; None where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def holders() -> dict[str, list[int]]:
    """Processes by the id of the lease they are in."""
    found: dict[str, list[int]] = {}
    ours = _namespace("self")
    for pid in psutil.pids():
        lease = _lease(pid, ours)
        if lease and start_ticks(pid) is not None:
            found.setdefault(lease, []).append(pid)
    return found


def lease_of_process(pid: int) -> str | None:
    """The id of the lease that a process is in, if any."""
    return _lease(pid, _namespace("self"))


def _lease(pid: int, ours: str) -> str | None:
    try:
        if _namespace(str(pid)) != ours:
            page = lease_of(pid)
            return read(page).lease if page else None
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, BadControl):
        return None
    for variable in environment.split(b"\0"):
        if variable.startswith(b"FENKA_LEASE="):
            return os.path.basename(os.fsdecode(variable.partition(b"=")[2]))
    return None


def _namespace(pid: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/mnt")


class Watch:
    """Calls back once when no process of a lease is left.

    holder, ticks: the process that asked and its start. It counts from the grant on, before it has entered
    the lease; another that has its PID now does not.
    on_end: called at most once.
    add_reader, remove_reader: an event loop's, which tell when a pidfd becomes readable.
    """

    def __init__(
        self,
        lease: str,
        holder: int,
        ticks: int,
        on_end: Callable[[], None],
        add_reader: Callable[[int, Callable[[], None]], object],
        remove_reader: Callable[[int], object],
    ) -> None:
        self._lease, self._on_end = lease, on_end
        self._add_reader, self._remove_reader = add_reader, remove_reader
        self._watched: dict[int, int] = {}
        followed = self._follow([holder])
        if followed and start_ticks(holder) != ticks:
            self.close()
            followed = False
        if not followed:
            self._rescan()

    def close(self) -> None:
        """Watch no longer."""
        for descriptor in self._watched.values():
            self._remove_reader(descriptor)
            os.close(descriptor)
        self._watched.clear()

    def _follow(self, pids: Iterable[int]) -> bool:
        for pid in pids:
            if pid in self._watched:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._watched[pid] = descriptor
            self._add_reader(descriptor, lambda pid=pid: self._gone(pid))  # type: ignore[misc]
        return bool(self._watched)

    def _gone(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        self._remove_reader(descriptor)
        os.close(descriptor)
        if not self._watched:
            self._rescan()

    def _rescan(self) -> None:
        # One look at /proc can miss a process that is forked behind it; two that agree do not.
        for _ in range(2):
            if self._follow(holders().get(self._lease, [])):
                return
        self._on_end()
