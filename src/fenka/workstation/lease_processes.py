"""Finds the processes of a daemon's leases, and remembers the leases' namespaces.

Assigns the machine's processes to leases, by what the kernel says of them.

A lease is a user namespace, and its processes are those in it or in a namespace nested in it. Closed
descriptors, double forks, a killed parent, chroot and further namespaces hide nothing, and only the lease's
user and root can enter. The process that confirms its lease shows which namespace it is.

Where root cannot create user namespaces, `/proc/PID/mountinfo` decides: the lease's own directory is mounted
there, which only root could forge. With cooperative isolation the inherited environment of the user's
processes decides, which a program can undo.

A container is its control group and its PID namespace, with all below them. Where it shares the namespace of
another container, the group decides.

No file that a process controls is opened here: its owner decides how it answers.

Watches the processes of all jobs, and of the programs that started gangs.

Ends the processes of jobs, and no others, although the daemon may have the right to signal any process.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.isolation import freezer, pid_namespaces
from fenka.isolation.lease_files import account_file
from fenka.isolation.sandbox import LEASE_ROOT
from fenka.procfs import exit_status, lives, start_ticks
from fenka.workstation.broker import Broker
from fenka.workstation.job import Job, JobGang

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
        self._ancestry = procfs.NamespaceAncestry("user", known)
        self._leases_by_mount = {
            lease_source(leases, job.id): job.id for job in jobs if job.user_namespace == own
        }
        """Root's leases without a user namespace, by what mountinfo shows of them."""
        containers = [(job, job.in_container) for job in jobs if job.in_container]
        # An init that has ended has taken its namespace along, and another one may have its inode.
        self._pid_namespaces = procfs.NamespaceAncestry(
            "pid",
            {
                container.pid_namespace: job.id
                for job, container in containers
                if container.pid_namespace and procfs.lives(job.pid, job.start_ticks)
            },
        )
        self._cgroups = {
            container.cgroup: job.id
            for job, container in containers
            if container.cgroup and procfs.cgroup_inode(container.cgroup) == container.cgroup_inode
        }
        self._has_containers = bool(containers)
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
            container = self._container(pid)
            if container is not None:
                return container
            lease = self._ancestry.name(pid) or self._by_mount(pid)
        except (FileNotFoundError, ProcessLookupError):
            return None
        if lease is None:
            return None
        # Root may enter any lease, and programs in root's leases may run as any user.
        return lease if self._jobs[lease].uid in (0, procfs.real_uid(pid)) else None

    def _container(self, pid: int) -> str | None:
        if not self._has_containers:
            return None
        group = procfs.nearest_cgroup(procfs.cgroup(pid), self._cgroups) if self._cgroups else None
        return group or self._pid_namespaces.name(pid)

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
            possible = job.uid in (0, uid) and start >= job.start_ticks and not job.in_container
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
        pin = procfs.open_namespace(job.pid, "user")
        inode = os.fstat(pin).st_ino
        if not self._entered(job, inode):
            os.close(pin)
            raise NotInLease(
                "the program is not in its lease: start it with `fenka run`, outside of other leases"
            )
        self._pin(job.id, pin)
        job.user_namespace = inode

    def record_container(self, job: Job) -> None:
        """Record by what a container's processes are recognised. Raises NotInLease, OSError."""
        container = job.in_container
        assert container is not None
        pin = procfs.open_namespace(job.pid, "pid")
        inode = os.fstat(pin).st_ino
        own = (
            inode != procfs.namespace_inode("self", "pid")
            and procfs.namespace_pids(job.pid)[-1] == 1
        )
        container.cgroup = procfs.cgroup_of_one(job.pid)
        container.cgroup_inode = procfs.cgroup_inode(container.cgroup) if container.cgroup else 0
        if not own and not container.cgroup:
            os.close(pin)
            raise NotInLease(
                "this container has neither a PID namespace nor a control group of its own, so its end could "
                "not be seen: leave out --pid=host, or --cgroups=disabled"
            )
        container.pid_namespace = inode if own else 0
        self._pin(job.id, pin)

    def _entered(self, job: Job, inode: int) -> bool:
        if not procfs.lives(job.pid, job.start_ticks):
            return False  # Another process may have its PID.
        own = procfs.namespace_inode("self", "user")
        if inode == own:
            # Root may have created no user namespace. No other user could have mounted anything then.
            return job.uid == 0 and self._has_mounted(job.pid, job.id)
        others = {other.user_namespace: other.id for other in self._jobs() if other is not job}
        return procfs.NamespaceAncestry("user", others).name(job.pid) is None

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
                self._pin(job.id, procfs.open_namespace(pids[0], "user"))
            elif (container := job.in_container) and container.pid_namespace:
                if procfs.lives(job.pid, job.start_ticks):
                    self._pin(job.id, procfs.open_namespace(job.pid, "pid"))
                else:
                    container.pid_namespace = 0
        return ProcessScan(holders, scan.unreadable, scan.complete)

    def is_certain(self, job: Job, pids: Sequence[int]) -> bool:
        """Return whether one of these processes is certainly the job's.

        A number of a namespace may have been given to another one while no daemon ran. With cooperative
        isolation and in containers a scan finds a job's own processes only.
        """
        if procfs.lives(job.pid, job.start_ticks):
            return True
        if job.cooperative or job.in_container:
            return bool(pids)
        return any(self._has_mounted(pid, job.id) for pid in pids)

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
            contents = pid_namespaces.read_files([*files], _MAX_ENVIRON_BYTES, ENVIRON_TIMEOUT_S)
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


MAX_WATCHED = 16
"""Processes of one lease that are watched at a time: users may start any number, and descriptors are few."""

RESCAN_DELAY_S = 1.0
"""After an incomplete scan, during which the lease is kept."""


@dataclass(slots=True)
class JobWatches:
    """One watch for each job, and one for the starting process of each gang.

    Attributes:
        scan: Scans all processes.
        on_exit: Called with the id of a job whose last process has ended.
        on_gang_end: Called with the queue id of a gang whose starting process has ended.
        on_status: Called with the id of a job and the wait status of the process that requested it.
    """

    scan: Callable[[], Awaitable[ProcessScan]]
    on_exit: Callable[[str], None]
    on_gang_end: Callable[[str], None]
    on_status: Callable[[str, int], None]
    _watches: dict[str, "ProcessWatch"] = field(default_factory=dict)
    """By job id; for a gang's starting process, by queue id."""

    def watch(self, jobs: Sequence[Job]) -> None:
        """Watch all jobs of one queue entry."""
        for job in jobs:
            if not job.gang or job.pid != job.gang.pid:
                self.watch_job(job)
        gang = jobs[0].gang if jobs else None
        if gang and lives(gang.pid, gang.start_ticks):
            self._follow(gang.id, gang, self.on_gang_end, lambda _: None)
        elif gang:
            self.on_gang_end(gang.id)

    def watch_job(self, job: Job) -> None:
        """Watch one job, instead of the process that was watched for it before."""
        self._follow(job.id, job, self.on_exit, partial(self.on_status, job.id))

    def keep(self, names: Collection[str]) -> None:
        """Stop all watches but those of these jobs and queue entries."""
        for name in self._watches.keys() - set(names):
            self._watches.pop(name).close()

    def _follow(
        self,
        name: str,
        process: Job | JobGang,
        on_end: Callable[[str], None],
        on_status: Callable[[int], None],
    ) -> None:
        if name in self._watches:
            self._watches.pop(name).close()
        self._watches[name] = ProcessWatch(
            name, (process.pid, process.start_ticks), partial(on_end, name), on_status, self.scan
        )


class ProcessWatch:
    """Calls back once, when the last process of a lease has ended."""

    def __init__(
        self,
        lease: str,
        holder: tuple[int, int],
        on_end: Callable[[], None],
        on_status: Callable[[int], None],
        scan: Callable[[], Awaitable[ProcessScan]],
    ) -> None:
        """Start watching.

        Args:
            lease: The lease.
            holder: The process that requested it, which counts before it has entered the lease, and when it
                started: another process with its PID does not count.
            on_end: Called at most once.
            on_status: Called with the holder's wait status when it has ended, if the kernel tells it.
            scan: Scans all processes.
        """
        self._lease, self._on_end, self._scan = lease, on_end, scan
        self._holder, self._on_status = holder, on_status
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, int] = {}
        self._rescan_task: asyncio.Task[None] | None = None
        self._follow([holder[0]])
        if not lives(*holder):
            self._report_status()
            self.close()
        if not self._watched:
            self._start_rescan()

    def close(self) -> None:
        """Stop watching."""
        if self._rescan_task:
            self._rescan_task.cancel()
        for pid in list(self._watched):
            self._unfollow(pid)

    def _follow(self, pids: Iterable[int]) -> None:
        """Watch processes that have not ended. Raises OSError."""
        for pid in pids:
            if pid in self._watched:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._watched[pid] = descriptor
            self._loop.add_reader(descriptor, self._on_process_end, pid)

    def _unfollow(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def _report_status(self) -> None:
        pid, ticks = self._holder
        if pid in self._watched:
            status = exit_status(self._watched[pid], pid, ticks)
            if status is not None:
                self._on_status(status)

    def _on_process_end(self, pid: int) -> None:
        if pid == self._holder[0]:
            self._report_status()
        self._unfollow(pid)
        if not self._watched:
            self._start_rescan()

    def _start_rescan(self) -> None:
        self._rescan_task = self._loop.create_task(self._rescan())

    async def _rescan(self) -> None:
        while True:
            scan = await self._scan()
            try:
                self._follow(scan.pids(self._lease)[:MAX_WATCHED])
            except OSError:  # for instance, no descriptor is left
                scan = ProcessScan(scan.holders, scan.unreadable, complete=False)
            if self._watched:
                return
            # The processes found have ended since, and may have left children.
            if scan.complete and not scan.pids(self._lease):
                break
            await asyncio.sleep(0 if scan.complete else RESCAN_DELAY_S)
        self._rescan_task = None
        self._on_end()


KILL_TIMEOUT_S = 5.0
"""SIGKILL ends a process at once, unless it waits for a device."""

POLL_S = 0.02
"""Between two checks whether the jobs have ended."""


@dataclass(slots=True)
class _Termination:
    """The termination of some jobs. kill_at: when SIGKILL is sent, of CLOCK_MONOTONIC."""

    kill_at: float
    task: asyncio.Task[bool] | None = None


@dataclass(frozen=True, slots=True)
class Terminator:
    """Sends signals to the processes of jobs."""

    broker: Broker
    processes: LeaseProcesses
    _underway: dict[tuple[str, ...], _Termination] = field(default_factory=dict)
    """By the jobs' ids. Requests wait for what is under way, so their number costs nothing."""

    async def terminate(self, jobs: Sequence[Job], grace_s: float) -> bool:
        """Send SIGTERM, and after the grace period SIGKILL. Return whether all jobs have ended.

        If they are being terminated already, the shorter grace period counts. A caller that goes away ends
        nothing of it.
        """
        key, kill_at = tuple(job.id for job in jobs), time.monotonic() + grace_s
        termination = self._underway.setdefault(key, _Termination(kill_at))
        termination.kill_at = min(termination.kill_at, kill_at)
        if termination.task is None:
            termination.task = asyncio.create_task(self._terminate(jobs, termination))
            termination.task.add_done_callback(lambda _: self._underway.pop(key, None))
        return await asyncio.shield(termination.task)

    async def _terminate(self, jobs: Sequence[Job], termination: _Termination) -> bool:
        await self._signal(jobs, signal.SIGTERM, only_init=True)
        while self.broker.present(jobs) and time.monotonic() < termination.kill_at:
            await asyncio.sleep(POLL_S)
        await self._signal(jobs, signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while self.broker.present(jobs) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return not self.broker.present(jobs)

    async def _signal(self, jobs: Sequence[Job], number: int, *, only_init: bool = False) -> None:
        """only_init: of a container, signal the first process only, which ends the others in order."""
        if self.broker.present(jobs):
            for pid, job in await self._running(jobs):
                if (
                    only_init
                    and job.in_container
                    and pid != job.pid
                    and self._requested(job, job.pid)
                ):
                    continue
                procfs.send_signal(pid, number, partial(self.may_signal, job, pid))
                if number == signal.SIGKILL and job.in_container:
                    freezer.thaw(pid, job.in_container.cgroup)

    async def pids(self, jobs: Sequence[Job]) -> list[int]:
        """Return the processes of the jobs that still run."""
        return [pid for pid, _ in await self._running(jobs)]

    async def _running(self, jobs: Sequence[Job]) -> list[tuple[int, Job]]:
        scan = await self.processes.scan()
        return [
            (pid, job)
            for job in self.broker.present(jobs)
            for pid in sorted({job.pid, *scan.holders.get(job.id, [])})
            if self._belongs(job, pid)
        ]

    def may_signal(self, job: Job, pid: int) -> bool:
        """Return whether the process is the job's and its user's. Root's and containers' have any user."""
        users = (0, procfs.real_uid(pid))
        return self._belongs(job, pid) and (job.in_container is not None or job.uid in users)

    def _belongs(self, job: Job, pid: int) -> bool:
        """Return whether the current process of this PID requested the job, or is in its lease."""
        return self._requested(job, pid) or self.processes.lease_of(pid) == job.id

    def _requested(self, job: Job, pid: int) -> bool:
        return pid == job.pid and procfs.lives(pid, job.start_ticks)
