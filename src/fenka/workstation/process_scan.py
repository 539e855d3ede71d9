"""Assigns the machine's processes to leases, by what the kernel says of them.

A lease is a user namespace, and its processes are those in it or in a namespace nested in it. Closed
descriptors, double forks, a killed parent, chroot and further namespaces hide nothing, and only the lease's
user and root can enter. The process that confirms its lease shows which namespace it is.

Where root cannot create user namespaces, `/proc/PID/mountinfo` decides: the lease's own directory is mounted
there, which only root could forge. With cooperative isolation the inherited environment of the user's
processes decides, which a program can undo.

No file that a process controls is opened here: its owner decides how it answers.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fenka import procfs
from fenka.isolation.sandbox import LEASE_ROOT
from fenka.procfs import start_ticks
from fenka.workstation.job import Job

_VARIABLE = b"FENKA_LEASE="


@dataclass(frozen=True, slots=True)
class ProcessScan:
    """The result of one scan. complete: all processes were inspected in time."""

    holders: Mapping[str, list[int]] = field(default_factory=dict)
    """Processes by lease."""
    unreadable: Mapping[str, list[int]] = field(default_factory=dict)
    """Processes that may be in a lease and cannot be inspected. While they live, the lease is kept."""
    complete: bool = True

    def pids(self, lease: str) -> list[int]:
        """Return all processes that keep a lease."""
        return [*self.holders.get(lease, ()), *self.unreadable.get(lease, ())]


class Scanner:
    """Assigns processes to leases, one after another."""

    def __init__(self, jobs: Sequence[Job], leases: Path) -> None:
        """Prepare a scan.

        Args:
            jobs: The jobs that hold slices.
            leases: The directory of all leases' files.
        """
        self._jobs = {job.id: job for job in jobs}
        self._own_mounts = procfs.namespace_inode("self", "mnt")
        own = procfs.namespace_inode("self", "user")
        known = {job.user_namespace: job.id for job in jobs if job.user_namespace not in (0, own)}
        self._ancestry = procfs.UserNamespaceAncestry(known)
        self._leases_by_mount = {
            lease_source(leases, job.id): job.id for job in jobs if job.user_namespace == own
        }
        """Root's leases without a user namespace, by what mountinfo shows of them."""
        self.seen: set[int] = set()
        self.holders: dict[str, list[int]] = {}
        self.unreadable: dict[str, list[int]] = {}
        self.cooperative: dict[int, list[tuple[int, int]]] = {}
        """Processes by user, with their start, that may be in a lease with cooperative isolation."""

    def result(self) -> ProcessScan:
        """Return what was found so far."""
        holders = {lease: sorted(pids) for lease, pids in self.holders.items()}
        return ProcessScan(holders, self.unreadable)

    def visit(self, pid: int) -> None:
        """Assign one process. Raises OSError if a resource is exhausted."""
        try:
            lease = self.lease(pid)
        except PermissionError:
            self._add_unreadable(pid)
        else:
            if lease is None:
                self._add_cooperative_candidate(pid)
            elif start_ticks(pid) is not None:
                self.holders.setdefault(lease, []).append(pid)
        self.seen.add(pid)

    def lease(self, pid: int) -> str | None:
        """Return a process's lease by its namespaces; None also if it has ended. Raises OSError."""
        try:
            lease = self._ancestry.name(pid) or self._by_mount(pid)
        except (FileNotFoundError, ProcessLookupError):
            return None
        if lease is None:
            return None
        # Root may enter any lease, and programs in root's leases may run as any user.
        return lease if self._jobs[lease].uid in (0, procfs.real_uid(pid)) else None

    def from_environment(self, uid: int, environment: bytes) -> str | None:
        """Return the user's lease with cooperative isolation that an environment names, if any."""
        for variable in environment.split(b"\0"):
            if variable.startswith(_VARIABLE):
                name = os.path.basename(os.fsdecode(variable.removeprefix(_VARIABLE)))
                job = self._jobs.get(name)
                valid = job and job.cooperative and job.uid == uid
                return name if valid else None
        return None

    def _by_mount(self, pid: int) -> str | None:
        if not self._leases_by_mount:
            return None
        if procfs.namespace_inode(procfs.living_thread(pid), "mnt") == self._own_mounts:
            return None
        # In another user namespace, programs may mount anything.
        if not self._ancestry.is_ours(pid):
            return None
        mounted = mounted_lease(pid)
        return self._leases_by_mount.get(mounted) if mounted else None

    def _add_unreadable(self, pid: int) -> None:
        """Record a process whose namespaces may not be read, for each lease that it may be in.

        Raises OSError.
        """
        try:
            uid, start = procfs.real_uid(pid), start_ticks(pid)
            separate = procfs.in_other_user_namespace(pid)
        except PermissionError:
            return  # /proc is mounted with hidepid, which hides other users' processes.
        if start is None or not separate:
            return
        for job in self._jobs.values():
            # Processes of a lease start later than the one that requested it.
            possible = job.uid in (0, uid) and start >= job.start_ticks
            if possible and not job.cooperative:
                self.unreadable.setdefault(job.id, []).append(pid)

    def _add_cooperative_candidate(self, pid: int) -> None:
        candidates = [job for job in self._jobs.values() if job.cooperative]
        if not candidates:
            return
        uid, start = procfs.real_uid(pid), start_ticks(pid)
        if start is not None and any(
            job.uid == uid and start >= job.start_ticks for job in candidates
        ):
            assert uid is not None
            self.cooperative.setdefault(uid, []).append((pid, start))


def lease_source(leases: Path, lease: str) -> tuple[str, Path]:
    """Return what `mounted_lease` returns in this lease, whether its files exist or not. Raises OSError."""
    device, root = procfs.mount_source(leases)
    return device, root / lease / "lease"


def mounted_lease(pid: int) -> tuple[str, Path] | None:
    """Return what a process sees mounted at the place of its lease; None also if it has ended.

    Raises OSError.
    """
    source = None
    try:
        for mount in procfs.mounts(procfs.living_thread(pid)):
            if mount.point == LEASE_ROOT / "lease":
                source = mount.device, mount.root
    except (FileNotFoundError, ProcessLookupError):
        return None
    return source
