"""Feeds events to the broker, records what it decides, and applies its effects in order.

Every change is on disk before anyone acts on it, so that the next daemon can go on from it.

The clients that are connected to the daemon.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fenka import procfs
from fenka.core.inventory import Card
from fenka.core.ledger import Conflict
from fenka.core.request import Placement
from fenka.hardware.card_spec import NodeError
from fenka.hardware.nvml import NoDriver, Reading
from fenka.hardware.peer_credentials import PeerProcess
from fenka.isolation.device_access import DeviceAccessError
from fenka.isolation.lease_files import account_file
from fenka.mig.manager import InstanceManager
from fenka.workstation import files, protocol
from fenka.workstation.accepting import Caller
from fenka.workstation.admission import Admission
from fenka.workstation.broker import (
    GRACE_S,
    Broker,
    Effect,
    EvictGang,
    GrantLease,
    RecordEnd,
    RejectJob,
    RemoveLease,
    Terminate,
)
from fenka.workstation.cards import CardObserver
from fenka.workstation.event_batch import EventBatch
from fenka.workstation.files import History, ended_job
from fenka.workstation.instance_changes import InstanceChanges
from fenka.workstation.job import Job
from fenka.workstation.lease_processes import JobWatches, LeaseProcesses, ProcessScan, Terminator
from fenka.workstation.leases import Leases
from fenka.workstation.lifetime import log
from fenka.workstation.paths import Runtime
from fenka.workstation.protocol import GRANT_TTL_S, EndCause, EndedJob


class Client:
    """One connection, and the process that made it."""

    def __init__(self, writer: asyncio.StreamWriter, caller: Caller, quotas: Admission) -> None:
        self._quotas = quotas
        self.process = caller.process
        """It may have ended, while another process holds the connection."""
        self.account = caller.account
        """The user that it counts for in quotas and fair shares."""
        self.writer = writer
        self.job: str | None = None
        """The queue id, or the id of a gang's member, that this connection has requested."""

    @property
    def uid(self) -> int:
        """The user who connected."""
        return self.process.uid

    def made(self, job: Job) -> bool:
        """Return whether the process that connected is the one that requested the job."""
        return (self.process.pid, self.process.start_ticks) == (job.pid, job.start_ticks)

    def close(self) -> None:
        """Close the connection."""
        self.process.close()
        self.writer.close()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message without waiting.

        Queue positions are dropped while the client does not read, so that they cannot pile up. If the user's
        programs read too little, the connection is closed. That is noticed when it is read.
        """
        stuck = self.writer.transport.get_write_buffer_size() > 0
        if not (stuck and isinstance(message, protocol.JobQueued)):
            self.writer.write(protocol.encode(message) + b"\n")
            self._quotas.check_unread(self.account, self.writer.transport)


class Requester(Protocol):
    """The connection of a process that has requested a job."""

    job: str | None
    """The queue id, or the id of a gang's member."""

    def send(self, message: protocol.Message) -> None:
        """Queue a message without waiting."""


class ConnectedClients:
    """The connected clients by what they have requested: a queue id, or the id of a gang's member."""

    def __init__(self) -> None:
        self._clients: dict[str, Requester] = {}

    def add(self, job: str, client: Requester) -> None:
        """Register the client for a job. A client that was registered for it before is replaced."""
        client.job = job
        self._clients[job] = client

    def remove(self, client: Requester) -> bool:
        """Unregister a client. Return False if it was not, or another has taken its place."""
        if client.job is None or self._clients.get(client.job) is not client:
            return False
        del self._clients[client.job]
        return True

    def send(self, job: str, message: protocol.Message) -> None:
        """Send a message to the client of a job, if one is connected."""
        client = self._clients.get(job)
        if client:
            client.send(message)


RECHECK_DELAY_S = 0.3
"""After a job has ended and left memory in use: a driver frees a killed process's memory with some delay."""

EVICTION_SLACK_S = 5.0
"""After the grace period of an evicted gang, until the daemon itself ends what is left of it."""

WRITE_RETRY_S = 1.0
"""Between attempts to record what could not be written."""


@dataclass(slots=True)
class Controller:
    """Carries the jobs of one daemon from submission to their end."""

    runtime: Runtime
    broker: Broker
    clients: ConnectedClients
    leases: Leases
    cards: CardObserver
    processes: LeaseProcesses
    terminator: Terminator
    instances: InstanceManager
    history: History
    on_change: Callable[[], None] = lambda: None
    """Called whenever jobs have changed."""
    restrict_cards: Callable[[Job], None] = lambda _: None
    """Keeps a container from other cards than its slices'. Raises DeviceAccessError."""
    changes: InstanceChanges = field(init=False)
    _watches: JobWatches = field(init=False)
    _told: int = 0
    """The broker's changes that were told last."""
    _pending: list[Effect] = field(default_factory=list)
    """Effects that are not recorded, or not applied yet."""
    _uncertain: set[str] = field(default_factory=set)
    """Recovered jobs of which no process was certainly found: they may have ended before."""
    _retry: asyncio.TimerHandle | None = None
    _tasks: set[asyncio.Task[object]] = field(default_factory=set)
    _exited: dict[str, None] = field(default_factory=dict)
    """Jobs whose last process has ended."""
    _left: dict[str, None] = field(default_factory=dict)
    """Queue ids, or ids of gangs' members, that were requested by clients that are gone."""
    _ends: EventBatch = field(init=False)

    def __post_init__(self) -> None:
        self.changes = InstanceChanges(self.broker, self.instances, self.spawn, self._apply_later)
        self._watches = JobWatches(self._scan, self._on_last_exit, self.leave, self._on_status)
        self._ends = EventBatch(self._carry_out_ends, self.spawn)

    def close(self) -> None:
        """Record what has ended, and stop watching processes."""
        self._ends.finish()
        self._watches.keep(())

    # --- events -------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job], *, wait: bool) -> None:
        """Queue a job, or all members of a gang. Raises OSError."""
        effects = self.broker.submit(jobs, time.time(), wait=wait)
        self._watches.watch(self.broker.jobs_of(jobs[0].queue_id))
        self._apply(effects)

    def succeed(self, former: Job, job: Job) -> None:
        """Grant the kept slice of a container to its next start. Raises OSError."""
        effects = self.broker.succeed(former, job, time.time())
        self._watches.watch_job(job)
        self._apply(effects)

    def replay(self, queue_id: str) -> None:
        """Repeat the last report about a job to a client that has reconnected. Raises OSError."""
        self._apply(self.broker.replay(queue_id), save=False)

    def assign(self, job: Job, process: PeerProcess) -> None:
        """Make this process the one that starts a gang's member, and grant it the lease. Raises OSError."""
        job.pid, job.start_ticks = process.pid, process.start_ticks
        self._watches.watch_job(job)
        self.save()
        self.clients.send(job.id, self.leases.grant(job))

    def confirm(self, job: Job) -> None:
        """Record that the job's process is in its lease. Raises NotInLease, OSError."""
        if not job.cooperative and not job.in_container:
            self.processes.record_entry(job)
        self.broker.confirm(job.id, time.time())
        self.save()

    def place_container(self, job: Job) -> None:
        """Record that a container has its lease, whether its slice is granted or not. Raises OSError."""
        assert job.in_container
        if job.id not in self.broker.jobs:
            raise OSError("its slice was released before the container had started")
        job.in_container.started = True
        if job.state == "starting":
            self.confirm(job)
        else:
            self.save()

    def record_placement(self, job: Job, placement: Placement) -> None:
        """Record what a resized job holds now. Raises Conflict, OSError."""
        self._apply(self.broker.resize(job.id, placement, time.time()))

    def prioritize(self, queue_id: str, priority: int) -> None:
        """Record and apply the priority of a job, or of all members of a gang. Raises OSError."""
        self._apply(self.broker.prioritize(queue_id, priority, time.time()))

    def observe_cards(self) -> dict[str, Reading]:
        """Update the cards' health and unleased memory, and return their readings.

        Raises NoDriver, NodeError.
        """
        node, readings = self.cards.observe(self.instances.divided(self.broker.node))
        unleased = {
            # Instances share the problem of their card, which is said once.
            card.uuid: (card.parent is None and self.cards.problems.get(card.uuid))
            or self.cards.unleased(card.uuid).sentence()
            for card in node.cards
        }
        self._apply_later(self.broker.update_node(node, time.time(), unleased), save=False)
        self.changes.settle()
        return readings

    async def _scan(self) -> ProcessScan:
        """Scan for the processes of all leases, and note which recovered jobs have certainly not ended."""
        scan = await self.processes.scan()
        for job_id in [*self._uncertain]:
            job = self.broker.jobs.get(job_id)
            if job is None or self.processes.is_certain(job, scan.holders.get(job_id, [])):
                self._uncertain.discard(job_id)
        return scan

    def on_exit(self, job_id: str) -> None:
        """Release the job's slice. Memory that it has left in use counts as taken before anything is
        granted."""
        self._exited.pop(job_id, None)
        self._end([job_id], [])

    def _on_last_exit(self, job_id: str) -> None:
        self._exited[job_id] = None
        self._ends.on_event()

    def leave(self, queue_id: str) -> None:
        """Cancel soon what a client had requested that is gone, together with what others had."""
        self._left[queue_id] = None
        self._ends.on_event()

    def finish_ends(self) -> None:
        """Do now what :meth:`leave` and the ends of processes have left to be done."""
        self._ends.finish()

    def _on_status(self, job_id: str, status: int) -> None:
        """Record the wait status of the process that requested a job; others of it may live on."""
        job = self.broker.jobs.get(job_id)
        if job is not None and job.exit_status is None:
            job.exit_status = status
            self._ends.on_event()

    def _carry_out_ends(self) -> None:
        exited, left, self._exited, self._left = self._exited, self._left, {}, {}
        self._end(exited, left)

    def _end(self, ended: Iterable[str], cancelled: Collection[str]) -> None:
        """Release the slices of jobs that have ended, and cancel others, in one step."""
        ended = [*ended]
        for job_id in self._uncertain.intersection(ended):
            self._uncertain.discard(job_id)
            if job_id in self.broker.jobs:
                self.broker.jobs[job_id].mark_ending("unobserved")
        exits = [job_id for job_id in ended if not self._keep(job_id)]
        jobs = [self.broker.jobs[job_id] for job_id in exits if job_id in self.broker.jobs]
        running = [job for job in jobs if job.state == "running"]
        if running and self._observe_leftover(running):
            loop = asyncio.get_running_loop()
            loop.call_later(RECHECK_DELAY_S, self._observe_leftover, running)
        for queue_id in cancelled:
            for job in self.broker.jobs_of(queue_id):
                job.mark_ending("cancelled")
        self._apply_later(self.broker.end(exits, cancelled, time.time()))

    def _keep(self, job_id: str) -> bool:
        """Keep the slice of a container that has ended for its next start, if it is to be kept."""
        job = self.broker.jobs.get(job_id)
        if job is None or not job.in_container or not job.is_to_be_kept:
            return False
        keep_s = job.in_container.keep_s
        job.in_container.kept_until = time.time() + keep_s
        asyncio.get_running_loop().call_later(keep_s, self.on_exit, job_id)
        return True

    def _observe_leftover(self, jobs: Sequence[Job]) -> bool:
        """Observe the cards. Return whether any of the jobs' has memory in use by no lease."""
        try:
            self.observe_cards()
        except (NoDriver, NodeError):
            return False
        return any(card.unleased_mib for job in jobs for card in self._cards_of(job))

    def cancel(self, queue_id: str) -> None:
        """Remove what has not started, and terminate what runs."""
        self._end([], [queue_id])

    def reschedule(self) -> None:
        """Serve the queue again: caps or bookings have changed, or a booking has begun or ended."""
        self._apply_later(self.broker.reschedule(time.time()))

    def end_for_booking(self, job: Job, by: str, at: float) -> None:
        """End a job that would run into a booking, by SIGKILL when that begins. by: who has booked."""
        self.broker.end_by(job, at + GRACE_S)
        if job.end_cause == "exit":
            job.mark_ending("stopped", by)
            grace_s = max(at - time.time(), GRACE_S)
            self.spawn(self.terminator.terminate([job], grace_s))

    def cancel_pending(self, queue_ids: Sequence[str]) -> None:
        """Cancel pending jobs that a user has stopped, in one step, and report that to their clients."""
        for queue_id in queue_ids:
            self.clients.send(queue_id, protocol.JobRejected("stopped while it waited", final=True))
        self._apply_later(self.broker.end([], queue_ids, time.time()))

    # --- an earlier daemon's jobs ------------------------------------------------------------------

    def recover(self) -> None:
        """Take over recorded jobs whose processes live, and remove all other leases.

        Raises:
            InvalidState: Programs hold slices that cannot be accounted for on these cards.
            OSError: A file or process could not be read.
        """
        recorded = files.load_jobs(self.runtime)
        scan = self.processes.recover(recorded)
        jobs = [
            job
            for job in recorded
            if procfs.lives(job.pid, job.start_ticks) or scan.pids(job.id) or not scan.complete
        ]
        kept = {job.id for job in jobs}
        for job in recorded:
            if not (procfs.lives(job.pid, job.start_ticks) or scan.pids(job.id)):
                # It may have processes all the same, if some could not be read.
                job.mark_ending("unobserved")
            elif job.placement and not self.processes.is_certain(job, scan.holders.get(job.id, [])):
                self._uncertain.add(job.id)
            if job.id not in kept:
                self._record_end(job, time.time())
                self.broker.count_unobserved(job, time.time())
        self._remove_other_leases(recorded, jobs)
        self._recover_instances(jobs)
        try:
            self._restore(jobs)
        except Conflict as why:
            names = ", ".join(job.name for job in jobs if job.placement)
            raise files.InvalidState(
                f"programs still hold slices of other cards than these ({names}; {why}): start the "
                "daemon as it was started for them, or end them first"
            ) from None

    def _recover_instances(self, jobs: Sequence[Job]) -> None:
        """Finish what an earlier daemon has begun, and find the instances that jobs hold."""
        # Which processes are in leases is known when the jobs have been restored.
        node = self.cards.health(self.instances.divided(self.broker.node))
        self.broker.update_node(node, time.time())
        leased = {piece.uuid for job in jobs for piece in job.slices}
        found = self.instances.settle(node, leased)
        self.broker.update_instances(found.division, found.cards, time.time())

    def _remove_other_leases(self, recorded: Sequence[Job], kept: Sequence[Job]) -> None:
        known, keep = {job.id for job in recorded}, {job.id for job in kept}
        for lease in {path.name for path in self.runtime.leases.iterdir()} - keep:
            if lease not in known and (holders := self.processes.unrecorded_holders(lease)):
                if self.leases.intact(lease):
                    raise files.InvalidState(
                        f"processes {holders} hold a slice that {self.runtime.state} does not record: end "
                        "them first"
                    )
                log(
                    f"lease {lease} has lost its files and its record: processes {holders} go on, and what "
                    "they use of a card is used outside of all leases; `kill` ends them"
                )
            self.leases.remove(lease)

    def _restore(self, jobs: list[Job]) -> None:
        placed = [job for job in jobs if job.placement]
        self.broker.restore(jobs, time.time())
        with contextlib.suppress(NoDriver, NodeError):
            self.observe_cards()
        self._apply(self.broker.reschedule(time.time()))
        for queue_id in dict.fromkeys(job.queue_id for job in jobs):
            # The client of a pending job reconnects; until then its place is kept while it lives.
            self._watches.watch(self.broker.jobs_of(queue_id))
        for job in placed:
            self.leases.register(job)
            self._schedule_deadline(job)
            if job.state == "starting" and job.started:
                self._grant((job,))  # the daemon was killed before its program was let go
            elif job.state == "starting":
                self._schedule_expiry()
            elif not self.leases.intact(job.id):
                log(
                    f"{job.name} has lost its lease's files: it goes on with its limits, which cannot be "
                    "changed any more"
                )

    def save(self) -> None:
        """Record all jobs. Raises OSError."""
        if self._told != self.broker.changes:
            self._told = self.broker.changes
            self.on_change()
        files.save_jobs(self.runtime, list(self.broker.jobs.values()))
        self.broker.policies.on_saved()

    # --- effects ------------------------------------------------------------------------------------

    def _apply(self, effects: Sequence[Effect], *, save: bool = True) -> None:
        """Record what was decided, then apply it in order.

        Raises OSError, to be reported to the client. The effects are applied once the disk is writable again.
        """
        ends = [effect for effect in effects if isinstance(effect, RecordEnd)]
        for effect in ends:
            self._record_end(effect.job, effect.ended_at)
        self._pending += [effect for effect in effects if effect not in ends]
        try:
            if save or self._pending:
                self.save()
            while self._pending:
                self._apply_one(self._pending.pop(0))
        except OSError:
            if self._retry is None:
                loop = asyncio.get_running_loop()
                self._retry = loop.call_later(WRITE_RETRY_S, self._apply_later)
            raise
        finally:
            jobs = self.broker.jobs.values()
            self._watches.keep({name for job in jobs for name in (job.id, job.queue_id)})

    def _record_end(self, job: Job, ended_at: float) -> None:
        """Record how a job has ended. Before its slice is granted again, which changes the readings."""
        self.history.add(self._ended(job, ended_at))

    def _ended(self, job: Job, ended_at: float) -> EndedJob:
        cards: dict[str, Card] = {card.uuid: card for card in self.broker.node.cards}
        return ended_job(job, ended_at, cards, account_file(self.runtime.lease(job.id)))

    def jobs_of_this_boot(self) -> list[Job]:
        """Return the jobs that a restart of the machine ends: those that run, and pending ones with a log.

        Nobody is left who waits for a request in the background.
        """
        return [
            job
            for job in self.broker.jobs.values()
            if job.started_at is not None or (job.placement is None and job.spec.run)
        ]

    def ended_by_restart(self) -> list[EndedJob]:
        """Return what is to be recorded of the jobs that the machine ends if it restarts now."""
        return [
            msgspec.structs.replace(
                self._ended(job, time.time()), cause="unobserved", restarted=True
            )
            for job in self.jobs_of_this_boot()
        ]

    def _apply_later(self, effects: Sequence[Effect] = (), *, save: bool = True) -> None:
        """Apply effects of an event that no client can be told an error of."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        with contextlib.suppress(OSError):
            self._apply(effects, save=save)

    def _apply_one(self, effect: Effect) -> None:
        match effect:
            case GrantLease(jobs):
                # If it could not be recorded at first, it may have been cancelled since.
                if len(self.broker.present(jobs)) == len(jobs):
                    self._grant(jobs)
            case RemoveLease(job):
                self.processes.forget(job.id)
                self.leases.remove(job.id)
                if self.cards.waiting or any(card.parent for card in self._cards_of(job)):
                    # After all effects, which may grant it to the next job.
                    asyncio.get_running_loop().call_soon(self.changes.settle_later)
            case Terminate(job):
                self._terminate(job)
            case EvictGang(jobs):
                self._evict(jobs)
            case protocol.JobQueued():
                self.clients.send(effect.job_id, effect)
            case RejectJob(job, reason, final):
                self.clients.send(job.queue_id, protocol.JobRejected(reason, final))

    def _grant(self, jobs: Sequence[Job]) -> None:
        # First of all: if the leases cannot be written, the expiry takes back their slices.
        self._schedule_expiry()
        if self.changes.planned(jobs[0]):  # alone: the members of a gang cannot be in instances
            self.changes.create(jobs[0])
            return
        first = jobs[0]
        try:
            self.restrict_cards(first)
        except DeviceAccessError as why:
            self._reject_grant(first, str(why))
            return
        for job in jobs:
            self.leases.create(job)
            self._schedule_deadline(job)
        if first.in_container and first.in_container.started:
            self.confirm(first)
            return
        granted: protocol.Message = self.leases.grant(first)
        if first.gang:
            granted = protocol.GangGranted(first.gang.name, [job.id for job in jobs])
        self.clients.send(first.queue_id, granted)

    def _reject_grant(self, job: Job, reason: str) -> None:
        """Take back the slice of a container, which ends if it was held for the slice."""
        self.clients.send(job.queue_id, protocol.JobRejected(reason, final=True))
        if job.started:
            log(f"container {job.name} is ended: {reason}")
        # After all effects.
        asyncio.get_running_loop().call_soon(self.cancel, job.queue_id)

    def _cards_of(self, job: Job) -> list[Card]:
        uuids = {piece.uuid for piece in job.slices}
        return [card for card in self.broker.node.cards if card.uuid in uuids]

    # --- timers -------------------------------------------------------------------------------------

    def _schedule_deadline(self, job: Job) -> None:
        """Terminate the job when its time limit is over."""
        if job.deadline is not None:
            delay_s = max(job.deadline - time.time(), 0)
            asyncio.get_running_loop().call_later(delay_s, self._terminate, job, "time-limit")

    def _schedule_expiry(self) -> None:
        def expire() -> None:
            if expired := self.broker.expire(time.time()):
                self._apply_later(expired)

        asyncio.get_running_loop().call_later(GRANT_TTL_S + 1, expire)

    def _terminate(self, job: Job, cause: EndCause = "cancelled") -> None:
        job.mark_ending(cause)
        self.spawn(self.terminator.terminate([job], GRACE_S))

    def _evict(self, jobs: Sequence[Job]) -> None:
        """Have the process that started a gang end it; what is left after the grace period is ended here."""
        first = jobs[0]
        gang = first.gang
        if first.kept:
            asyncio.get_running_loop().call_soon(self.on_exit, first.id)
            return
        for job in jobs:
            job.mark_ending("evicted")
        if gang is None:
            self.spawn(self.terminator.terminate(jobs, first.spec.eviction_grace_s or 0))
            return
        procfs.send_signal(
            gang.pid,
            protocol.EVICTION_SIGNAL,
            lambda: (
                procfs.lives(gang.pid, gang.start_ticks)
                and first.uid in (0, procfs.real_uid(gang.pid))
            ),
        )

        async def end_rest() -> None:
            await asyncio.sleep((first.spec.eviction_grace_s or 0) + EVICTION_SLACK_S)
            await self.terminator.terminate(jobs, 0)

        self.spawn(end_rest())

    def spawn(self, work: Coroutine[None, None, object]) -> None:
        """Run a coroutine to its end, beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        # The loop itself keeps only a weak reference.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
