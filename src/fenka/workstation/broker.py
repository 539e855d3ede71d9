"""The lifecycle of a job: events in, effects out. No socket, clock, file or process in here.

    ask ──> waiting ──> starting ──> running ──> (gone)
               │            │           │  └──> held ──> (gone)
               └────────────┴───────────┴──> gone at any time: stopped, died, or its grant expired

`waiting` is in the queue; `starting` holds its slice, assumed, until the client confirms that it has
entered the lease or the assumption expires; `running` holds it until the last process ends. `held` keeps
the slice of a job without processes while its memory is still in use outside of every lease. The daemon
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
from fenka.core.request import Placement, Request
from fenka.core.usage import EmptyUsage
from fenka.isolation.control import Mode
from fenka.workstation.protocol import Isolation, JobState

GRANT_EXPIRES_S = 30.0
"""A client enters its lease within milliseconds; half a minute covers a machine that swaps."""

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL, where nobody says otherwise."""


MOST_HELD = 3
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
    wanted: str
    command: list[str]
    directory: str
    kind: str
    isolation: Isolation
    requested_at: float
    state: JobState = "waiting"
    started_at: float | None = None
    expires_at: float | None = None
    placement: Placement | None = None
    core: int = 0
    """Percent of each card's time, 0 = not limited."""
    core_mode: Mode = "hard"
    priority: int = 0
    """The larger is served first."""
    time_limit_s: float | None = None
    """Ended so many seconds after the grant, whatever it does; None = not limited."""
    ends_at: float | None = None
    """When that is, once it is granted."""
    gang: Gang | None = None
    rank: int = 0
    """Of its gang's members, from 0."""
    held: str = ""
    """Why its slice is kept after its last process has ended."""
    shim: int = 0
    """Inode of the shim that its processes have mapped; 0 = not known."""
    unnamed_mib: dict[str, int] = {}
    """By card UUID, memory that belonged to no process when the slice was granted."""
    user_namespaces: bool = False
    """Whether its programs may make user namespaces of their own."""
    namespace: int = 0
    """The number of its lease's user namespace, once it runs; see members.py."""

    @property
    def entry(self) -> str:
        """Under which id it is in the queue: a gang is there once."""
        return self.gang.id if self.gang else self.id

    @property
    def title(self) -> str:
        """What its user calls it: the gang's name for each of its members."""
        return self.gang.name if self.gang else self.name


@dataclass(frozen=True, slots=True)
class Start:
    """The job, or all of a gang, has its slice: make the leases' files and tell the client."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Tell the client where it stands (position 1 is served next) and why it waits."""

    job: Job
    position: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Deny:
    """The job, or its whole gang, gets nothing; `final` if it never could."""

    job: Job
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """The job held a slice and is gone: remove the lease's files."""

    job: Job


@dataclass(frozen=True, slots=True)
class End:
    """The job runs and must not: end its processes. It holds its slice until they are gone."""

    job: Job


Effect = Start | Wait | Deny | Drop | End


class UnknownJob(FenkaError):
    """No job has this id or name; the message says so."""


class Broker:
    """Who holds what on one node, and who waits."""

    def __init__(self, node: Node, policy: Policy, fairness: Fairness | None = None) -> None:
        self.node, self.policy = node, policy
        fairness = fairness or Fairness()
        self.uses = UsageHistory(fairness)
        """What users, by their uid, have had."""
        self.jobs: dict[str, Job] = {}
        self.ledger = Ledger((node,))
        self._backfill = Backfill((node,), policy, fairness)
        self._entries: dict[str, list[Job]] = {}
        """A single job under its id, a gang's members that are left, by rank, under the gang's."""
        self._queue: dict[str, PendingRequest] = {}
        self._held: dict[str, Allocation] = {}
        self._told: dict[str, tuple[QueueStatus, int, str]] = {}
        """How each entry that waits stands, in a queue of what length, and the reason it was given."""

    def ask(self, jobs: Sequence[Job], now: float, *, wait: bool = True) -> list[Effect]:
        """A new request, of one job or of all members of a gang. It is served at once, queued, or denied."""
        first = jobs[0]
        impossible = self._impossible([job.request for job in jobs])
        if impossible:
            return [Deny(first, impossible, final=True)]
        self._enqueue(jobs)
        effects = self._serve(now)
        if first.state == "waiting" and not wait:
            reason = self._told[first.entry][2]
            others = [e for e in effects if not (isinstance(e, Wait) and e.job is first)]
            gone = [*self._forget(jobs, now), *self._serve(now)]
            return [*others, *gone, Deny(first, reason, final=False)]
        return effects

    def confirm(self, job_id: str, now: float) -> bool:
        """The client has entered its lease. False if the grant had expired: it must not go on."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "starting":
            return False
        self.ledger.confirm(job_id)
        job.state, job.started_at, job.expires_at = "running", now, None
        return True

    def gone(self, job_id: str, now: float, held: str = "") -> list[Effect]:
        """The last process of the job has ended. Unknown ids are nothing.

        Args:
            job_id: The job's id.
            now: Unix seconds.
            held: Why its slice cannot be given away, or nothing. To be called again until there is nothing.
        """
        job = self.jobs.get(job_id)
        if job is None:
            return []
        if held and job.state in ("running", "held"):
            job.state, job.held = "held", held
            assert job.placement is not None
            self._hold(job, job.placement, now)
            return self._serve(now)
        # Nobody waits for a part of a gang.
        jobs = self.of(job.entry) if job.state == "waiting" else [job]
        return [*self._forget(jobs, now), *self._serve(now)]

    def disband(self, name: str, now: float) -> list[Effect]:
        """Who asked went away, or was told to: what has not started never will, what runs has to end.

        name: an entry's id, or that of a member that was granted. Unknown ones are nothing.
        """
        return [*self._disband(self.of(name), now), *self._serve(now)]

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
        self._hold(job, placement, now)
        return self._serve(now)

    def expire(self, now: float) -> list[Effect]:
        """Take back what was granted and never confirmed; of a gang all, if one member is late."""
        late = [
            it for it in self.jobs.values() if it.expires_at is not None and it.expires_at <= now
        ]
        effects: list[Effect] = []
        for entry in dict.fromkeys(job.entry for job in late):
            jobs = self.of(entry)
            effects += self._disband(jobs, now)
            effects.append(Deny(jobs[0], "the grant expired before the program started", False))
        return effects + self._serve(now)

    def restore(self, jobs: list[Job], now: float) -> list[Effect]:
        """Take over what a former daemon recorded; the caller has dropped those whose processes ended.

        Raises fenka.core.ledger.Conflict if the cards have changed so that a lease no longer fits.
        """
        waiting: dict[str, list[Job]] = {}
        for job in sorted(jobs, key=lambda job: job.rank):
            if job.placement is None:
                waiting.setdefault(job.entry, []).append(job)
                continue
            self._enter(job)
            if job.state == "starting":
                job.expires_at = now + GRANT_EXPIRES_S
            self.ledger.adopt(job.id, job.placement, job.expires_at)
            self._hold(job, job.placement, now)
        for members in waiting.values():
            self._enqueue(members)
        return self._serve(now)

    def renew(self, node: Node, now: float) -> list[Effect]:
        """The same cards, of which some have fallen sick or recovered. Who holds a slice keeps it."""
        if node == self.node:
            return []
        self.node = node
        self._backfill.set_nodes((node,))
        return self._serve(now)

    def resume(self, entry: str) -> list[Effect]:
        """A client that waited, or was granted, when the daemon went away is back: say it again."""
        jobs = self._entries[entry]
        if jobs[0].state != "waiting":
            return [Start(tuple(jobs))]
        standing, length, reason = self._told[entry]
        return [Wait(jobs[0], standing.position, length, reason)]

    def of(self, name: str) -> list[Job]:
        """The jobs of an entry, by its id; the one job that has this id; or none."""
        if name in self._entries:
            return list(self._entries[name])
        return [self.jobs[name]] if name in self.jobs else []

    def named(self, name: str) -> list[Job]:
        """The job with this name or id; for a gang's, all its members. Raises UnknownJob."""
        for job in self.jobs.values():
            if name in (job.title, job.entry):
                return self.of(job.entry)
            if name in (job.name, job.id):
                return [job]
        raise UnknownJob(f"no job is called {name}: `fenka ps` lists them")

    def standing(self, job: Job) -> QueueStatus | None:
        """How a job that waits stands, else None."""
        told = self._told.get(job.entry)
        return told[0] if told else None

    def reason(self, job: Job) -> str:
        """Return why a job waits, or why its slice is held; else nothing."""
        told = self._told.get(job.entry)
        return told[2] if told else job.held

    def _impossible(self, requests: list[Request]) -> str:
        """Why these can never be granted; empty if they can."""
        alone = never_fits(requests[0], (self.node,))
        if alone is not None:
            return alone.sentence()
        if len(requests) == 1:
            return ""
        cards = tuple(replace(card, healthy=True) for card in self.node.cards)
        plan = place_gang(EmptyUsage(), requests, self.policy, (replace(self.node, cards=cards),))
        return f"{plan.hint}, even if nobody else ran" if isinstance(plan, Unschedulable) else ""

    def _enter(self, job: Job) -> None:
        self.jobs[job.id] = job
        self._entries.setdefault(job.entry, []).append(job)

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        first = jobs[0]
        for job in jobs:
            self._enter(job)
        self._queue[first.entry] = PendingRequest(
            first.entry,
            tuple(job.request for job in jobs),
            first.requested_at,
            first.priority,
            str(first.uid),
            None if first.time_limit_s is None else first.time_limit_s + GRACE_S,
        )

    def _hold(self, job: Job, placement: Placement, now: float) -> None:
        job.placement = placement
        deadline = None if job.ends_at is None or job.held else job.ends_at + GRACE_S
        self._held[job.id] = Allocation(placement, deadline, str(job.uid))
        cards = cards_of((placement,), {it.index: it for it in self.node.cards})
        since = now if job.started_at is None else job.started_at
        self.uses.start(job.id, str(job.uid), cards, job.requested_at, since, now)

    def _disband(self, jobs: Sequence[Job], now: float) -> list[Effect]:
        running = [job for job in jobs if job.state == "running"]
        return [
            *map(End, running),
            *self._forget([job for job in jobs if job.state not in ("running", "held")], now),
        ]

    def _forget(self, jobs: Sequence[Job], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for job in jobs:
            del self.jobs[job.id]
            self._queue.pop(job.entry, None)
            self._told.pop(job.entry, None)
            self._entries[job.entry].remove(job)
            if not self._entries[job.entry]:
                del self._entries[job.entry]
            if job.placement is not None:
                self.ledger.release(job.id)
                del self._held[job.id]
                self.uses.stop(job.id, now, now)
                effects.append(Drop(job))
        return effects

    def _serve(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        step = self._backfill.serve(
            self._queue.values(), self._held.values(), now, self.ledger.totals(), self.uses
        )
        for entry, placements in step.placed:
            jobs = self._entries[entry]
            for job, placement in zip(jobs, placements, strict=True):
                job.state, job.expires_at = "starting", now + GRANT_EXPIRES_S
                job.ends_at = None if job.time_limit_s is None else now + job.time_limit_s
                self.ledger.assume(job.id, placement, job.expires_at)
                self._hold(job, placement, now)
            del self._queue[entry]
            self._told.pop(entry, None)
            effects.append(Start(tuple(jobs)))
        length = len(step.pending)
        held = [f"{job.name} has ended, but {job.held}" for job in self.jobs.values() if job.held]
        for standing in step.pending:
            before = self._told.get(standing.id)
            reason = "; ".join([standing.reason, *held[:MOST_HELD]])
            self._told[standing.id] = standing, length, reason
            told = standing.position, length, reason
            if before is None or (before[0].position, *before[1:]) != told:
                effects.append(Wait(self._entries[standing.id][0], *told))
        return effects
