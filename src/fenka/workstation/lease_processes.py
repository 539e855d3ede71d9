"""Finds the processes of a daemon's leases, and remembers the leases' namespaces."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.isolation import proc_reader
from fenka.isolation.files import account_file
from fenka.procfs import start_ticks
from fenka.workstation.job import Job
from fenka.workstation.process_scan import ProcessScan, Scanner, lease_source, mounted_lease

SCAN_TIMEOUT_S = 30.0
"""A scan of ten thousand processes takes half a second, longer on a busy machine. Then it is cut off."""

ENVIRON_TIMEOUT_S = 0.5
"""For one user's processes with cooperative isolation. A hostile one delays only its own user's others."""

MAX_LISTINGS = 20
"""Of all processes, until one shows no new process: enough to find a process that forks to stay hidden."""

_MAX_ENVIRON_BYTES = 2 << 20


class NotInLease(FenkaError):
    """The process that confirmed its lease has not entered it."""


def _owner(file: Path) -> int:
    try:
        return file.lstat().st_uid
    except FileNotFoundError:
        return os.geteuid()


class LeaseProcesses:
    """Finds the processes of a daemon's leases."""

    def __init__(self, jobs: Callable[[], Sequence[Job]], leases: Path) -> None:
        """jobs: returns the jobs that hold slices. leases: the directory of all leases' files."""
        self._jobs, self._leases = jobs, leases
        self._pins: dict[str, int] = {}
        """Descriptors by lease that keep its namespace's inode number from being reused."""
        self._unresponsive: set[tuple[int, int]] = set()
        """Processes, with their start, whose environment could not be read in time."""
        self._environments: dict[tuple[int, int], str | None] = {}
        """The lease that each process's environment named in the last scan."""
        self.needs_scan = False
        """Whether :meth:`lease_of` was called for a process that the last scan did not see."""
        self._scan_lock = asyncio.Lock()
        self._next_scan: asyncio.Task[ProcessScan] | None = None

    # --- namespaces ---------------------------------------------------------------------------------

    def record_entry(self, job: Job) -> None:
        """Record the namespace of a job whose process has entered its lease. Raises NotInLease, OSError."""
        pin = procfs.open_user_namespace(job.pid)
        inode = os.fstat(pin).st_ino
        if not self._entered(job, inode):
            os.close(pin)
            raise NotInLease(
                "the program is not in its lease: start it with `fenka run`, outside of other leases"
            )
        self._pin(job.id, pin)
        job.user_namespace = inode

    def _entered(self, job: Job, inode: int) -> bool:
        if not procfs.lives(job.pid, job.start_ticks):
            return False  # Another process may have its PID.
        own = procfs.namespace_inode("self", "user")
        if inode == own:
            # Root may have created no user namespace. No other user could have mounted anything then.
            return job.uid == 0 and self._has_mounted(job.pid, job.id)
        others = {other.user_namespace: other.id for other in self._jobs() if other is not job}
        return procfs.UserNamespaceAncestry(others).name(job.pid) is None

    def recover(self, jobs: Sequence[Job]) -> ProcessScan:
        """Scan for jobs that an earlier daemon recorded. Raises OSError.

        Recorded namespaces may have ended, and their inode numbers may have been reused.
        """
        scan = self._scan_all(jobs)
        holders = dict(scan.holders)
        for job in jobs:
            pids = holders.get(job.id, [])
            if job.user_namespace and pids and not self._same_namespace(job, pids):
                job.user_namespace = 0
                del holders[job.id]
            elif job.user_namespace and pids:
                self._pin(job.id, procfs.open_user_namespace(pids[0]))
        return ProcessScan(holders, scan.unreadable, scan.complete)

    def forget(self, lease: str) -> None:
        """Forget a lease that has ended. Unknown ones are ignored."""
        pin = self._pins.pop(lease, None)
        if pin is not None:
            os.close(pin)

    def close(self) -> None:
        """Forget all leases."""
        for lease in list(self._pins):
            self.forget(lease)

    def _pin(self, lease: str, descriptor: int) -> None:
        self.forget(lease)
        self._pins[lease] = descriptor

    def _same_namespace(self, job: Job, pids: Sequence[int]) -> bool:
        """Return whether these processes' namespace is the recorded one."""
        if job.pid in pids and procfs.lives(job.pid, job.start_ticks):
            return True
        # If programs can change their root, mountinfo proves nothing: then the lease is kept.
        can_change_root = job.uid == 0 or job.spec.allow_user_namespaces
        return can_change_root or any(self._has_mounted(pid, job.id) for pid in pids)

    # --- scans --------------------------------------------------------------------------------------

    async def scan(self) -> ProcessScan:
        """Scan all processes, beginning after this call. Calls until it begins share one scan."""
        if self._next_scan is None:
            self._next_scan = asyncio.create_task(self._run_scan())
        return await asyncio.shield(self._next_scan)

    async def _run_scan(self) -> ProcessScan:
        async with self._scan_lock:
            self._next_scan, self.needs_scan = None, False
            jobs = [copy(job) for job in self._jobs()]  # they may change during the scan
            try:
                return await asyncio.to_thread(self._scan_all, jobs)
            except OSError:  # for instance, no descriptor is left
                return ProcessScan(complete=False)

    def lease_of(self, pid: int) -> str | None:
        """Return the lease that a process is in, if any.

        With cooperative isolation this is the last scan's answer; see :attr:`needs_scan`.
        """
        jobs = self._jobs()
        try:
            lease = Scanner(jobs, self._leases).lease(pid)
            if lease is not None:
                return lease
            start, uid = start_ticks(pid), procfs.real_uid(pid)
        except OSError:
            return None
        cooperative = any(job.cooperative and job.uid == uid for job in jobs)
        if start is None or not cooperative:
            return None
        if (pid, start) not in self._environments:
            self.needs_scan = True
        return self._environments.get((pid, start))

    def _scan_all(self, jobs: Sequence[Job]) -> ProcessScan:
        deadline = time.monotonic() + SCAN_TIMEOUT_S
        scanner = Scanner(jobs, self._leases)
        # A process that forks and exits can be missed by one listing, while its child is in the next.
        for _ in range(MAX_LISTINGS):
            unseen = [pid for pid in procfs.pids() if pid not in scanner.seen]
            for pid in sorted(unseen, reverse=True):
                if time.monotonic() > deadline:
                    return ProcessScan(complete=False)
                scanner.visit(pid)
            if not unseen:
                break
        self._environments = self._read_environments(scanner)
        for (pid, _), lease in self._environments.items():
            if lease:
                scanner.holders.setdefault(lease, []).append(pid)
        return scanner.result()

    def _read_environments(self, scanner: Scanner) -> dict[tuple[int, int], str | None]:
        """Return the lease that each candidate's environment names; processes by PID and start."""
        self._unresponsive.intersection_update(
            process for candidates in scanner.cooperative.values() for process in candidates
        )
        leases: dict[tuple[int, int], str | None] = {}
        for uid, candidates in scanner.cooperative.items():
            files = {
                procfs.PROC / procfs.living_thread(pid) / "environ": (pid, start)
                for pid, start in candidates
                if (pid, start) not in self._unresponsive
            }
            contents = proc_reader.read_files([*files], _MAX_ENVIRON_BYTES, ENVIRON_TIMEOUT_S)
            for path, process in files.items():
                if path not in contents:
                    self._unresponsive.add(process)
                    break
                leases[process] = scanner.from_environment(uid, contents[path] or b"")
        return leases

    def _has_mounted(self, pid: int, lease: str) -> bool:
        try:
            return mounted_lease(pid) == lease_source(self._leases, lease)
        except OSError:
            return False

    def unrecorded_holders(self, lease: str) -> list[int]:
        """Return the processes that have a lease mounted which no daemon has recorded.

        Processes of other users than the lease's do not count, except in root's leases. Raises OSError.
        """
        source = lease_source(self._leases, lease)
        uid = _owner(account_file(self._leases / lease))
        holders = []
        for pid in procfs.pids():
            try:
                if mounted_lease(pid) == source and uid in (0, procfs.real_uid(pid)):
                    holders.append(pid)
            except OSError:
                continue
        return holders
