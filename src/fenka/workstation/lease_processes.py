"""Which processes hold a lease, by what the kernel says of them.

A lease is a user namespace of its own, and its processes are those in it or in one nested in it: closed
descriptors, double forks, a killed parent, chroot and further namespaces hide nothing, and nobody but the
lease's user and root can get in. The daemon learns which namespace it is from the process that confirms.
Where root can make none (a machine that forbids user namespaces), the mount of the lease's own directory in
`/proc/PID/mountinfo` says it, which only root could forge. With cooperative isolation the inherited
environment does, of processes of the same user, and a program can undo that.

Files of processes are never opened, for their owners decide how those answer.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fenka.core.errors import FenkaError
from fenka.isolation import proc_reader, processes
from fenka.isolation.processes import start_ticks
from fenka.isolation.sandbox import LEASE_ROOT
from fenka.workstation.job import Job

SCAN_TIMEOUT_S = 30.0
"""A look at ten thousand processes takes half a second, more on a busy machine; what is not seen by then
makes another necessary."""

RESCAN_DELAY_S = 1.0
"""After one that was not complete; the lease is held meanwhile."""

ENVIRON_TIMEOUT_S = 0.5
"""Of one user's processes with cooperative isolation; a hostile one delays its own user's others."""

_MAX_ENVIRON_BYTES = 2 << 20
_VARIABLE = b"FENKA_LEASE="


MAX_LISTINGS = 20
"""Until one shows no new process. Where processes come and go all the time, that is enough to meet one
that forks to stay unseen."""


class NotInLease(FenkaError):
    """The process that says so is in no lease; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class LeaseIdentity:
    """How to know a lease's processes."""

    lease: str
    uid: int
    since: int
    """Start of the process that asked: all others of the lease are younger."""
    pid: int
    cooperative: bool
    namespace: int
    """Number of its user namespace; 0 if none is known."""
    keeps_root: bool
    """Its programs cannot change what mountinfo shows of them."""

    @staticmethod
    def of(job: Job) -> "LeaseIdentity":
        """As recorded."""
        cooperative = job.isolation == "cooperative"
        keeps_root = job.uid != 0 and not job.allow_user_namespaces
        return LeaseIdentity(
            job.id, job.uid, job.start_ticks, job.pid, cooperative, job.user_namespace, keeps_root
        )


@dataclass(frozen=True, slots=True)
class ProcessScan:
    """What was seen of all processes. complete: the time sufficed for all."""

    holders: Mapping[str, list[int]] = field(default_factory=dict)
    """By lease."""
    unreadable: Mapping[str, list[int]] = field(default_factory=dict)
    """By lease, those that may be in it and cannot be looked at: as long as they live, so does it."""
    complete: bool = True

    def pids(self, lease: str) -> list[int]:
        """All that keep the lease."""
        return [*self.holders.get(lease, ()), *self.unreadable.get(lease, ())]


class _Scanner:
    """The processes of one look, so far."""

    def __init__(
        self, rules: Sequence[LeaseIdentity], places: Mapping[tuple[str, Path], str]
    ) -> None:
        self._rules, self._leases_by_mount = {rule.lease: rule for rule in rules}, places
        self._own_mounts = processes.namespace_inode("self", "mnt")
        own = processes.namespace_inode("self", "user")
        known = {it.namespace: it.lease for it in rules if it.namespace not in (0, own)}
        self._ancestry = processes.UserNamespaceAncestry(known)
        self.seen: set[int] = set()
        self.holders: dict[str, list[int]] = {}
        self.unreadable: dict[str, list[int]] = {}
        self.cooperative: dict[int, list[tuple[int, int]]] = {}
        """By user, processes that may be in a lease with cooperative isolation, with their start."""

    def result(self) -> ProcessScan:
        """The result."""
        holders = {lease: sorted(pids) for lease, pids in self.holders.items()}
        return ProcessScan(holders, self.unreadable)

    def visit(self, pid: int) -> None:
        """Put one process where it belongs; raises OSError where that cannot be told for want of means."""
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
        """The lease by its namespaces; None also for a process that is gone. Raises OSError."""
        try:
            lease = self._ancestry.name(pid) or self._by_mount(pid)
        except (FileNotFoundError, ProcessLookupError):
            return None
        if lease is None:
            return None
        # Root may look into anybody's lease, and its own programs may give up its rights.
        return lease if self._rules[lease].uid in (0, processes.real_uid(pid)) else None

    def from_environment(self, uid: int, environment: bytes) -> str | None:
        """The lease that an environment names, if it is one of the user's with cooperative isolation."""
        for variable in environment.split(b"\0"):
            if variable.startswith(_VARIABLE):
                name = os.path.basename(os.fsdecode(variable.removeprefix(_VARIABLE)))
                rule = self._rules.get(name)
                return name if rule and rule.cooperative and rule.uid == uid else None
        return None

    def _by_mount(self, pid: int) -> str | None:
        if not self._leases_by_mount:
            return None
        if processes.namespace_inode(processes.living_thread(pid), "mnt") == self._own_mounts:
            return None
        # In a user namespace of their own others may mount what they like.
        if not self._ancestry.is_ours(pid):
            return None
        mounted = _mounted(pid)
        return self._leases_by_mount.get(mounted) if mounted else None

    def _add_unreadable(self, pid: int) -> None:
        """Whose memory we may not read, so that the kernel hides its namespaces from us. Raises OSError."""
        try:
            uid, start = processes.real_uid(pid), start_ticks(pid)
            apart = processes.in_other_user_namespace(pid)
        except PermissionError:
            return  # /proc is mounted with hidepid, which shows no user the others' processes.
        if start is None or not apart:
            return
        for rule in self._rules.values():
            if not rule.cooperative and rule.uid in (0, uid) and start >= rule.since:
                self.unreadable.setdefault(rule.lease, []).append(pid)

    def _add_cooperative_candidate(self, pid: int) -> None:
        rules = [it for it in self._rules.values() if it.cooperative]
        if not rules:
            return
        uid, start = processes.real_uid(pid), start_ticks(pid)
        if start is not None and any(it.uid == uid and start >= it.since for it in rules):
            assert uid is not None
            self.cooperative.setdefault(uid, []).append((pid, start))


def _owner(file: Path) -> int:
    try:
        return file.lstat().st_uid
    except FileNotFoundError:
        return os.geteuid()


def _mounted(pid: int) -> tuple[str, Path] | None:
    """What is mounted where a lease belongs; None also for a process that is gone. Raises OSError."""
    found = None
    try:
        for mount in processes.mounts(processes.living_thread(pid)):
            if mount.point == LEASE_ROOT / "lease":
                found = mount.device, mount.root
    except (FileNotFoundError, ProcessLookupError):
        return None
    return found


class LeaseProcesses:
    """Finds the processes of a daemon's leases. jobs: those there are now. leases: where their files are."""

    def __init__(self, jobs: Callable[[], Iterable[Job]], leases: Path) -> None:
        self._jobs, self._leases = jobs, leases
        self._pins: dict[str, int] = {}
        """By lease, what keeps its namespace's number from being used again while it is compared."""
        self._unresponsive: set[tuple[int, int]] = set()
        """Processes, with their start, that kept a reader waiting."""
        self._environments: dict[tuple[int, int], str | None] = {}
        """Processes that were asked for their environment at the last look, and the lease it names."""
        self._needs_scan = False
        self._scan_lock = asyncio.Lock()
        self._next_scan: asyncio.Task[ProcessScan] | None = None

    # --- what the daemon learns ---------------------------------------------------------------------

    def record_entry(self, job: Job) -> None:
        """The job's process says that it is in its lease: record where. Raises NotInLease, OSError."""
        pin = processes.open_user_namespace(job.pid)
        number = os.fstat(pin).st_ino
        if not self._entered(job, number):
            os.close(pin)
            raise NotInLease(
                "the program is not in its lease: start it with `fenka run`, outside of other leases"
            )
        self._pin(job.id, pin)
        job.user_namespace = number

    def _entered(self, job: Job, number: int) -> bool:
        if start_ticks(job.pid) != job.start_ticks:
            return False  # Its PID may be another's by now.
        own = processes.namespace_inode("self", "user")
        if number == own:
            # Root may have made none. Nobody else could have mounted anything then.
            return job.uid == 0 and self._has_mounted(job.pid, job.id)
        others = {it.user_namespace: it.id for it in self._jobs() if it is not job}
        return processes.UserNamespaceAncestry(others).name(job.pid) is None

    def recover(self, jobs: Sequence[Job]) -> ProcessScan:
        """Take over what a former daemon recorded of these, and see who is there. Raises OSError.

        Numbers of namespaces that ended meanwhile may be others' by now.
        """
        look = self._scan_all([LeaseIdentity.of(job) for job in jobs])
        holders = dict(look.holders)
        for job in jobs:
            pids = holders.get(job.id, [])
            if job.user_namespace and pids and not self._same_namespace(job, pids):
                job.user_namespace = 0
                del holders[job.id]
            elif job.user_namespace and pids:
                self._pin(job.id, processes.open_user_namespace(pids[0]))
        return ProcessScan(holders, look.unreadable, look.complete)

    def forget(self, lease: str) -> None:
        """A lease that has ended; unknown ones are nothing."""
        pin = self._pins.pop(lease, None)
        if pin is not None:
            os.close(pin)

    def close(self) -> None:
        """Forget all."""
        for lease in list(self._pins):
            self.forget(lease)

    def _pin(self, lease: str, descriptor: int) -> None:
        self.forget(lease)
        self._pins[lease] = descriptor

    def _same_namespace(self, job: Job, pids: Sequence[int]) -> bool:
        """Whether the namespace of these is the one that was recorded."""
        if job.pid in pids and start_ticks(job.pid) == job.start_ticks:
            return True
        # Where programs can change their root, mountinfo proves nothing: then it is held.
        return not LeaseIdentity.of(job).keeps_root or any(
            self._has_mounted(pid, job.id) for pid in pids
        )

    # --- looking ------------------------------------------------------------------------------------

    async def scan(self) -> ProcessScan:
        """See all processes, in a look that begins after this call; those who ask meanwhile share it."""
        if self._next_scan is None:
            self._next_scan = asyncio.create_task(self._run_scan())
        return await asyncio.shield(self._next_scan)

    async def _run_scan(self) -> ProcessScan:
        async with self._scan_lock:
            self._next_scan, self._needs_scan = None, False
            rules = [LeaseIdentity.of(job) for job in self._jobs() if job.placement]
            try:
                return await asyncio.to_thread(self._scan_all, rules)
            except OSError:  # No descriptor is left, for instance.
                return ProcessScan(complete=False)

    def lease_of(self, pid: int) -> str | None:
        """The lease that a process is in, if any. Where its environment says that, :meth:`scan` first."""
        jobs = {job.id: job for job in self._jobs() if job.placement}
        try:
            rules = [LeaseIdentity.of(job) for job in jobs.values()]
            found = _Scanner(rules, self._mounted_leases(rules)).lease(pid)
            if found is not None:
                return found
            start, uid = start_ticks(pid), processes.real_uid(pid)
        except OSError:
            return None
        if start is None or not any(it.cooperative and it.uid == uid for it in rules):
            return None
        if (pid, start) not in self._environments:
            self._needs_scan = True
        return self._environments.get((pid, start))

    @property
    def needs_scan(self) -> bool:
        """Whether :meth:`lease_of` was asked what only another look can tell."""
        return self._needs_scan

    def _scan_all(self, rules: Sequence[LeaseIdentity]) -> ProcessScan:
        deadline = time.monotonic() + SCAN_TIMEOUT_S
        found = _Scanner(rules, self._mounted_leases(rules))
        # A process that forks and ends is behind us in one listing and before us in the next.
        for _ in range(MAX_LISTINGS):
            fresh = [pid for pid in processes.pids() if pid not in found.seen]
            for pid in sorted(fresh, reverse=True):
                if time.monotonic() > deadline:
                    return ProcessScan(complete=False)
                found.visit(pid)
            if not fresh:
                break
        self._environments = self._read_environments(found)
        for (pid, _), lease in self._environments.items():
            if lease:
                found.holders.setdefault(lease, []).append(pid)
        return found.result()

    def _read_environments(self, found: "_Scanner") -> dict[tuple[int, int], str | None]:
        self._unresponsive &= {it for them in found.cooperative.values() for it in them}
        told: dict[tuple[int, int], str | None] = {}
        for uid, them in found.cooperative.items():
            asked = [it for it in them if it not in self._unresponsive]
            files = {
                processes.PROC / processes.living_thread(pid) / "environ": (pid, start)
                for pid, start in asked
            }
            answers = proc_reader.read_files([*files], _MAX_ENVIRON_BYTES, ENVIRON_TIMEOUT_S)
            for path, who in files.items():
                if path not in answers:
                    self._unresponsive.add(who)
                    break
                told[who] = found.from_environment(uid, answers[path] or b"")
        return told

    def _mounted_leases(self, rules: Iterable[LeaseIdentity]) -> dict[tuple[str, Path], str]:
        """Leases of root's without a user namespace, by what mountinfo says is mounted for them."""
        own = processes.namespace_inode("self", "user")
        return {
            processes.mount_source(self._leases / rule.lease / "lease"): rule.lease
            for rule in rules
            if rule.namespace == own
        }

    def _has_mounted(self, pid: int, lease: str) -> bool:
        try:
            return _mounted(pid) == processes.mount_source(self._leases / lease / "lease")
        except OSError:
            return False

    def unrecorded_holders(self, lease: str) -> list[int]:
        """Processes that see a lease's directory mounted where a lease belongs, of a lease that nobody
        recorded. Of its user's only; of root's, anybody's. Raises OSError."""
        directory = self._leases / lease
        place, uid = (
            processes.mount_source(directory / "lease"),
            _owner(directory / "account" / "slots"),
        )
        found = []
        for pid in processes.pids():
            try:
                if _mounted(pid) == place and uid in (0, processes.real_uid(pid)):
                    found.append(pid)
            except OSError:
                continue
        return found


class ProcessWatch:
    """Calls back once when no process of a lease is left.

    holder, ticks: the process that asked and its start. It counts from the grant on, before it has entered
    the lease; another that has its PID now does not.
    on_end: called at most once.
    look: sees all processes.
    """

    def __init__(
        self,
        lease: str,
        holder: int,
        ticks: int,
        on_end: Callable[[], None],
        look: Callable[[], Awaitable[ProcessScan]],
    ) -> None:
        self._lease, self._on_end, self._look = lease, on_end, look
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, int] = {}
        self._looking: asyncio.Task[None] | None = None
        followed = self._follow([holder])
        if followed and start_ticks(holder) != ticks:
            self.close()
            followed = False
        if not followed:
            self._look_again()

    def close(self) -> None:
        """Watch no longer."""
        if self._looking:
            self._looking.cancel()
        for descriptor in self._watched.values():
            self._loop.remove_reader(descriptor)
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
            self._loop.add_reader(descriptor, self._gone, pid)
        return bool(self._watched)

    def _gone(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        if not self._watched:
            self._look_again()

    def _look_again(self) -> None:
        self._looking = self._loop.create_task(self._rescan())

    async def _rescan(self) -> None:
        while True:
            look = await self._look()
            if self._follow(look.pids(self._lease)):
                return
            # Those that were seen have ended since, and may have left children.
            if look.complete and not look.pids(self._lease):
                break
            await asyncio.sleep(0 if look.complete else RESCAN_DELAY_S)
        self._looking = None
        self._on_end()
