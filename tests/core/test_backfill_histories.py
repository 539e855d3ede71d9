"""Backfill on a virtual clock: reservations are kept, and every request is served."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import place
from fenka.core.inventory import Card, Node
from fenka.core.ledger import Ledger
from fenka.core.queue import Allocation, Fairness, PendingRequest
from fenka.core.request import Placement, Request
from fenka.core.usage import EmptyUsage
from tests.core.builders import (
    T4_MIB,
    NodesBackfill,
    clusters,
    node,
    requests,
    units,
)


@dataclass(frozen=True, slots=True)
class Job:
    """Comes at a time, and runs for so long; honest: that is its deadline, if it has one."""

    at: int
    request: Request
    runs: int
    deadline: bool


def well(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """All cards in order, no host counted."""
    return tuple(
        Node(
            it.name,
            tuple(Card(one.index, one.uuid, one.model, one.memory_mib) for one in it.cards),
        )
        for it in nodes
    )


def replay(
    nodes: tuple[Node, ...], jobs: list[Job], until: int
) -> tuple[dict[str, int], dict[str, float]]:
    """When each job started, and the first promise to whoever was first in line."""
    scheduler, ledger = (
        NodesBackfill(nodes, "binpack", Fairness(penalty_per_request_s=0)),
        Ledger(nodes),
    )
    running: dict[str, tuple[Allocation, int]] = {}
    waiting: list[PendingRequest] = []
    started: dict[str, int] = {}
    promised: dict[str, float] = {}
    for now in range(until):
        for name in [name for name, (_, ends) in running.items() if ends <= now]:
            ledger.release(name)
            del running[name]
        waiting += [
            PendingRequest(
                f"j{number:03}",
                (job.request,),
                job.at,
                time_limit_s=job.runs if job.deadline else None,
            )
            for number, job in enumerate(jobs)
            if job.at == now
        ]
        step = scheduler.serve(waiting, [it for it, _ in running.values()], now)
        for name, (found,) in step.placed:
            job = jobs[int(name[1:])]
            # The ledger refuses what a card does not hold.
            ledger.adopt(name, found)
            running[name] = (
                Allocation(found, now + job.runs if job.deadline else None),
                now + job.runs,
            )
            started[name] = now
        waiting = [it for it in waiting if it.id not in started]
        for it in step.pending[:1]:
            if it.reservation and it.reservation.starts_by is not None:
                promised.setdefault(it.id, it.reservation.starts_by)
    return started, promised


JOBS = st.lists(
    st.builds(Job, st.integers(0, 12), requests(), st.integers(1, 6), st.booleans()), max_size=14
).map(
    lambda jobs: [
        replace(job, request=replace(job.request, cpu_milli=0, host_memory_mib=0)) for job in jobs
    ]
)


@settings(deadline=None, max_examples=120)
@given(nodes=clusters(most_nodes=2, most_cards=3), jobs=JOBS)
def test_first_request_starts_by_its_reservation(nodes: tuple[Node, ...], jobs: list[Job]) -> None:
    """Nobody who is backfilled puts its start off; no card holds more than it has; whoever can is served."""
    nodes = well(nodes)
    started, promised = replay(nodes, jobs, until=12 + 14 * 6 + 2)
    for name, by in promised.items():
        assert started[name] <= by
    for number, job in enumerate(jobs):
        fits = isinstance(place(EmptyUsage(), job.request, "binpack", nodes), Placement)
        assert (f"j{number:03}" in started) == fits


@settings(deadline=None, max_examples=60)
@given(
    nodes=clusters(most_nodes=2, most_cards=3),
    large=requests(),
    small=st.lists(st.tuples(requests(), st.integers(1, 5), st.booleans()), min_size=1, max_size=3),
)
def test_large_request_is_served_in_a_stream_of_small_ones(
    nodes: tuple[Node, ...], large: Request, small: list[tuple[Request, int, bool]]
) -> None:
    """They come every second for ever, with and without deadlines; the large one waits a bounded time."""
    nodes = well(nodes)
    large = replace(large, cpu_milli=0, host_memory_mib=0)
    jobs = [
        Job(now, replace(request, cpu_milli=0, host_memory_mib=0), runs, deadline)
        for now in range(40)
        for request, runs, deadline in small
    ]
    jobs.append(Job(6, large, 3, deadline=False))
    # Before it are at most the 7 · 3 that came until then; each runs for 5 at most.
    started, _ = replay(nodes, jobs, until=6 + 22 * 5 + 5)
    fits = isinstance(place(EmptyUsage(), large, "binpack", nodes), Placement)
    assert (f"j{len(jobs) - 1:03}" in started) == fits


@pytest.mark.parametrize("deadline", [False, True])
def test_large_request_is_served_when_small_ones_are_staggered(deadline: bool) -> None:
    """Each second one of 4 units comes, for 3 seconds: 12 of 14 units are always held, and 14 are wanted.

    The large one comes at 6, behind the small one of that second, which ends at 9. It is served then, and
    those that came since when it has ended.
    """
    jobs = [Job(now, units(4), 3, deadline) for now in range(30)]
    jobs.append(Job(6, units(14), 3, deadline=False))
    started, _ = replay((node(T4_MIB),), jobs, until=20)
    assert started["j030"] == 9
    assert started["j007"] == 12
