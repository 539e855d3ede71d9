"""Observes the machine's cards: their health, the processes on them, and jobs that exceed their limits.

The processes on the cards, as the driver reports them, sorted by lease.

Detects jobs that exceed their limits, by the same thresholds as the node program.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fenka.core.inventory import Card, InstanceId, Node
from fenka.core.mig.instances import is_planned
from fenka.core.request import Slice
from fenka.core.units import MIB
from fenka.hardware import card_lock
from fenka.hardware.card_errors import FALLEN_OFF, NO_SIZE, CardErrors
from fenka.hardware.nvml import GpuProcess, Hardware, Reading
from fenka.hardware.xids import XidLog
from fenka.isolation import driver_usage, pid_namespaces
from fenka.isolation.driver_usage import (
    Activity,
    ActivityTracker,
    UnleasedMemory,
    UnleasedProgram,
    UnleasedTracker,
    measure,
)
from fenka.procfs import process_name, real_uid
from fenka.workstation.job import Job
from fenka.workstation.lifetime import log

RESET_HOW = "reset it, then `fenka daemon --card-reset {index}`"
"""The way to clear the error of a card."""

ACTIVITY_PERIOD_S = 1.9
"""Between two looks at what jobs use of their cards' time: the driver's samples cover a second."""


@dataclass(frozen=True, slots=True)
class UnleasedProcess:
    """A process that uses a card and is in no lease."""

    process: GpuProcess
    uid: int


@dataclass(frozen=True, slots=True)
class GpuProcesses:
    """The processes on the cards at one moment."""

    by_lease: Mapping[str, Sequence[GpuProcess]] = field(default_factory=dict)
    unleased: Sequence[UnleasedProcess] = ()

    def used_mib(self, lease: str, uuid: str) -> int | None:
        """Return the memory that a lease holds of a card; None if the driver does not report it."""
        processes = self.by_lease.get(lease, ())
        return _total_mib([process for process in processes if process.uuid == uuid])


class SliceActivity:
    """Remembers what jobs have used of their cards' time."""

    def __init__(
        self, busy_s: Callable[[str, str], float | None], placed: Callable[[], Sequence[Job]]
    ) -> None:
        """Args:
        busy_s: Returns how long a job has used a card, by job id and card UUID; None if that is not known.
        placed: Returns the jobs that hold slices.
        """
        self._tracker, self._placed = ActivityTracker(busy_s), placed
        self._known: Mapping[tuple[str, str], Activity] = {}
        self._observed_at = -ACTIVITY_PERIOD_S

    def observe(self) -> Mapping[tuple[str, str], Activity]:
        """Return the activity by job id and card UUID, of a look that is at most one period old."""
        now = time.monotonic()
        if now - self._observed_at >= ACTIVITY_PERIOD_S:
            self._observed_at = now
            slices = ((job, piece) for job in self._placed() for piece in job.slices)
            self._known = self._tracker.observe(
                {(job.id, piece.uuid): job.started_at for job, piece in slices}
            )
        return self._known


@dataclass(frozen=True, slots=True)
class CardsSample:
    """The driver's report of one moment.

    Attributes:
        violations: sentences by job id.
        unleased: what is in use by no lease, by card UUID.
        activity: by job id and card UUID.
        xids: the last ones of each card in sentences, by UUID.
    """

    readings: Mapping[str, Reading]
    processes: GpuProcesses
    violations: Mapping[str, list[str]]
    unleased: Mapping[str, UnleasedMemory]
    activity: Mapping[tuple[str, str], Activity] = field(default_factory=dict)
    xids: Mapping[str, list[str]] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why cards are unhealthy, by UUID."""


def problems_of(job: Job, problems: Mapping[str, str]) -> list[str]:
    """Return a sentence for each unhealthy card of a job. problems: by the UUID of the card or instance."""
    found = {piece.card: problems[piece.uuid] for piece in job.slices if piece.uuid in problems}
    return [
        f"is on card {index}, which takes nothing new: {problem}"
        for index, problem in found.items()
    ]


def group_by_lease(
    processes: Iterable[GpuProcess], lease_of: Callable[[int], str | None]
) -> GpuProcesses:
    """Sort the driver's processes by lease. Those that have ended meanwhile are left out."""
    by_lease: dict[str, list[GpuProcess]] = {}
    unleased = []
    for process in processes:
        lease, uid = lease_of(process.pid), real_uid(process.pid)
        if lease is not None:
            by_lease.setdefault(lease, []).append(process)
        elif uid is not None:
            unleased.append(UnleasedProcess(process, uid))
    return GpuProcesses(by_lease, unleased)


def unleased_memory(
    card: Card, used_mib: int | None, slices_mib: int, processes: GpuProcesses, *, names_all: bool
) -> UnleasedMemory:
    """Return the memory of a card that is in use by no lease. The arguments are as `measure` has them."""
    leased_mib = [
        process.used_mib
        for in_lease in processes.by_lease.values()
        for process in in_lease
        if process.uuid == card.uuid
    ]
    programs = [
        UnleasedProgram(
            process_name(outside.process.pid),
            outside.process.used_mib,
            outside.process.graphics,
        )
        for outside in processes.unleased
        if outside.process.uuid == card.uuid
    ]
    return measure(card.memory_mib, used_mib, leased_mib, slices_mib, programs, names_all=names_all)


def _total_mib(processes: Sequence[GpuProcess]) -> int | None:
    sizes = [process.used_mib for process in processes]
    return None if None in sizes else sum(size or 0 for size in sizes)


_Slices = Mapping[tuple[str, str], tuple[Job, Slice]]
"""Slices by job id and card UUID."""


class ViolationDetector:
    """Compares what the driver reports with the jobs' limits, sample after sample."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._compute = (
            driver_usage.MemoryViolations(),
            driver_usage.ComputeViolations(),
        )
        self._clock, self._sampled_at = clock, clock()
        self._busy_ns: dict[tuple[str, str], int] = {}
        self.counts = {"memory_limit": 0, "compute_limit": 0, "unmanaged_process": 0}
        """How often each kind was seen so far."""

    def sample(
        self,
        jobs: Collection[Job],
        processes: GpuProcesses,
        contexts_mib: Mapping[str, int],
        busy_ns: Callable[[str, str], int],
    ) -> dict[str, list[str]]:
        """Take one sample, and return sentences about violations by job id.

        Args:
            jobs: The jobs that hold slices.
            processes: The processes on the cards.
            contexts_mib: The size of a process's context, by card UUID.
            busy_ns: Returns how long a job has used a card, by job id and card UUID.
        """
        slices: _Slices = {
            (job.id, piece.uuid): (job, piece) for job in jobs for piece in job.slices
        }
        sentences: dict[str, list[str]] = {}
        for key in sorted(self._memory.observe(_exceeds_memory(slices, processes, contexts_mib))):
            job, piece = slices[key]
            self.counts["memory_limit"] += 1
            sentences.setdefault(job.id, []).append(
                f"holds {processes.used_mib(*key)} MiB of card {piece.card} by the driver's account, "
                f"more than its {piece.memory_mib} MiB"
            )
        for key in sorted(self._compute.observe(*self._compute_excess(slices, busy_ns))):
            job, piece = slices[key]
            self.counts["compute_limit"] += 1
            sentences.setdefault(job.id, []).append(
                f"has had more than its {job.spec.gpu.core} % of the time of card {piece.card} by the "
                "driver's account"
            )
        for job in jobs:
            pids = (process.pid for process in processes.by_lease.get(job.id, ()))
            if job.shim_inode and (unmanaged := driver_usage.without_shim(pids, job.shim_inode)):
                self.counts["unmanaged_process"] += len(unmanaged)
                sentences.setdefault(job.id, []).append(
                    f"uses a card without fenka's library, so without its limit: process "
                    f"{', '.join(map(str, unmanaged))}"
                )
        return sentences

    def _compute_excess(
        self, slices: _Slices, busy_ns: Callable[[str, str], int]
    ) -> tuple[float, dict[tuple[str, str], float]]:
        """Return the seconds since the last sample, and by how much each slice exceeded its share in them."""
        now, before = self._clock(), self._busy_ns
        elapsed_s, self._sampled_at = now - self._sampled_at, now
        limited = [
            key
            for key, (job, _) in slices.items()
            if job.spec.gpu.core and job.spec.gpu.core_mode == "hard"
        ]
        self._busy_ns = {key: busy_ns(*key) for key in limited}
        shares = driver_usage.time_shares(self._busy_ns, before, elapsed_s)
        return elapsed_s, {
            key: share - slices[key][0].spec.gpu.core / 100 for key, share in shares.items()
        }


def _exceeds_memory(
    slices: _Slices, processes: GpuProcesses, contexts_mib: Mapping[str, int]
) -> dict[tuple[str, str], bool]:
    return {
        key: (processes.used_mib(*key) or 0) * MIB
        > driver_usage.memory_allowance(
            piece.memory_mib * MIB, contexts_mib.get(piece.uuid, 0) * MIB
        )
        for key, (_, piece) in slices.items()
    }


@dataclass(eq=False)
class CardObserver:
    """Reads the driver for one daemon.

    Attributes:
        _hardware: The driver.
        _lease_of: Returns the lease of a process.
        _busy_ns: Returns how long a lease has used a card, by lease and card UUID.
        _leased_mib: Returns the memory of all slices of a card or instance, by its UUID.
    """

    _hardware: Hardware
    _lease_of: Callable[[int], str | None]
    _busy_ns: Callable[[str, str], int]
    _leased_mib: Callable[[str], int]
    dividing: set[str] = field(default_factory=set)
    """Cards that are being divided otherwise: nothing is granted on them."""
    waiting: set[str] = field(default_factory=set)
    """Cards whose layout waits for something to end: nothing is granted that would delay it."""
    _detector: ViolationDetector = field(default_factory=ViolationDetector)
    _violations: Mapping[str, list[str]] = field(default_factory=dict)
    xids: XidLog = field(default_factory=XidLog)
    processes: GpuProcesses = field(default_factory=GpuProcesses)
    """Those of the last check for violations."""
    _locked_by_root: set[str] = field(default_factory=set)
    _unleased: UnleasedTracker = field(default_factory=UnleasedTracker)
    errors: CardErrors = field(default_factory=CardErrors)
    """Reported errors of cards, and of instances by `InstanceId.device`."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why cards and instances are unhealthy, by UUID, as of the last look."""
    _missing: set[str] = field(default_factory=set)
    """Cards that the driver did not list at the last look."""

    def observe(self, node: Node) -> tuple[Node, dict[str, Reading]]:
        """Return the node with each card's health and unleased memory, and the readings by UUID.

        A card is unhealthy if the driver does not list it, reports no memory of it, or has reported an error.
        So is one that root's daemon has locked, or that is being divided. One whose layout waits is cordoned.
        Raises NoDriver, NodeError.
        """
        readings = self._measure_unleased(node)
        return self.health(node, readings), readings

    def health(self, node: Node, readings: Mapping[str, Reading] | None = None) -> Node:
        """Return what `observe` does without another look at unleased memory."""
        readings = self._hardware.readings() if readings is None else readings
        locked: set[str] = {
            card.uuid
            for card in node.cards
            if card.parent is None and card_lock.locked_by_root(card)
        }
        if locked > self._locked_by_root:
            log(
                f"root's daemon has locked {len(locked)} of this daemon's cards: no new leases on them"
            )
        self._locked_by_root = locked
        missing: set[str] = {
            card.uuid for card in node.cards if card.parent is None and card.uuid not in readings
        }
        self.errors.clear_returned(self._missing - missing)
        self._missing = missing
        problems = {card.uuid: self._problem(card, readings, locked) for card in node.cards}
        for card in node.cards:
            if card.parent is not None and problems.get(card.parent):
                problems[card.uuid] = problems[card.parent]
        self.problems = {uuid: problem for uuid, problem in problems.items() if problem}
        cards = (
            replace(
                card,
                healthy=card.uuid not in self.problems,
                cordoned=card.cordoned if card.parent else card.uuid in self.waiting,
                unleased_mib=unleased.total_mib,
                drawn_mib=unleased.drawn_mib,
            )
            for card in node.cards
            for unleased in [self._unleased.counted(card.uuid)]
        )
        return replace(node, cards=tuple(cards))

    def _problem(self, card: Card, readings: Mapping[str, Reading], locked: Collection[str]) -> str:
        """Return why a card, or an instance by itself, is unhealthy; nothing if it is healthy."""
        if card.uuid not in readings and not is_planned(card.uuid):
            return FALLEN_OFF
        if card.uuid in locked:
            return "root's daemon leases it"
        if card.uuid in self.dividing:
            return "it is being divided into MIG instances"
        key = InstanceId(card.parent, card.start, card.profile).device if card.parent else card.uuid
        if error := self.errors.get(key):
            return f"{error}: {RESET_HOW.format(index=card.index)}"
        if not card.memory_mib and not card.divided:
            return f"{NO_SIZE}: `fenka daemon --restart --card-memory 96GiB`"
        return ""

    def unleased(self, uuid: str) -> UnleasedMemory:
        """Return the memory of a card or instance that counted as in use by no lease at the last look."""
        return self._unleased.shown(uuid)

    def _measure_unleased(self, node: Node) -> dict[str, Reading]:
        before, processes = self._hardware.readings(), self.gpu_processes()
        readings = self._hardware.readings()
        # Inside, the driver names only processes of this namespace.
        names_all = pid_namespaces.in_initial_namespace()
        for card in node.cards:
            if card.divided or card.uuid not in before.keys() & readings.keys():
                continue
            # Memory that is allocated or freed meanwhile belongs to a process that may be missing from the
            # list.
            used = before[card.uuid].used_mib, readings[card.uuid].used_mib
            used_mib = min((mib for mib in used if mib is not None), default=None)
            slices_mib = self._leased_mib(card.uuid)
            measured = unleased_memory(card, used_mib, slices_mib, processes, names_all=names_all)
            self._unleased.update(card.uuid, card.memory_mib, measured, time.monotonic())
        return readings

    def gpu_processes(self) -> GpuProcesses:
        """Return the processes on the cards, by lease. Raises NoDriver."""
        return group_by_lease(self._hardware.processes(), self._lease_of)

    def sample(self, readings: Mapping[str, Reading]) -> CardsSample:
        """Return what the driver and the last check for violations report. Raises NoDriver."""
        unleased = {uuid: self.unleased(uuid) for uuid in readings}
        xids = {uuid: self.xids.last(uuid) for uuid in readings}
        return CardsSample(
            readings,
            self.gpu_processes(),
            self._violations,
            unleased,
            xids=xids,
            problems=self.problems,
        )

    @property
    def violations(self) -> Mapping[str, int]:
        """How often each kind of violation was seen so far."""
        return self._detector.counts

    async def check_violations(self, jobs: Collection[Job]) -> None:
        """Look once for jobs that exceed their limits. Raises NoDriver."""
        self.processes = self.gpu_processes()
        self._violations = await asyncio.to_thread(
            self._detector.sample,
            jobs,
            self.processes,
            self._hardware.context_mib,
            self._busy_ns,
        )
