"""Selects the gangs to evict for pending requests of higher priority. Pure.

Only trainings that use what others leave idle are evicted (`JobSpec.eviction_grace_s`), always as a whole.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fenka.core.evaluate import Policy
from fenka.core.inventory import DeviceId, Node
from fenka.core.preemption import Preemptor, VictimCandidate, cheapest_victims
from fenka.core.queue import PendingRequest, QueueStatus, Reservation
from fenka.core.usage import UsageOverlay, UsageView
from fenka.workstation.job import Job


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
    pending: Iterable[tuple[QueueStatus, PendingRequest]],
    holders: Holders,
    node: Node,
    policy: Policy,
    now: float,
) -> list[str]:
    """Return the queue ids of the gangs to evict: for each request the cheapest that make room for it.

    A request for which evicted gangs will make room evicts no others.

    Args:
        pending: The requests in their order. Those without a reservation are considered when they have one.
        holders: The jobs that hold slices.
        node: This machine's cards.
        policy: How requests are placed.
        now: Unix seconds.
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
    reservations: list[Reservation] = []
    for status, request in pending:
        if status.reservation is None:
            continue
        deadline = None if request.time_limit_s is None else now + request.time_limit_s
        blocked = (it.cards for it in reservations if it.blocks(deadline))
        victims = cheapest_victims(
            view,
            [_candidate(job) for job in left.values()],
            Preemptor(request.requests, request.priority),
            (node,),
            policy,
            frozenset[DeviceId]().union(*blocked),
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
