"""Decides the lifecycle of jobs: events in, effects out, without sockets, clocks, files or processes.

    submit ──> waiting ──> starting ──> running ──> (removed)
                  └────────────┴───────────┴──> removed at any time: stopped, died, or its grant expired

- `waiting`: the job is in the queue.
- `starting`: its slice is assumed until the client confirms that it has entered the lease, or the grant
  expires.
- `running`: it holds its slice until its last process ends. Memory that is then still in use counts as used
by no lease, like that of programs without a lease.

The members of a gang are separate jobs with one entry in the queue. They are granted together or not at all;
after that each has its own lifecycle, and the process that started them ends them.

The MIG instances among a node's cards: those that exist, and those that are only planned for jobs.

Selects the gangs to evict for pending requests of higher priority. Pure.

Only trainings and containers that use what others leave idle are evicted (`JobSpec.eviction_grace_s`), always
as a whole.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from fenka.core import queue
from fenka.core.backfill import (
    NO_RULES,
    Backfill,
    PassRules,
    Timeline,
    complete,
    held_by_user,
)
from fenka.core.errors import FenkaError
from fenka.core.evaluate import Policy, never_fits, restored
from fenka.core.gangs import place_gang
from fenka.core.inventory import WHOLE_COMPUTE, Card, DeviceId, Node
from fenka.core.ledger import Conflict, Ledger
from fenka.core.mig.instances import (
    Division,
    InstancePlacer,
    is_planned,
    never_fits_instance,
    usable_mib,
)
from fenka.core.preemption import Preemptor, VictimCandidate, cheapest_victims
from fenka.core.reasons import ReasonCode, Unschedulable
from fenka.core.request import Placement, Request, Slice
from fenka.core.usage import EmptyUsage, UsageOverlay, UsageView
from fenka.core.users.bookings import BookedCards, Occurrence, free_from, name_cards
from fenka.core.users.rules import Policies, UserRules, never_allowed
from fenka.workstation.job import Job
from fenka.workstation.protocol import GRANT_TTL_S, JobQueued


def with_instances(node: Node, instances: Iterable[Card], held: Collection[str]) -> Node:
    """Return the node with these instances in place of the former ones. Planned ones stay while held.

    Args:
        node: the cards, with their former instances.
        instances: all that exist.
        held: devices that jobs hold.
    """
    former = {card.uuid: card for card in node.cards}
    existing = (
        replace(card, unleased_mib=former.get(card.uuid, card).unleased_mib) for card in instances
    )
    cards = (card for card in node.cards if card.parent is None)
    planned = (card for card in node.cards if is_planned(card.uuid) and card.uuid in held)
    return replace(node, cards=(*cards, *existing, *planned))


def without_plans(node: Node, held: Collection[str]) -> Node:
    """Return the node without planned instances that no job holds."""
    existing = (card for card in node.cards if card.parent and not is_planned(card.uuid))
    return with_instances(node, existing, held)


def with_uuids(node: Node, uuids: Mapping[DeviceId, DeviceId]) -> Node:
    """Return the node with planned instances as the devices that have been created for them."""
    cards = (replace(card, uuid=uuids.get(card.uuid, card.uuid)) for card in node.cards)
    return replace(node, cards=tuple(cards))


def placed_on_uuids(placement: Placement, uuids: Mapping[DeviceId, DeviceId]) -> Placement:
    """Return the placement on the same devices."""
    slices = (
        replace(slice_, uuid=uuids.get(slice_.uuid, slice_.uuid)) for slice_ in placement.slices
    )
    return replace(placement, slices=tuple(slices))


@dataclass(frozen=True, slots=True)
class Holders:
    """The jobs that hold slices.

    Attributes:
        view: What they hold.
        jobs: They.
        evicted: The ids of those that are being evicted.
    """

    view: UsageView
    jobs: Collection[Job]
    evicted: Collection[str]


def gangs_to_evict(
    pending: Iterable[tuple[queue.QueueStatus, queue.PendingRequest]],
    holders: Holders,
    node: Node,
    policy: Policy,
    now: float,
    rules: PassRules = NO_RULES,
) -> list[str]:
    """Return the queue ids of the gangs to evict: for each request the cheapest that make room for it.

    A request for which evicted gangs will make room evicts no others.

    Args:
        pending: The requests in their order. Those without a reservation are considered when they have one.
        holders: The jobs that hold slices.
        node: This machine's cards.
        policy: How requests are placed.
        now: Unix seconds.
        rules: The limits of users.
    """
    evictable = {
        job.id: job
        for job in holders.jobs
        if job.spec.eviction_grace_s is not None and job.placement
    }
    if not evictable:
        return []
    view, chosen = UsageOverlay(holders.view), dict[str, None]()
    left = {id_: job for id_, job in evictable.items() if id_ not in holders.evicted}
    _remove(view, (job for id_, job in evictable.items() if id_ in holders.evicted))
    reservations: list[queue.Reservation] = []
    for status, request in pending:
        if status.reservation is None:
            continue
        deadline = None if request.time_limit_s is None else now + request.time_limit_s
        blocked = (
            reservation.cards for reservation in reservations if reservation.blocks(deadline)
        )
        victims = cheapest_victims(
            view,
            [_candidate(job) for job in left.values()],
            Preemptor(request.requests, request.priority),
            (node,),
            policy,
            rules.blocked(request.user, deadline).union(*blocked),
        )
        if victims is None:
            reservations.append(status.reservation)
            continue
        gone = [left.pop(id_) for id_ in victims.ids]
        _remove(view, gone)
        for placement in victims.placements:
            view.add(placement)
        chosen |= dict.fromkeys(job.queue_id for job in gone)
    return list(chosen)


def _candidate(job: Job) -> VictimCandidate:
    assert job.placement
    return VictimCandidate(job.id, job.placement, job.spec.priority, job.queue_id)


def _remove(view: UsageOverlay, jobs: Iterable[Job]) -> None:
    for job in jobs:
        assert job.placement
        view.remove(job.placement)


GRACE_S = 10.0
"""Between SIGTERM and SIGKILL, unless a request says otherwise."""

MAX_UNLEASED_SHOWN = 3
"""Cards with memory that no lease uses that the reason of a pending job names at most."""


class UnknownJob(FenkaError):
    """No job has this id or name."""


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Make the leases of a job, or of all members of a gang, and send the grant to the client."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class RejectJob:
    """Reject a job or its gang. final: it could never be granted."""

    job: Job
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class RemoveLease:
    """Remove the files of a job's lease."""

    job: Job


@dataclass(frozen=True, slots=True)
class Terminate:
    """End the job's processes. It holds its slice until they have ended."""

    job: Job


@dataclass(frozen=True, slots=True)
class EvictGang:
    """Have a gang ended by the process that started it, or end a container, which is one job.

    The jobs hold their slices until then.
    """

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """Record that a job has ended, while its lease's files are still there."""

    job: Job
    ended_at: float


Effect = EvictGang | GrantLease | JobQueued | RecordEnd | RejectJob | RemoveLease | Terminate


class Broker:
    """Keeps the jobs of one node: their slices and their places in the queue. All times are Unix seconds."""

    def __init__(
        self,
        node: Node,
        policy: Policy,
        fairness: queue.Fairness | None = None,
        division: Division | None = None,
        policies: Policies | None = None,
    ) -> None:
        self.node, self.policy = node, policy
        self.policies = policies or Policies()
        """Caps and bookings of users, who are named by their uid."""
        self.division = division or Division()
        """The geometries of the divided cards, and the instances on them beside the node's."""
        fairness = fairness or queue.Fairness()
        self.usage_history = queue.UsageHistory(fairness)
        """Recent use of cards by user, for fair sharing. Users are named by their uid."""
        self._unleased: Mapping[DeviceId, str] = {}
        """The uses of cards without a lease, in a sentence for each."""
        self.jobs: dict[str, Job] = {}
        self.ledger = Ledger((node,))
        self._backfill, self._fairness = Backfill(policy), fairness
        self._entries: dict[str, list[Job]] = {}
        """Jobs by queue id: a single job, or the remaining members of a gang in the order of their ranks."""
        self._queue: dict[str, queue.PendingRequest] = {}
        self._allocations: dict[str, queue.Allocation] = {}
        self._reported: dict[str, tuple[queue.QueueStatus, JobQueued]] = {}
        """By queue id, the last status of each pending entry, and what its client was sent."""
        self.on_granted: Callable[[Sequence[Job], float], object] = lambda *_: None
        """Called with jobs that are granted together, and when."""
        self.changes = 0
        """Grows with each change of a job, and whenever the queue is served again."""
        self._evicted: set[str] = set()
        """Jobs that are being evicted. The next daemon selects them again."""
        self._rules = UserRules(self.policies, node, (), (), 0)
        """Those of the last scheduling pass."""

    def submit(self, jobs: Sequence[Job], now: float, *, wait: bool = True) -> list[Effect]:
        """Grant, queue or reject a job, or all members of a gang.

        wait: whether to queue what cannot be granted now, instead of rejecting it.
        """
        first = jobs[0]
        first.waits = wait
        requests = [job.request for job in jobs]
        impossible = self._never_fits_reason(requests) or never_allowed(
            *(self.policies, str(first.account), requests, first.spec.time_limit_s, self.node)
        )
        if impossible:
            return [RejectJob(first, impossible, final=True)]
        self._enqueue(jobs)
        effects = self._schedule(now, evict=wait)
        if first.state == "waiting" and not wait:
            reason = self.reason(first)
            others = [
                e for e in effects if not (isinstance(e, JobQueued) and e.job_id == first.queue_id)
            ]
            removed = [*self._remove(jobs, now, record=False), *self._schedule(now)]
            return [*others, *removed, RejectJob(first, reason, final=False)]
        return effects

    def succeed(self, former: Job, job: Job, now: float) -> list[Effect]:
        """Grant the kept slice of a container to its next start, which requests the same."""
        placement = former.placement
        assert placement is not None
        effects = self._remove([former], now)
        self._add(job)
        self._assume(job, placement, now)
        return [*effects, GrantLease((job,)), *self._schedule(now)]

    def _assume(self, job: Job, placement: Placement, now: float) -> None:
        job.state, job.grant_expires_at = "starting", now + GRANT_TTL_S
        limit_s = job.spec.time_limit_s
        job.deadline = None if limit_s is None else now + limit_s
        self.ledger.assume(job.id, placement, job.grant_expires_at)
        self._allocate(job, placement, now)

    def confirm(self, job_id: str, now: float) -> bool:
        """Record that the client has entered its lease. Return False if the grant had expired."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "starting":
            return False
        self.ledger.confirm(job_id)
        self.changes += 1
        job.state, job.started_at, job.grant_expires_at = "running", now, None
        return True

    def on_exit(self, job_id: str, now: float) -> list[Effect]:
        """Handle the end of a job's last process. Unknown ids are ignored."""
        return self.end([job_id], [], now)

    def end(self, exited: Iterable[str], cancelled: Iterable[str], now: float) -> list[Effect]:
        """Handle ends of several jobs' last processes, and cancel entries like `cancel`, in one step."""
        effects: list[Effect] = []
        for job in [self.jobs[job_id] for job_id in exited if job_id in self.jobs]:
            # A gang is never granted in part.
            jobs = self.jobs_of(job.queue_id) if job.state == "waiting" else [job]
            effects += self._remove(self.present(jobs), now)
        for name in cancelled:
            effects += self._cancel(self.jobs_of(name), now)
        return [*effects, *self._schedule(now)] if effects else []

    def cancel(self, name: str, now: float) -> list[Effect]:
        """Remove an entry's or granted member's jobs that have not started, and terminate those that run."""
        return self.end([], [name], now)

    def resize(self, job_id: str, placement: Placement, now: float) -> list[Effect]:
        """Change what a running job holds of its cards.

        Freed amounts are granted to pending jobs. `growth_rejection` is for the caller to ask. Raises
        Conflict, and then changes nothing.
        """
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

    def prioritize(self, queue_id: str, priority: int, now: float) -> list[Effect]:
        """Change the priority of a job, or of all members of a gang, and serve the queue in its new order.

        A job that runs has it from then on when jobs to evict are selected.
        """
        for job in self.jobs_of(queue_id):
            job.spec = msgspec.structs.replace(job.spec, priority=priority)
        if queue_id in self._queue:
            self._queue[queue_id] = replace(self._queue[queue_id], priority=priority)
        return self._schedule(now)

    def growth_rejection(self, job: Job, after: Sequence[Slice], *, reserved: bool = False) -> str:
        """Return why a job may not grow to these slices, which the ledger would admit; empty if it may.

        It may not have what no lease uses, nor what is reserved for a pending request before it ends or is
        booked then, nor more than its user's caps.

        reserved: whether it may have what is reserved or booked, and exceed caps.
        """
        cards = {card.uuid: card for card in self.node.cards}
        deadline = None if job.deadline is None else job.deadline + GRACE_S
        for before, piece in zip(job.slices, after, strict=True):
            if piece.memory_mib <= before.memory_mib and piece.compute <= before.compute:
                continue
            card, more_mib = cards[piece.uuid], piece.memory_mib - before.memory_mib
            if more_mib > 0 and self.leased_mib(piece.uuid) + more_mib > card.available_mib:
                return "; ".join(
                    ["its cards have no room for that now", *self._unleased_on({card.index})]
                )
            for status, report in () if reserved else self._reported.values():
                kept = status.reservation
                if kept and piece.uuid in kept.cards and kept.blocks(deadline):
                    return f"card {piece.card} is reserved for {report.name}, which has waited before it"
        if reserved:
            return ""
        return self._rules.growth_rejection(str(job.account), job.slices, after, deadline)

    def expire(self, now: float) -> list[Effect]:
        """Cancel grants that were not confirmed in time. A gang is cancelled if one member is late."""
        expired = [
            job.queue_id
            for job in self.jobs.values()
            if job.grant_expires_at is not None
            and job.grant_expires_at <= now
            and not any(is_planned(piece.uuid) for piece in job.slices)  # being created
        ]
        effects: list[Effect] = []
        for queue_id in dict.fromkeys(expired):
            jobs = self.jobs_of(queue_id)
            effects += self._cancel(jobs, now)
            effects.append(
                RejectJob(jobs[0], "the grant expired before the program started", False)
            )
        return [*effects, *self._schedule(now)] if effects else []

    def restore(self, jobs: list[Job], now: float) -> None:
        """Take over the living jobs that an earlier daemon recorded. Nothing is granted until `reschedule`.

        Raises Conflict if the cards have changed so that a lease no longer fits.
        """
        pending: dict[str, list[Job]] = {}
        for job in sorted(jobs, key=lambda job: job.rank):
            if any(is_planned(piece.uuid) for piece in job.slices):
                job.state, job.placement = "waiting", None  # its instance does not exist
            if job.placement is None:
                pending.setdefault(job.queue_id, []).append(job)
                continue
            self._add(job)
            if job.state == "starting":
                job.grant_expires_at = now + GRANT_TTL_S
            self.ledger.adopt(job.id, job.placement, job.grant_expires_at)
            self._allocate(job, job.placement, now)
        for members in pending.values():
            self._enqueue(members)

    def update_node(
        self, node: Node, now: float, unleased: Mapping[DeviceId, str] | None = None
    ) -> list[Effect]:
        """Update the health of the cards and what no lease uses of them. Jobs keep their slices.

        unleased: what uses cards without a lease, or why they are unhealthy, by UUID; None for no change.
        """
        unleased = self._unleased if unleased is None else unleased
        if (node, unleased) == (self.node, self._unleased):
            return []
        self._unleased = unleased
        self._set_node(node)
        return self._schedule(now)

    def update_instances(
        self, division: Division, instances: Sequence[Card], now: float
    ) -> list[Effect]:
        """Update which instances there are. Those that are only planned stay while a job holds them.

        instances: all that exist and are the daemon's; and those that a job still names.
        """
        node = with_instances(self.node, instances, self.held_devices())
        if (node, division) == (self.node, self.division):
            return []
        self.division = division
        self._set_node(node)
        return self._schedule(now)

    def bind_instances(self, uuids: Mapping[DeviceId, DeviceId], now: float) -> None:
        """Give planned instances the UUIDs of the devices that have been created for them."""
        self._set_node(with_uuids(self.node, uuids))
        for job in self.placed():
            assert job.placement is not None
            placement = placed_on_uuids(job.placement, uuids)
            if placement != job.placement:
                self.ledger.release(job.id)
                if job.grant_expires_at is not None:
                    job.grant_expires_at = now + GRANT_TTL_S
                self.ledger.adopt(job.id, placement, job.grant_expires_at)
                self._allocate(job, placement, now)

    def requeue(self, job: Job, reason: str, now: float) -> list[Effect]:
        """Return a granted job to its place in the queue: its instances could not be created.

        It is placed again when the instances are updated or anything else changes.
        """
        self._release(job, now)
        job.state, job.placement, job.grant_expires_at, job.deadline = "waiting", None, None, None
        self._queue[job.queue_id] = self._pending_request([job])
        self._set_node(without_plans(self.node, self.held_devices()))
        report = JobQueued(job.queue_id, job.display_name, 1, len(self._queue), reason)
        status = queue.QueueStatus(job.queue_id, 1, Unschedulable(hint=reason), None)
        self._reported[job.queue_id] = status, report
        return [report]

    def reschedule(self, now: float) -> list[Effect]:
        """Serve the queue again."""
        return self._schedule(now)

    def replay(self, queue_id: str) -> list[Effect]:
        """Repeat the last report, for a client that has reconnected."""
        jobs = self._entries[queue_id]
        if jobs[0].state != "waiting":
            return [GrantLease(tuple(jobs))]
        return [self._reported[queue_id][1]]

    def jobs_of(self, name: str) -> list[Job]:
        """Return the jobs of a queue entry, or the one job with this id; none if unknown."""
        if name in self._entries:
            return list(self._entries[name])
        return [self.jobs[name]] if name in self.jobs else []

    def present(self, jobs: Sequence[Job]) -> list[Job]:
        """Return those of the jobs that have not ended."""
        return [job for job in jobs if job.id in self.jobs]

    def placed(self) -> list[Job]:
        """Return the jobs that hold slices."""
        return [job for job in self.jobs.values() if job.placement]

    def leased(self) -> list[Job]:
        """Return the jobs that have a lease. A container has one before its slice is granted."""
        return [job for job in self.jobs.values() if job.placement or job.in_container]

    def held_devices(self) -> set[str]:
        """Return the UUIDs of the cards and instances that jobs hold slices of."""
        return {piece.uuid for job in self.placed() for piece in job.slices}

    def leased_mib(self, device: str) -> int:
        """Return the memory of all slices of a card or instance."""
        return self.ledger.card_usage(self.node.name, DeviceId(device)).memory_mib

    def usable_mib(self, card: Card) -> int:
        """Return the memory of a card; of a divided one what its largest instance has."""
        return usable_mib(card, self.division)

    def free_mib(self, card: Card) -> int:
        """Return the memory of a card that new slices can have; 0 if it takes none."""
        usage = self.ledger.card_usage(self.node.name, card.uuid)
        if not card.open or usage.whole:
            return 0
        return max(card.available_mib - usage.memory_mib, 0)

    def compute_of(self, uuid: str) -> int:
        """Return the compute of a card or instance, in percent of the whole card."""
        return next((card.compute for card in self.node.cards if card.uuid == uuid), WHOLE_COMPUTE)

    def find(self, name: str, uid: int) -> list[Job]:
        """Return the job with this name or id, or all members of a gang. Raises UnknownJob.

        uid: whose command names it. Each user has names of their own; those of others come after.
        """
        named = [job for job in self.jobs.values() if name in job.names]
        for candidates in (
            [job for job in named if job.uid == uid],
            [job for job in named if name in (job.id, job.queue_id)],
            named,
        ):
            entries = list(dict.fromkeys(job.queue_id for job in candidates))
            if len(entries) > 1:
                raise UnknownJob(
                    f"jobs of {len(entries)} users are called {name}: name one by its id, "
                    f"{' or '.join(entries[:5])} (`fenka ps -o json`)"
                )
            if candidates:
                job = candidates[0]
                member = name not in (job.display_name, job.queue_id)
                return [job] if member else self.jobs_of(job.queue_id)
        raise UnknownJob(f"no job is called {name}: `fenka ps` lists them")

    def has(self, name: str, uid: int) -> bool:
        """Return whether a job of this user has this name or id."""
        return any(name in job.names and job.uid == uid for job in self.jobs.values())

    @property
    def pending(self) -> list[queue.QueueStatus]:
        """Return the status of each pending request, in the order of the queue."""
        statuses = (status for status, _ in self._reported.values())
        return sorted(statuses, key=lambda status: status.position)

    def requests_of(self, queue_id: str) -> tuple[Request, ...]:
        """Return what a pending entry requests."""
        return self._queue[queue_id].requests

    def queue_status(self, job: Job) -> queue.QueueStatus | None:
        """Return the queue status of a pending job, else None."""
        reported = self._reported.get(job.queue_id)
        return reported[0] if reported else None

    def reason(self, job: Job) -> str:
        """Return why a job is pending, else nothing."""
        reported = self._reported.get(job.queue_id)
        return reported[1].reason if reported else ""

    def count_unobserved(self, job: Job, now: float) -> None:
        """Count the card time of a job that has ended while no daemon ran."""
        if job.placement is not None:
            cards = queue.cards_of((job.placement,), self.node.cards)
            since = now if job.started_at is None else job.started_at
            self.policies.card_time.hold(job.id, str(job.account), cards, since, now)
            self.policies.card_time.release(job.id, now)

    def name_cards(self, occurrences: Iterable[Occurrence], now: float) -> list[BookedCards]:
        """Return the cards that these bookings would have beside all that is held now."""
        return name_cards(occurrences, self.bookable_cards(), now)

    def bookable_cards(self) -> Mapping[DeviceId, float]:
        """Return the cards that can be booked, with the time from which each is certain to be free."""
        return free_from(self.node.cards, self._allocations.values())

    def certain_cards(self, at: float) -> list[DeviceId]:
        """Return the cards that are certain to be free at this time."""
        return [card for card, since in self.bookable_cards().items() if since <= at]

    def running_beyond(self, at: float, cards: Collection[str] | None = None) -> list[Job]:
        """Return the jobs that hold these cards, or any, and do not certainly end by this time."""
        return [
            job
            for job in self.placed()
            if ((end := self._allocations[job.id].deadline) is None or end > at)
            and (cards is None or any(piece.card_uuid in cards for piece in job.slices))
        ]

    def end_by(self, job: Job, at: float) -> None:
        """Count on a job's cards from this time on, by when it is ended."""
        self._allocations[job.id] = replace(self._allocations[job.id], deadline=at)

    def _never_fits_reason(self, requests: list[Request]) -> str:
        """Return why these requests can never be granted; empty if they can."""
        for request in dict.fromkeys(requests):
            if request.instance:
                return never_fits_instance(request, self.node, self.division)
            rejection = never_fits(request, (self.node,))
            if rejection is not None:
                return rejection.sentence()
        if len(requests) == 1:
            return ""
        plan = place_gang(EmptyUsage(), requests, self.policy, (restored(self.node),))
        return f"{plan.hint}, even if nobody else ran" if isinstance(plan, Unschedulable) else ""

    def _set_node(self, node: Node) -> None:
        self.node = node
        self.ledger.set_node(node)
        self._backfill.forget_impossible()

    def _add(self, job: Job) -> None:
        self.jobs[job.id] = job
        self._entries.setdefault(job.queue_id, []).append(job)

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._add(job)
        self._queue[jobs[0].queue_id] = self._pending_request(jobs)

    def _pending_request(self, jobs: Sequence[Job]) -> queue.PendingRequest:
        first, limit_s = jobs[0], jobs[0].spec.time_limit_s
        return queue.PendingRequest(
            first.queue_id,
            tuple(job.request for job in jobs),
            first.requested_at,
            first.spec.priority,
            str(first.account),
            None if limit_s is None else limit_s + GRACE_S,
        )

    def _allocate(self, job: Job, placement: Placement, now: float) -> None:
        job.placement = placement
        deadline = None if job.deadline is None else job.deadline + GRACE_S
        self._allocations[job.id] = queue.Allocation(placement, deadline, str(job.account))
        cards = queue.cards_of((placement,), self.node.cards)
        since = now if job.started_at is None else job.started_at
        self.usage_history.start(job.id, str(job.account), cards, job.requested_at, since, now)
        self.policies.card_time.hold(job.id, str(job.account), cards, since, now)

    def _cancel(self, jobs: Sequence[Job], now: float) -> list[Effect]:
        started = [job for job in jobs if job.started]
        return [
            *map(Terminate, started),
            *self._remove([job for job in jobs if not job.started], now),
        ]

    def _remove(self, jobs: Sequence[Job], now: float, *, record: bool = True) -> list[Effect]:
        effects: list[Effect] = []
        for job in jobs:
            if record:
                effects.append(RecordEnd(job, now))
            del self.jobs[job.id]
            self._evicted.discard(job.id)
            self._queue.pop(job.queue_id, None)
            self._reported.pop(job.queue_id, None)
            self._entries[job.queue_id].remove(job)
            if not self._entries[job.queue_id]:
                del self._entries[job.queue_id]
            if job.placement is not None:
                self._release(job, now)
            if job.placement is not None or job.in_container:
                effects.append(RemoveLease(job))
        return effects

    def _release(self, job: Job, now: float) -> None:
        self.ledger.release(job.id)
        del self._allocations[job.id]
        self.usage_history.stop(job.id, now, now)
        self.policies.card_time.release(job.id, now)

    def rehearse(
        self,
        ended: Collection[str],
        added: Sequence[Card],
        now: float,
        most: int | None = None,
        replaced: Mapping[str, tuple[Request, ...]] | None = None,
    ) -> queue.SchedulingResult:
        """Serve the queue on a copy of the ledger. Nothing is changed or reserved.

        MIG instances stay as they are: other ones that could take their place are not considered.

        Args:
            ended: Queue ids that end one after the other, or no longer wait.
            added: Cards that are there, too.
            now: Unix seconds.
            most: The number of requests to serve after the last end, in their order; None for all. After the
                ends before it all are served: they may take what a request before them waits for.
            replaced: Other requests for pending queue ids.
        """
        waiting = {id_: request for id_, request in self._queue.items() if id_ not in ended}
        for id_, requests in (replaced or {}).items():
            waiting[id_] = replace(waiting[id_], requests=requests)
        view, allocations = UsageOverlay(self.ledger), dict(self._allocations)
        node = replace(self.node, cards=(*self.node.cards, *added))
        backfill = Backfill(self.policy, self._backfill.depth)
        placed: list[tuple[str, tuple[Placement, ...]]] = []
        ending = [job for queue_id in ended for job in self.jobs_of(queue_id) if job.placement]
        # One after the other, as they end: what one leaves may be granted before the next has ended.
        last = ending[-1] if ending else None
        for job in ending or (None,):
            if job and job.placement:
                view.remove(job.placement)
                del allocations[job.id]
            ordered = self._ordered(waiting.values(), [*allocations.values()], now)
            rules = self._user_rules(node, [*allocations.values()], now)
            served = ordered[:most] if job is last else ordered
            result, node = self._serve(backfill, view, served, rules)
            placed += result.placed
            for id_, placements in result.placed:
                request = waiting.pop(id_)
                for rank, placement in enumerate(placements):
                    view.add(placement)
                    limit_s = request.time_limit_s
                    deadline = None if limit_s is None else now + limit_s
                    allocations[f"{id_}/{rank}"] = queue.Allocation(
                        placement, deadline, request.user
                    )
        return queue.SchedulingResult(tuple(placed), result.pending)

    def _ordered(
        self,
        waiting: Iterable[queue.PendingRequest],
        allocations: Sequence[queue.Allocation],
        now: float,
    ) -> list[queue.PendingRequest]:
        held = held_by_user({self.node.name: allocations})
        past = queue.history_lookup(held, self.usage_history, now)
        return queue.queue_order(waiting, past, self._fairness, now)

    def _serve(
        self,
        backfill: Backfill,
        view: UsageView,
        ordered: Sequence[queue.PendingRequest],
        rules: UserRules,
    ) -> tuple[queue.SchedulingResult, Node]:
        """Return the result, and the node with the instances that it needs."""
        node = rules.node
        holders: dict[DeviceId, list[str]] = {}
        for job in self.placed():
            for piece in job.slices:
                holders.setdefault(piece.uuid, []).append(job.name)
        placer = InstancePlacer(node, view, self.division, holders)
        timeline = Timeline((node,), {node.name: rules.allocations}, rules.now)
        rules.cards = lambda: placer.node.cards
        result = complete(backfill.serve(ordered, placer, timeline, rules.now, rules))
        return result, placer.node

    def _user_rules(
        self, node: Node, allocations: Sequence[queue.Allocation], now: float
    ) -> UserRules:
        users = (request.user for request in self._queue.values())
        return UserRules(self.policies, node, allocations, users, now)

    def _schedule(self, now: float, *, evict: bool = True) -> list[Effect]:
        effects: list[Effect] = []
        self.changes += 1
        allocations = [*self._allocations.values()]
        ordered = self._ordered(self._queue.values(), allocations, now)
        rules = self._rules = self._user_rules(self.node, allocations, now)
        result, node = self._serve(self._backfill, self.ledger, ordered, rules)
        self.policies.on_named(rules.booked)
        if node is not self.node:
            self._set_node(node)
        for queue_id, placements in result.placed:
            jobs = self._entries[queue_id]
            for job, placement in zip(jobs, placements, strict=True):
                self._assume(job, placement, now)
            del self._queue[queue_id]
            self._reported.pop(queue_id, None)
            self.on_granted(jobs, now)
            effects.append(GrantLease(tuple(jobs)))
        held = self.held_devices()
        if any(is_planned(card.uuid) and card.uuid not in held for card in node.cards):
            # A placement that was too much for its user has left an instance.
            self._set_node(without_plans(self.node, held))
        for status in result.pending:
            first, reason = self._entries[status.id][0], self._pending_reason(status)
            report = JobQueued(
                first.queue_id, first.display_name, status.position, len(result.pending), reason
            )
            before = self._reported.get(status.id)
            self._reported[status.id] = status, report
            if before is None or before[1] != report:
                effects.append(report)
        if evict:
            effects += self._evict_for(result.pending, now)
        return effects

    def _evict_for(self, pending: Sequence[queue.QueueStatus], now: float) -> list[Effect]:
        """Evict the cheapest gangs that make room for pending requests, in the order of the queue."""
        queue_ids = gangs_to_evict(
            [(status, self._queue[status.id]) for status in pending],
            Holders(self.ledger, self.placed(), self._evicted),
            self.node,
            self.policy,
            now,
            self._rules,
        )
        gangs = [tuple(self.jobs_of(queue_id)) for queue_id in queue_ids]
        for job in (job for jobs in gangs for job in jobs):
            self._evicted.add(job.id)
            if job.id in self._allocations:
                # Reservations count on the cards from then on.
                until = now + (job.spec.eviction_grace_s or 0) + GRACE_S
                self._allocations[job.id] = replace(self._allocations[job.id], deadline=until)
        return [EvictGang(jobs) for jobs in gangs]

    def _pending_reason(self, status: queue.QueueStatus) -> str:
        """Return why a job is pending, with what uses its cards without a lease or makes them unhealthy."""
        lacking = {
            reason.card
            for reason in status.unschedulable.reasons
            if reason.code in (ReasonCode.MEMORY, ReasonCode.UNHEALTHY)
        }
        booked = self._rules.booking_reasons(self._queue[status.id], status.unschedulable)
        return "; ".join([status.reason, *booked, *self._unleased_on(lacking)[:MAX_UNLEASED_SHOWN]])

    def _unleased_on(self, indexes: Collection[int]) -> list[str]:
        """Return who uses these cards without a lease, or their problem, in a sentence for each."""
        return [
            f"card {card.index}: {self._unleased[card.uuid]}"
            for card in self.node.cards
            if card.index in indexes and self._unleased.get(card.uuid)
        ]
