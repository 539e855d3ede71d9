"""The lifecycle of a job: events in, effects out. No socket, clock, file or process in here.

    ask ──> waiting ──> starting ──> running ──> (gone)
               │            │           │  └──> completing ──> (gone)
               └────────────┴───────────┴──> gone at any time: stopped, died, or its grant expired

`waiting` is in the queue; `starting` holds its slice, assumed, until the client confirms that it has
entered the lease or the assumption expires; `running` holds it until the last process ends. `completing`
keeps the slice of a job without processes while its memory is still in use outside of every lease. The daemon
feeds events in, writes `jobs` to disk, and then carries out the effects in order.

The members of a gang are jobs of their own, with one entry in the queue: they wait, and are granted,
together or not at all. From then on each goes its own way; who has started them ends them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from fenka.core.backfill import Backfill
from fenka.core.errors import FenkaError
from fenka.core.evaluate import Policy, never_fits
from fenka.core.fairness import Fairness, UsageHistory, cards_of
from fenka.core.gangs import place_gang
from fenka.core.inventory import Node
from fenka.core.ledger import Conflict, Ledger
from fenka.core.queue import Allocation, PendingRequest, QueueStatus
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request, Slice
from fenka.core.usage import EmptyUsage
from fenka.isolation.control import ComputeMode
from fenka.workstation.protocol import Isolation, JobState

GRANT_TTL_S = 30.0
"""A client enters its lease within milliseconds; half a minute covers a machine that swaps."""

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL, where nobody says otherwise."""


MAX_RETAINED_SHOWN = 3
"""Slices that are held, of how many a waiter is told why."""


class Gang(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the members of a gang have in common. pid, start_ticks: of the process that starts them."""

    id: str
    name: str
    size: int
    pid: int
    start_ticks: int


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """One request of one process, as it is kept on disk. Times are Unix seconds."""

    id: str
    name: str
    uid: int
    pid: int
    start_ticks: int
    request: Request
    summary: str
    command: list[str]
    directory: str
    kind: str
    isolation: Isolation
    requested_at: float
    state: JobState = "waiting"
    started_at: float | None = None
    grant_expires_at: float | None = None
    placement: Placement | None = None
    compute_percent: int = 0
    """Percent of each card's time, 0 = not limited."""
    compute_mode: ComputeMode = "hard"
    priority: int = 0
    """The larger is served first."""
    time_limit_s: float | None = None
    """Ended so many seconds after the grant, whatever it does; None = not limited."""
    deadline: float | None = None
    """When that is, once it is granted."""
    gang: Gang | None = None
    rank: int = 0
    """Of its gang's members, from 0."""
    retained: str = ""
    """Why its slice is kept after its last process has ended."""
    shim_inode: int = 0
    """Inode of the shim that its processes have mapped; 0 = not known."""
    unattributed_mib: dict[str, int] = {}
    """By card UUID, memory that belonged to no process when the slice was granted."""
    allow_user_namespaces: bool = False
    """Whether its programs may make user namespaces of their own."""
    user_namespace: int = 0
    """The number of its lease's user namespace, once it runs; see lease_processes.py."""

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices it holds; none while it is pending."""
        return self.placement.slices if self.placement else ()

    @property
    def queue_id(self) -> str:
        """Under which id it is in the queue: a gang is there once."""
        return self.gang.id if self.gang else self.id

    @property
    def display_name(self) -> str:
        """What its user calls it: the gang's name for each of its members."""
        return self.gang.name if self.gang else self.name


@dataclass(frozen=True, slots=True)
class GrantLease:
    """The job, or all of a gang, has its slice: make the leases' files and tell the client."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class ReportQueued:
    """Tell the client where it stands (position 1 is served next) and why it waits."""

    job: Job
    position: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class RejectJob:
    """The job, or its whole gang, gets nothing; `final` if it never could."""

    job: Job
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class RemoveLease:
    """The job held a slice and is gone: remove the lease's files."""

    job: Job


@dataclass(frozen=True, slots=True)
class Terminate:
    """The job runs and must not: end its processes. It holds its slice until they are gone."""

    job: Job


Effect = GrantLease | ReportQueued | RejectJob | RemoveLease | Terminate


class UnknownJob(FenkaError):
    """No job has this id or name; the message says so."""


class Broker:
    """Who holds what on one node, and who waits."""

    def __init__(self, node: Node, policy: Policy, fairness: Fairness | None = None) -> None:
        self.node, self.policy = node, policy
        fairness = fairness or Fairness()
        self.usage_history = UsageHistory(fairness)
        """What users, by their uid, have had."""
        self.jobs: dict[str, Job] = {}
        self.ledger = Ledger((node,))
        self._backfill = Backfill((node,), policy, fairness)
        self._entries: dict[str, list[Job]] = {}
        """A single job under its id, a gang's members that are left, by rank, under the gang's."""
        self._queue: dict[str, PendingRequest] = {}
        self._held: dict[str, Allocation] = {}
        self._reported: dict[str, tuple[QueueStatus, int, str]] = {}
        """How each entry that waits stands, in a queue of what length, and the reason it was given."""

    def submit(self, jobs: Sequence[Job], now: float, *, wait: bool = True) -> list[Effect]:
        """A new request, of one job or of all members of a gang. It is served at once, queued, or denied."""
        first = jobs[0]
        impossible = self._never_fits_reason([job.request for job in jobs])
        if impossible:
            return [RejectJob(first, impossible, final=True)]
        self._enqueue(jobs)
        effects = self._schedule(now)
        if first.state == "waiting" and not wait:
            reason = self._reported[first.queue_id][2]
            others = [e for e in effects if not (isinstance(e, ReportQueued) and e.job is first)]
            gone = [*self._remove(jobs, now), *self._schedule(now)]
            return [*others, *gone, RejectJob(first, reason, final=False)]
        return effects

    def confirm(self, job_id: str, now: float) -> bool:
        """The client has entered its lease. False if the grant had expired: it must not go on."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "starting":
            return False
        self.ledger.confirm(job_id)
        job.state, job.started_at, job.grant_expires_at = "running", now, None
        return True

    def on_exit(self, job_id: str, now: float, held: str = "") -> list[Effect]:
        """The last process of the job has ended. Unknown ids are nothing.

        Args:
            job_id: The job's id.
            now: Unix seconds.
            held: Why its slice cannot be given away, or nothing. To be called again until there is nothing.
        """
        job = self.jobs.get(job_id)
        if job is None:
            return []
        if held and job.state in ("running", "completing"):
            job.state, job.retained = "completing", held
            assert job.placement is not None
            self._allocate(job, job.placement, now)
            return self._schedule(now)
        # Nobody waits for a part of a gang.
        jobs = self.jobs_of(job.queue_id) if job.state == "waiting" else [job]
        return [*self._remove(jobs, now), *self._schedule(now)]

    def cancel(self, name: str, now: float) -> list[Effect]:
        """Who asked went away, or was told to: what has not started never will, what runs has to end.

        name: an entry's id, or that of a member that was granted. Unknown ones are nothing.
        """
        return [*self._cancel(self.jobs_of(name), now), *self._schedule(now)]

    def resize(self, job_id: str, placement: Placement, now: float) -> list[Effect]:
        """A running job holds this from now on, on the same cards. Raises Conflict, and then it has what it
        had; who waits may be served by what became free, and is not asked when it grows into what is free."""
        job = self.jobs[job_id]
        assert job.placement is not None
        self.ledger.release(job_id)
        try:
            self.ledger.adopt(job_id, placement)
        except Conflict:
            self.ledger.adopt(job_id, job.placement)
            raise
        self._allocate(job, placement, now)
        return self._schedule(now)

    def expire(self, now: float) -> list[Effect]:
        """Take back what was granted and never confirmed; of a gang all, if one member is late."""
        late = [
            it
            for it in self.jobs.values()
            if it.grant_expires_at is not None and it.grant_expires_at <= now
        ]
        effects: list[Effect] = []
        for entry in dict.fromkeys(job.queue_id for job in late):
            jobs = self.jobs_of(entry)
            effects += self._cancel(jobs, now)
            effects.append(
                RejectJob(jobs[0], "the grant expired before the program started", False)
            )
        return effects + self._schedule(now)

    def restore(self, jobs: list[Job], now: float) -> list[Effect]:
        """Take over what a former daemon recorded; the caller has dropped those whose processes ended.

        Raises fenka.core.ledger.Conflict if the cards have changed so that a lease no longer fits.
        """
        waiting: dict[str, list[Job]] = {}
        for job in sorted(jobs, key=lambda job: job.rank):
            if job.placement is None:
                waiting.setdefault(job.queue_id, []).append(job)
                continue
            self._add(job)
            if job.state == "starting":
                job.grant_expires_at = now + GRANT_TTL_S
            self.ledger.adopt(job.id, job.placement, job.grant_expires_at)
            self._allocate(job, job.placement, now)
        for members in waiting.values():
            self._enqueue(members)
        return self._schedule(now)

    def update_node(self, node: Node, now: float) -> list[Effect]:
        """The same cards, of which some have fallen sick or recovered. Who holds a slice keeps it."""
        if node == self.node:
            return []
        self.node = node
        self._backfill.set_nodes((node,))
        return self._schedule(now)

    def replay(self, entry: str) -> list[Effect]:
        """A client that waited, or was granted, when the daemon went away is back: say it again."""
        jobs = self._entries[entry]
        if jobs[0].state != "waiting":
            return [GrantLease(tuple(jobs))]
        standing, length, reason = self._reported[entry]
        return [ReportQueued(jobs[0], standing.position, length, reason)]

    def jobs_of(self, name: str) -> list[Job]:
        """The jobs of an entry, by its id; the one job that has this id; or none."""
        if name in self._entries:
            return list(self._entries[name])
        return [self.jobs[name]] if name in self.jobs else []

    def present(self, jobs: Sequence[Job]) -> list[Job]:
        """Return those of the jobs that have not ended."""
        return [job for job in jobs if job.id in self.jobs]

    def placed(self) -> list[Job]:
        """Return the jobs that hold slices."""
        return [job for job in self.jobs.values() if job.placement]

    def find(self, name: str) -> list[Job]:
        """The job with this name or id; for a gang's, all its members. Raises UnknownJob."""
        for job in self.jobs.values():
            if name in (job.display_name, job.queue_id):
                return self.jobs_of(job.queue_id)
            if name in (job.name, job.id):
                return [job]
        raise UnknownJob(f"no job is called {name}: `fenka ps` lists them")

    def queue_status(self, job: Job) -> QueueStatus | None:
        """How a job that waits stands, else None."""
        told = self._reported.get(job.queue_id)
        return told[0] if told else None

    def reason(self, job: Job) -> str:
        """Return why a job waits, or why its slice is held; else nothing."""
        told = self._reported.get(job.queue_id)
        return told[2] if told else job.retained

    def _never_fits_reason(self, requests: list[Request]) -> str:
        """Why these can never be granted; empty if they can."""
        alone = never_fits(requests[0], (self.node,))
        if alone is not None:
            return alone.sentence()
        if len(requests) == 1:
            return ""
        cards = tuple(replace(card, healthy=True) for card in self.node.cards)
        plan = place_gang(EmptyUsage(), requests, self.policy, (replace(self.node, cards=cards),))
        return f"{plan.hint}, even if nobody else ran" if isinstance(plan, Unschedulable) else ""

    def _add(self, job: Job) -> None:
        self.jobs[job.id] = job
        self._entries.setdefault(job.queue_id, []).append(job)

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        first = jobs[0]
        for job in jobs:
            self._add(job)
        self._queue[first.queue_id] = PendingRequest(
            first.queue_id,
            tuple(job.request for job in jobs),
            first.requested_at,
            first.priority,
            str(first.uid),
            None if first.time_limit_s is None else first.time_limit_s + GRACE_S,
        )

    def _allocate(self, job: Job, placement: Placement, now: float) -> None:
        job.placement = placement
        deadline = None if job.deadline is None or job.retained else job.deadline + GRACE_S
        self._held[job.id] = Allocation(placement, deadline, str(job.uid))
        cards = cards_of((placement,), {it.uuid: it for it in self.node.cards})
        since = now if job.started_at is None else job.started_at
        self.usage_history.start(job.id, str(job.uid), cards, job.requested_at, since, now)

    def _cancel(self, jobs: Sequence[Job], now: float) -> list[Effect]:
        running = [job for job in jobs if job.state == "running"]
        return [
            *map(Terminate, running),
            *self._remove([job for job in jobs if job.state not in ("running", "completing")], now),
        ]

    def _remove(self, jobs: Sequence[Job], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for job in jobs:
            del self.jobs[job.id]
            self._queue.pop(job.queue_id, None)
            self._reported.pop(job.queue_id, None)
            self._entries[job.queue_id].remove(job)
            if not self._entries[job.queue_id]:
                del self._entries[job.queue_id]
            if job.placement is not None:
                self.ledger.release(job.id)
                del self._held[job.id]
                self.usage_history.stop(job.id, now, now)
                effects.append(RemoveLease(job))
        return effects

    def _schedule(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        step = self._backfill.serve(
            self._queue.values(), self._held.values(), now, self.ledger, self.usage_history
        )
        for entry, placements in step.placed:
            jobs = self._entries[entry]
            for job, placement in zip(jobs, placements, strict=True):
                job.state, job.grant_expires_at = "starting", now + GRANT_TTL_S
                job.deadline = None if job.time_limit_s is None else now + job.time_limit_s
                self.ledger.assume(job.id, placement, job.grant_expires_at)
                self._allocate(job, placement, now)
            del self._queue[entry]
            self._reported.pop(entry, None)
            effects.append(GrantLease(tuple(jobs)))
        length = len(step.pending)
        held = [
            f"{job.name} has ended, but {job.retained}"
            for job in self.jobs.values()
            if job.retained
        ]
        for standing in step.pending:
            before = self._reported.get(standing.id)
            reason = "; ".join([standing.reason, *held[:MAX_RETAINED_SHOWN]])
            self._reported[standing.id] = standing, length, reason
            told = standing.position, length, reason
            if before is None or (before[0].position, *before[1:]) != told:
                effects.append(ReportQueued(self._entries[standing.id][0], *told))
        return effects
