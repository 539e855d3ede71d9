"""The lifecycle of a job: events in, effects out. No socket, clock, file or process in here.

    ask ──> waiting ──> starting ──> running ──> (gone)
               │            │           │
               └────────────┴───────────┴──> gone at any time: stopped, died, or its grant expired

`waiting` is in the queue; `starting` holds its slice, assumed, until the client confirms that it has
entered the lease or the assumption expires; `running` holds it until the last process ends. The daemon
feeds events in, writes `jobs` to disk, and then carries out the effects in order.
"""

from dataclasses import dataclass

import msgspec

from fenka.core.cards import Node
from fenka.core.evaluate import Policy, never_fits
from fenka.core.ledger import Conflict, Ledger
from fenka.core.queue import WaitingQueue
from fenka.core.requests import Placement, Request
from fenka.isolation.control import Mode
from fenka.workstation.protocol import Isolation, JobState

GRANT_EXPIRES_S = 30.0
"""A client enters its lease within milliseconds; half a minute covers a machine that swaps."""


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


@dataclass(frozen=True, slots=True)
class Start:
    """The job has its slice: make the lease's files and tell the client."""

    job: Job


@dataclass(frozen=True, slots=True)
class Wait:
    """Tell the client where it stands (position 1 is served next) and why it waits."""

    job: Job
    position: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Deny:
    """The job gets no slice; `final` if it never could."""

    job: Job
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """The job held a slice and is gone: remove the lease's files."""

    job: Job


Effect = Start | Wait | Deny | Drop


class UnknownJob(Exception):
    """No job has this id or name; the message says so."""


class Broker:
    """Who holds what on one node, and who waits."""

    def __init__(self, node: Node, policy: Policy) -> None:
        self.node, self.policy = node, policy
        self.jobs: dict[str, Job] = {}
        self.ledger = Ledger((node,))
        self.queue = WaitingQueue()
        self._told: dict[str, tuple[int, int, str]] = {}

    def ask(self, job: Job, now: float, *, wait: bool = True) -> list[Effect]:
        """A new request. It is served at once, queued, or denied."""
        impossible = never_fits(job.request, (self.node,))
        if impossible is not None:
            return [Deny(job, impossible.sentence(), final=True)]
        self._enqueue(job)
        effects = self._serve(now)
        if job.state == "waiting" and not wait:
            reason = self._told.get(job.id, (0, 0, ""))[2]
            own = [e for e in effects if e.job is not job]
            return [*own, *self._forget(job, now), Deny(job, reason, final=False)]
        return effects

    def confirm(self, job_id: str, now: float) -> bool:
        """The client has entered its lease. False if the grant had expired: it must not go on."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "starting":
            return False
        self.ledger.confirm(job_id)
        job.state, job.started_at, job.expires_at = "running", now, None
        return True

    def gone(self, job_id: str, now: float) -> list[Effect]:
        """The job ended, was stopped, or its client went away. Unknown ids are nothing."""
        job = self.jobs.get(job_id)
        return self._forget(job, now) if job else []

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
        job.placement = placement
        return self._serve(now)

    def expire(self, now: float) -> list[Effect]:
        """Take back what was granted and never confirmed."""
        effects: list[Effect] = []
        for job_id in self.ledger.expire(now):
            job = self.jobs.pop(job_id)
            effects += [Drop(job), Deny(job, "the grant expired before the program started", False)]
        return effects + self._serve(now)

    def restore(self, jobs: list[Job], now: float) -> list[Effect]:
        """Take over what a former daemon recorded; the caller has dropped those whose processes ended.

        Raises fenka.core.ledger.Conflict if the cards have changed so that a lease no longer fits.
        """
        for job in jobs:
            if job.placement is None:
                self._enqueue(job)
                continue
            self.jobs[job.id] = job
            if job.state == "starting":
                job.expires_at = now + GRANT_EXPIRES_S
            self.ledger.adopt(job.id, job.placement, job.expires_at)
        return self._serve(now)

    def renew(self, node: Node, now: float) -> list[Effect]:
        """The same cards, of which some have fallen sick or recovered. Who holds a slice keeps it."""
        if node == self.node:
            return []
        self.node = node
        return self._serve(now)

    def resume(self, job_id: str) -> list[Effect]:
        """A client that waited, or was granted, when the daemon went away is back: say it again."""
        job = self.jobs[job_id]
        if job.state != "waiting":
            return [Start(job)]
        position, length, reason = self._told[job_id]
        return [Wait(job, position, length, reason)]

    def by_name(self, name: str) -> Job:
        """The job with this name or id. Raises UnknownJob."""
        for job in self.jobs.values():
            if name in (job.name, job.id):
                return job
        raise UnknownJob(f"no job is called {name}: `fenka ps` lists them")

    def standing(self, job_id: str) -> tuple[int, str] | None:
        """Position and reason of a job that waits, else None."""
        told = self._told.get(job_id)
        return (told[0], told[2]) if told else None

    def _enqueue(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.queue.add(job.id, job.request, job.requested_at)

    def _forget(self, job: Job, now: float) -> list[Effect]:
        del self.jobs[job.id]
        self._told.pop(job.id, None)
        if job.state == "waiting":
            self.queue.remove(job.id)
            return self._serve(now)
        self.ledger.release(job.id)
        return [Drop(job), *self._serve(now)]

    def _serve(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        step = self.queue.serve(self.ledger, self.policy, (self.node,))
        for job_id, placement in step.placed:
            job = self.jobs[job_id]
            job.placement, job.state = placement, "starting"
            job.expires_at = now + GRANT_EXPIRES_S
            self.ledger.assume(job_id, placement, job.expires_at)
            self.queue.remove(job_id)
            self._told.pop(job_id, None)
            effects.append(Start(job))
        for place, (job_id, reason) in enumerate(step.waiting, start=1):
            told = (place, len(step.waiting), reason)
            if self._told.get(job_id) != told:
                self._told[job_id] = told
                effects.append(Wait(self.jobs[job_id], *told))
        return effects
