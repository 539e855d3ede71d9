"""What the driver says of the processes on this machine's cards: whose they are, and who exceeds limits.

Called by the daemon every few seconds, when somebody lists the jobs, and before a slice is released.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.hardware.nvml import GpuProcess, Reading
from fenka.isolation import violations
from fenka.isolation.files import MIB
from fenka.isolation.processes import real_uid
from fenka.workstation.job import Job

MEMORY_TOLERANCE = 0.05
"""Of a card's memory: what drivers round, reserve and account for differently from one moment to the next."""


@dataclass(frozen=True, slots=True)
class UnleasedProcess:
    """A process that uses a card and is in no lease. start: as `start_ticks` has it."""

    uuid: str
    pid: int
    uid: int
    start: int
    used_mib: int | None
    graphics: bool


@dataclass(frozen=True, slots=True)
class GpuProcesses:
    """The processes on the cards at one moment."""

    by_lease: Mapping[str, Sequence[GpuProcess]] = field(default_factory=dict)
    """By lease."""
    unleased: Sequence[UnleasedProcess] = ()

    def used_mib(self, lease: str, uuid: str) -> int | None:
        """Return what a lease holds of a card; None where the driver does not tell."""
        sizes = [it.used_mib for it in self.by_lease.get(lease, ()) if it.uuid == uuid]
        return None if None in sizes else sum(it or 0 for it in sizes)


@dataclass(frozen=True, slots=True)
class UsageSample:
    """What the driver says at one moment, and who is accused. offences: sentences about jobs, by id."""

    readings: Mapping[str, Reading]
    processes: GpuProcesses
    violations: Mapping[str, list[str]]


def group_by_lease(
    processes: Iterable[GpuProcess],
    lease_of: Callable[[int], str | None],
    start_ticks: Callable[[int], int | None],
) -> GpuProcesses:
    """Sort the driver's processes by lease. Those that have ended meanwhile are left out."""
    leased: dict[str, list[GpuProcess]] = {}
    outside = []
    for it in processes:
        lease, start = lease_of(it.pid), start_ticks(it.pid)
        if lease is not None:
            leased.setdefault(lease, []).append(it)
        elif start is not None and (uid := real_uid(it.pid)) is not None:
            outside.append(UnleasedProcess(it.uuid, it.pid, uid, start, it.used_mib, it.graphics))
    return GpuProcesses(leased, outside)


# ---- who exceeds a limit ----


class ViolationDetector:
    """Accuses jobs after several looks in a row, by the same thresholds as the node."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._compute = violations.MemoryViolations(), violations.ComputeViolations()
        self._clock, self._at = clock, clock()
        self._busy: dict[tuple[str, str], int] = {}

    def sample(
        self,
        jobs: Collection[Job],
        seen: GpuProcesses,
        contexts_mib: Mapping[str, int],
        busy_ns: Callable[[str, str], int],
    ) -> dict[str, list[str]]:
        """Return sentences about jobs, by id, after one more look.

        Args:
            jobs: Those that have a slice.
            seen: The processes on the cards.
            contexts_mib: What a process's context takes, by card UUID.
            busy_ns: What a job has had of a card's time, by job and card UUID.
        """
        slices: _Slices = {(job.id, it.uuid): (job, it) for job in jobs for it in _slices(job)}
        found: dict[str, list[str]] = {}
        for key in sorted(self._memory.observe(_too_much(slices, seen, contexts_mib))):
            job, piece = slices[key]
            found.setdefault(job.id, []).append(
                f"holds {seen.used_mib(*key)} MiB of card {piece.card} by the driver's account, "
                f"more than its {piece.memory_mib} MiB"
            )
        for key in sorted(self._too_long(slices, busy_ns)):
            job, piece = slices[key]
            found.setdefault(job.id, []).append(
                f"has had more than its {job.compute_percent} % of the time of card {piece.card} by the "
                "driver's account"
            )
        for job in jobs:
            pids = (
                sorted({it.pid for it in seen.by_lease.get(job.id, ())}) if job.shim_inode else []
            )
            bare = [str(pid) for pid in pids if violations.has_shim(pid, job.shim_inode) is False]
            if bare:
                found.setdefault(job.id, []).append(
                    f"uses a card without fenka's library, so without its limit: process {', '.join(bare)}"
                )
        return found

    def _too_long(
        self, slices: "_Slices", busy_ns: Callable[[str, str], int]
    ) -> set[tuple[str, str]]:
        now, before = self._clock(), self._busy
        passed, self._at = now - self._at, now
        limited = [
            key
            for key, (job, _) in slices.items()
            if job.compute_percent and job.compute_mode == "hard"
        ]
        self._busy = {key: busy_ns(*key) for key in limited}
        beyond = {
            key: (ns - before[key]) / (passed * 1e9) - slices[key][0].compute_percent / 100
            for key, ns in self._busy.items()
            if key in before and passed > 0
        }
        return self._compute.observe(passed, beyond)


_Slices = Mapping[tuple[str, str], tuple[Job, Slice]]
"""By job and card UUID."""


def _slices(job: Job) -> tuple[Slice, ...]:
    return job.placement.slices if job.placement else ()


def _too_much(
    slices: _Slices, seen: GpuProcesses, contexts_mib: Mapping[str, int]
) -> dict[tuple[str, str], bool]:
    return {
        key: (seen.used_mib(*key) or 0) * MIB
        > violations.memory_allowance(piece.memory_mib * MIB, contexts_mib.get(piece.uuid, 0) * MIB)
        for key, (_, piece) in slices.items()
    }


# ---- whether a slice can be given away ----


def unattributed_mib(card: str, readings: Mapping[str, Reading], seen: GpuProcesses) -> int | None:
    """Return what of a card no process uses that the driver names; None where it does not tell."""
    sizes = [it.used_mib for them in seen.by_lease.values() for it in them if it.uuid == card]
    sizes += [it.used_mib for it in seen.unleased if it.uuid == card]
    if card not in readings or None in sizes:
        return None
    return readings[card].used_mib - sum(it or 0 for it in sizes)


def retention_reason(
    job: Job,
    jobs: Collection[Job],
    cards: Mapping[str, Card],
    readings: Mapping[str, Reading],
    seen: GpuProcesses,
) -> str:
    """Return why the slice of a job that has no process any more is kept; nothing where it is not.

    Two things keep it (docs/workstation.md). Processes of its user that began after it, compute on its card
    and are in no lease, unless other slices that are kept make up for what they use. And memory of no
    process, beyond what there was at the grant and what the other leases have room for.

    Args:
        job: The job, whose last process has ended.
        jobs: All that have a slice; the job may be among them.
        cards: By UUID.
        readings: Of the driver, by card UUID.
        seen: The processes on the cards.
    """
    others = [it for it in jobs if it.id != job.id]
    for piece in _slices(job):
        late = [it for it in seen.unleased if it.uuid == piece.uuid and _may_be_of(it, job)]
        sizes = [piece.memory_mib if it.used_mib is None else it.used_mib for it in late]
        kept = [it for it in others if it.retained and it.uid == job.uid]
        if sum(sizes) > sum(_share(it, piece.uuid) for it in kept):
            names = ", ".join(str(it.pid) for it in late)
            return f"process {names} uses card {piece.card} outside of its lease"
        beyond = _beyond(job, piece.uuid, others, readings, seen)
        if beyond > MEMORY_TOLERANCE * cards[piece.uuid].memory_mib:
            return f"{beyond} MiB of card {piece.card} are still in use by no process that the driver names"
    return ""


def _may_be_of(process: UnleasedProcess, job: Job) -> bool:
    """Whether it may have come from the job: not what was there before, nor others', nor a desktop."""
    return process.uid == job.uid and process.start >= job.start_ticks and not process.graphics


def _share(job: Job, uuid: str) -> int:
    return sum(it.memory_mib for it in _slices(job) if it.uuid == uuid)


def _beyond(
    job: Job, uuid: str, others: Iterable[Job], readings: Mapping[str, Reading], seen: GpuProcesses
) -> int:
    before, now = job.unattributed_mib.get(uuid), unattributed_mib(uuid, readings, seen)
    if before is None or now is None:
        return 0
    room = sum(max(_share(it, uuid) - (seen.used_mib(it.id, uuid) or 0), 0) for it in others)
    return now - before - room
