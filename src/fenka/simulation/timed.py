"""Replays a trace by its timestamps: pods come, wait in a queue, start and end on a virtual clock.

The queue is served by `core.backfill`, which also serves those of clusters and workstations. A pod that does
not fit is tried again whenever another one comes or ends. Pods without cards are not in that queue, as on a
cluster.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import ceil
from statistics import mean, median

from fenka.core import queue
from fenka.core.backfill import Backfill, complete
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columnar_timeline import CardStates, ColumnarTimeline
from fenka.core.columns import Columns
from fenka.core.evaluate import Policy
from fenka.core.gangs import place_all
from fenka.core.inventory import Node
from fenka.core.policies.candidates import FULL, TargetPolicy
from fenka.core.policies.target import ExpectedWorkload
from fenka.core.policies.workload import kind, typical
from fenka.core.queue import Allocation, Fairness, PendingRequest, UsageHistory
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.topology.domains import Proximity, Topology
from fenka.simulation.trace import InvalidTrace, Trace, TracePod

DEPTH = 4
"""Pending requests that reserve cards, as on a cluster."""

MAX_GANG = 1000
"""Pods that start together."""

SAMPLES = 200
"""Points of a series over time."""


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request that starts, with one placement for each of its pods."""

    request: PendingRequest
    placements: tuple[Placement, ...]


class VirtualQueue:
    """A queue and the nodes that serve it, without a clock: events in, starts out.

    Attributes:
        pending: requests that wait, by id.
        running: the allocations of requests that have started, by id, for each of their pods that runs.
        refused: ids of requests that could not start if nothing else ran.
        columns: the nodes, with what is allocated of them.
    """

    def __init__(
        self, nodes: Sequence[Node], policy: TargetPolicy, fairness: Fairness, depth: int = DEPTH
    ) -> None:
        """depth: the number of pending requests that reserve cards."""
        self._nodes, self._policy, self._fairness = nodes, policy, fairness
        self.columns = Columns(nodes)
        self._states, self._uses = CardStates(), UsageHistory(fairness)
        self._queue, self._host = Backfill(policy, depth), Backfill(policy, 0)
        self._by_node: dict[str, list[Allocation]] = {}
        self._possible: dict[tuple[tuple[Request, ...], Proximity | None], bool] = {}
        self.pending: dict[str, PendingRequest] = {}
        self.running: dict[str, dict[int, Allocation]] = {}
        self.refused: list[str] = []

    def arrive(self, request: PendingRequest) -> None:
        """Take a request into the queue, or refuse it."""
        shape = request.requests, request.proximity
        if shape not in self._possible:
            empty = ColumnarPlacer(self.columns.emptied())
            placed = place_all(empty, request.requests, "binpack", proximity=request.proximity)
            self._possible[shape] = not isinstance(placed, Unschedulable)
        if self._possible[shape]:
            self.pending[request.id] = request
        else:
            self.refused.append(request.id)

    def end(self, request_id: str, pod: int, now: float) -> None:
        """Release what a pod of a request has."""
        pods = self.running[request_id]
        allocation = pods.pop(pod)
        name = allocation.placement.node
        self.columns.remove(allocation.placement)
        # A new list: those who have read the old one compare by identity.
        self._by_node[name] = [other for other in self._by_node[name] if other is not allocation]
        self._uses.stop(f"{request_id}/{pod}", now, now)
        if not pods:
            del self.running[request_id]

    def history(self, now: float) -> queue.HistoryLookup:
        """Return a lookup of what users have and have used."""
        held = Counter(held.user for pods in self.running.values() for held in pods.values())
        return queue.history_lookup(held, self._uses, now)

    def schedule(self, now: float) -> list[StartedRequest]:
        """Start what fits, in the order of the queue."""
        if not self.pending:
            return []
        self._policy.target.next(self.columns, self._policy)
        pending, history = self.pending.values(), self.history(now)
        order = queue.queue_order(pending, history, self._fairness, now)
        placer = ColumnarPlacer(self.columns)
        timeline = ColumnarTimeline(self._nodes, self._by_node, now, self._states)
        started = []
        for backfill, with_cards in ((self._queue, True), (self._host, False)):
            entries = [entry for entry in order if _has_cards(entry) == with_cards]
            for request_id, placements in complete(
                backfill.serve(entries, placer, timeline, now)
            ).placed:
                started.append(self._start(request_id, placements, now))
        return started

    def _start(
        self, request_id: str, placements: tuple[Placement, ...], now: float
    ) -> StartedRequest:
        """Record what the pass has placed; the columns have it already."""
        request = self.pending.pop(request_id)
        deadline = None if request.time_limit_s is None else now + request.time_limit_s
        pods = self.running[request_id] = {}
        for number, placement in enumerate(placements):
            allocation = pods[number] = Allocation(placement, deadline, request.user)
            others = self._by_node.get(placement.node, [])
            self._by_node[placement.node] = [*others, allocation]
            cards = _cards(request.requests[number])
            self._uses.start(
                f"{request_id}/{number}", request.user, cards, request.requested_at, now, now
            )
        return StartedRequest(request, placements)


def _has_cards(request: PendingRequest) -> bool:
    return any(part.cards for part in request.requests)


def _cards(request: Request) -> float:
    """Return the cards of a trace's request. A card has 1,000 parts, counted as MiB."""
    return request.cards * (request.memory.nominal_mib(1) / FULL if request.memory else 1)


@dataclass(frozen=True, slots=True)
class TimedOptions:
    """How a trace is replayed by its timestamps.

    Attributes:
        policy: a name in SCORES.
        faster: pods come as many times as fast, and run as long as they did.
        known_times: whether the queue knows how long pods run, as if each had that time limit.
        fairness: how requests of one priority are ordered.
        seed: of the random policy.
    """

    policy: Policy = "bid-price"
    faster: float = 1.0
    known_times: bool = False
    fairness: Fairness = field(default_factory=lambda: Fairness(penalty_per_request_s=0))
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Waits:
    """Waiting times in seconds, of pods that started."""

    pods: int
    waited: int
    mean_s: float
    median_s: float
    p95_s: float
    max_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Waits":
        """Return the figures of these waiting times. The 95th percentile is one of them."""
        if not seconds:
            return cls(0, 0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(seconds)
        at_95 = ordered[ceil(0.95 * len(ordered)) - 1]
        waited = sum(wait > 0 for wait in ordered)
        return cls(len(ordered), waited, mean(ordered), median(ordered), at_95, ordered[-1])


@dataclass(frozen=True, slots=True)
class Sample:
    """Means over an interval, in percent of all cards.

    Attributes:
        at: its end.
        requested: by pods that wait or run.
        allocated: to pods that run.
        fragmented: percent of what is free that typical pods cannot use, as measured last.
    """

    at: float
    requested: float
    allocated: float
    fragmented: float


@dataclass(frozen=True, slots=True)
class TimedOutcome:
    """The result of a replay.

    Attributes:
        waits: of pods that requested cards.
        seconds: these waiting times, in the order of the starts.
        recorded: those of the trace itself.
        refused: pods that could not start if nothing else ran.
        allocated: percent of all cards, the mean over time.
        samples: of equal intervals from the first arrival to the last end.
        gangs_in_one: by topology level, percent of the gangs of several pods that started in one domain.
    """

    waits: Waits
    seconds: tuple[float, ...]
    recorded: Waits
    refused: int
    allocated: float
    samples: tuple[Sample, ...]
    gangs_in_one: Mapping[str, float] = field(default_factory=dict)


def replay_times(
    trace: Trace,
    nodes: Sequence[Node],
    options: TimedOptions,
    progress: Callable[[int], object] = lambda _: None,
) -> TimedOutcome:
    """Replay a trace by its timestamps.

    Args:
        trace: its pods are the expected workload.
        nodes: the trace's, as they are named for ties.
        options: how.
        progress: called with the number of pods that have ended.

    Raises:
        InvalidTrace: if a pod has no times.
    """
    workload = typical(Counter(kind(pod.request) for pod in trace.pods))
    target = ExpectedWorkload(workload, options.seed)
    virtual = VirtualQueue(nodes, TargetPolicy(options.policy, target), options.fairness)
    topology = trace.topology and Topology(
        trace.topology.levels,
        {
            node.name: trace.topology.domains[original.name]
            for node, original in zip(nodes, trace.nodes, strict=True)
        },
    )
    return _Replay(trace, virtual, options, topology).run(
        lambda: 100 * target.fragments.share(virtual.columns), progress
    )


class _Replay:
    """One replay, and what is measured of it. Amounts are thousandths of cards."""

    def __init__(
        self,
        trace: Trace,
        virtual: VirtualQueue,
        options: TimedOptions,
        topology: Topology | None,
    ) -> None:
        self._trace, self._queue, self._topology = trace, virtual, topology
        self._members, self._requests = _entries(trace, options, topology)
        self._domains: list[tuple[bool, ...]] = []
        """Of each gang that has started, by level, whether it is in one domain."""
        self._waits: list[float] = []
        self._requested = self._allocated = 0
        self._points: list[tuple[float, int, int, float]] = []
        """Amounts from a time on, and the percentage of what is free that was fragmented last."""
        self._measure_every = max(2 * len(trace.pods) // SAMPLES, 1)
        self._ended = 0

    def run(
        self, fragmented: Callable[[], float], progress: Callable[[int], object]
    ) -> TimedOutcome:
        """Take all events in order. At one moment pods end before others come."""
        events: list[tuple[float, int, int, str, int]] = [
            (request.requested_at, 1, number, name, 0)
            for number, (name, request) in enumerate(self._requests.items())
        ]
        heapify(events)
        number, percent = len(events), 0.0
        while events:
            now = events[0][0]
            while events and events[0][0] == now:
                _, arrives, _, name, pod = heappop(events)
                if arrives:
                    self._arrive(name)
                else:
                    self._end(name, pod, now)
                    progress(self._ended)
            for started in self._queue.schedule(now):
                self._count_domains(started)
                name = started.request.id
                for pod, member in enumerate(self._members[name]):
                    number += 1
                    heappush(events, (now + self._start(name, member, now), 0, number, name, pod))
            if len(self._points) % self._measure_every == 0:
                percent = fragmented()
            self._points.append((now, self._requested, self._allocated, percent))
        return self._outcome()

    def _arrive(self, name: str) -> None:
        request = self._requests[name]
        self._queue.arrive(request)
        if name in self._queue.pending:
            self._requested += sum(member.parts for member in self._members[name])

    def _start(self, name: str, member: TracePod, now: float) -> float:
        """Count a start, and return how long the pod runs."""
        self._allocated += member.parts
        if member.request.cards:
            self._waits.append(now - self._requests[name].requested_at)
        assert member.times is not None
        return member.times.runs_s

    def _count_domains(self, started: StartedRequest) -> None:
        topology = self._topology
        if topology is None or len(started.placements) < 2:
            return
        domains = (
            {topology.domain(placement.node, level) for placement in started.placements}
            for level in range(len(topology.levels))
        )
        self._domains.append(tuple(len(used) == 1 and None not in used for used in domains))

    def _end(self, name: str, pod: int, now: float) -> None:
        parts = self._members[name][pod].parts
        self._queue.end(name, pod, now)
        self._requested -= parts
        self._allocated -= parts
        self._ended += 1

    def _outcome(self) -> TimedOutcome:
        recorded = [
            pod.times.waited_s
            for pod in self._trace.pods
            if pod.request.cards and pod.times is not None and pod.times.waited_s is not None
        ]
        samples = tuple(_samples(self._points, self._trace.parts))
        return TimedOutcome(
            Waits.of(self._waits),
            tuple(self._waits),
            Waits.of(recorded),
            sum(len(self._members[name]) for name in self._queue.refused),
            mean(sample.allocated for sample in samples) if samples else 0.0,
            samples,
            {
                level: 100 * mean(in_one)
                for level, in_one in zip(
                    self._topology.levels if self._topology else (),
                    zip(*self._domains, strict=True),
                    strict=False,
                )
            },
        )


def _samples(points: Sequence[tuple[float, int, int, float]], total: int) -> Iterator[Sample]:
    """Yield means over equal intervals. total: the thousandths of cards that there are."""
    first, last = points[0][0], points[-1][0]
    width, number = (last - first) / SAMPLES, 0
    if not width:
        return
    for interval in range(SAMPLES):
        begin, end = first + interval * width, first + (interval + 1) * width
        requested = allocated = 0.0
        while True:
            at, *amounts, fragmented = points[number]
            until = points[number + 1][0] if number + 1 < len(points) else end
            seconds = max(min(until, end) - max(at, begin), 0.0)
            requested, allocated = (
                requested + seconds * amounts[0],
                allocated + seconds * amounts[1],
            )
            if until >= end:
                break
            number += 1
        scale = 100 / width / total
        yield Sample(end, requested * scale, allocated * scale, fragmented)


def _entries(
    trace: Trace, options: TimedOptions, topology: Topology | None
) -> tuple[dict[str, list[TracePod]], dict[str, PendingRequest]]:
    """Return the pods of each request of the queue, and the requests: one pod, or a gang.

    A gang comes with its last pod.
    """
    members: dict[str, list[TracePod]] = {}
    for number, pod in enumerate(trace.pods):
        if pod.times is None:
            raise InvalidTrace(
                f"the pod {pod.name!r} has no creation_time and deletion_time: a replay by time needs both"
            )
        name = f"gang {pod.gang}" if pod.gang else f"pod {number:07}"
        members.setdefault(name, []).append(pod)
    for name, pods in members.items():
        if len(pods) > MAX_GANG:
            raise InvalidTrace(
                f"the {name} has {len(pods)} pods: at most {MAX_GANG} start together"
            )
    return members, {
        name: _request(name, pods, options, topology) for name, pods in members.items()
    }


def _request(
    name: str, pods: Sequence[TracePod], options: TimedOptions, topology: Topology | None
) -> PendingRequest:
    times = [pod.times for pod in pods if pod.times is not None]
    return PendingRequest(
        name,
        tuple(pod.request for pod in pods),
        max(member.created for member in times) / options.faster,
        min(pod.priority for pod in pods),
        pods[0].user,
        max(member.runs_s for member in times) if options.known_times else None,
        proximity=_proximity(pods, topology) if len(pods) > 1 else None,
    )


def _proximity(pods: Sequence[TracePod], topology: Topology | None) -> Proximity | None:
    if topology is None:
        return None
    wanted = ((pod.required, topology.levels.index(pod.level)) for pod in pods if pod.level)
    return Proximity.of(topology, wanted)
