"""Random histories of a virtual queue: after each event its invariants hold."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columns import Columns
from fenka.core.evaluate import place
from fenka.core.gangs import place_all
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.ledger import Ledger
from fenka.core.policies.candidates import FULL, TargetPolicy
from fenka.core.policies.target import ExpectedWorkload
from fenka.core.policies.workload import Typical
from fenka.core.queue import Fairness, PendingRequest, queue_order
from fenka.core.reasons import Unschedulable
from fenka.core.request import Memory, Request
from fenka.core.topology.domains import Proximity, Topology
from fenka.simulation.timed import StartedRequest, VirtualQueue

NODES = tuple(
    Node(
        name,
        tuple(Card(index, DeviceId(f"{name}-{index}"), "T4", FULL) for index in range(count)),
        cpu_milli=4000,
        memory_mib=1000,
        unit_mib=1,
    )
    for name, count in (("a", 1), ("b", 2), ("c", 2))
)
TOPOLOGY = Topology(("zone", "rack"), {"a": ("z", "r1"), "b": ("z", "r2"), "c": ("z", "r2")})
REQUESTS = st.one_of(
    st.sampled_from([250, 500, 750]).map(lambda parts: Request(Memory(parts), cpu_milli=500)),
    st.integers(1, 2).map(lambda cards: Request(None, cards=cards, whole=True, cpu_milli=1000)),
    st.just(Request(cards=0, cpu_milli=1500)),
)


class VirtualMachine(RuleBasedStateMachine):
    """`started` has the ids of what has started. After each event the queue is served, as in a replay."""

    depth = 4

    def __init__(self) -> None:
        super().__init__()
        self.now, self.count = 0.0, 0
        self.queue: VirtualQueue | None = None
        self.sizes: dict[str, int] = {}
        self.proximities: dict[str, Proximity | None] = {}
        self.ended: Counter[str] = Counter()

    @property
    def virtual(self) -> VirtualQueue:
        """Return the queue."""
        if self.queue is None:
            self.policy = TargetPolicy(
                "binpack", ExpectedWorkload((Typical(Request(Memory(500)), 1),))
            )
            self.queue = VirtualQueue(NODES, self.policy, Fairness(), self.depth)
        return self.queue

    def _serve(self) -> None:
        # What has started counts for its user, so another request may be the first one now.
        while started := list(self.virtual.schedule(self.now)):
            for each in started:
                self._check(each)

    def _check(self, started: StartedRequest) -> None:
        assert len(started.placements) == self.sizes[started.request.id]
        proximity = self.proximities[started.request.id]
        if proximity is not None and proximity.required:
            names = {placement.node for placement in started.placements}
            domains = {TOPOLOGY.domain(name, proximity.level) for name in names}
            assert len(domains) == 1

    # ---- events ----

    @precondition(lambda self: self.count == 0)
    @rule(policy=st.sampled_from(["binpack", "spread", "fgd", "bid-price", "bestfit", "random"]))
    def choose_policy(self, policy: str) -> None:
        """Serve by this policy from the start."""
        self.policy = TargetPolicy(policy, ExpectedWorkload((Typical(Request(Memory(500)), 1),)))
        self.queue = VirtualQueue(NODES, self.policy, Fairness(), self.depth)

    @rule(
        requests=st.lists(REQUESTS, min_size=1, max_size=3),
        user=st.sampled_from("xy"),
        priority=st.sampled_from([0, 0, 1]),
        limit=st.none() | st.integers(1, 30),
        level=st.sampled_from([None, 0, 1]),
        required=st.booleans(),
    )
    def arrive(
        self,
        requests: list[Request],
        user: str,
        priority: int,
        limit: int | None,
        level: int | None,
        *,
        required: bool,
    ) -> None:
        """A pod comes, or a gang, which may be wanted in one rack or zone."""
        name = f"r{self.count:03}"
        self.count += 1
        self.sizes[name] = len(requests)
        proximity = (
            None if level is None or len(requests) == 1 else Proximity(TOPOLOGY, level, required)
        )
        self.proximities[name] = proximity
        pending = PendingRequest(name, tuple(requests), self.now, priority, user, limit)
        self.virtual.arrive(replace(pending, proximity=proximity))
        self._serve()

    @precondition(lambda self: self.virtual.running)
    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        """A pod ends, of a gang one or the other."""
        name = data.draw(st.sampled_from(sorted(self.virtual.running)))
        pod = data.draw(st.sampled_from(sorted(self.virtual.running[name])))
        self.virtual.end(name, pod, self.now)
        self.ended[name] += 1
        self._serve()

    @rule(seconds=st.integers(0, 40))
    def wait(self, seconds: int) -> None:
        """Time passes, and what waits is tried again."""
        self.now += seconds
        self._serve()

    # ---- what must hold ----

    @invariant()
    def no_card_and_no_host_is_overcommitted(self) -> None:
        """An independent ledger takes all that runs, one after the other: it refuses what is too much."""
        ledger = Ledger(NODES)
        for name, pods in self.virtual.running.items():
            for pod, allocation in pods.items():
                ledger.adopt(f"{name}/{pod}", allocation.placement)

    @invariant()
    def release_undoes_place(self) -> None:
        """The columns are those of a new cluster on which what runs now was placed."""
        fresh = Columns(NODES)
        for pods in self.virtual.running.values():
            fresh.add(*(allocation.placement for allocation in pods.values()))
        for node in NODES:
            assert self.virtual.columns.host_usage(node.name) == fresh.host_usage(node.name)
            for card in node.cards:
                found = self.virtual.columns.card_usage(node.name, card.uuid)
                assert found == fresh.card_usage(node.name, card.uuid)

    @invariant()
    def no_gang_is_half_placed(self) -> None:
        """Each request waits, was refused, or all of its pods have started."""
        for name, size in self.sizes.items():
            runs = len(self.virtual.running.get(name, ())) + self.ended[name]
            elsewhere = (name in self.virtual.pending) + (name in self.virtual.refused)
            assert (runs, elsewhere) in ((size, 0), (0, 1))

    @invariant()
    def nothing_waits_that_fits(self) -> None:
        """Without reservations no request fits what is free; with them, not the first one of the queue."""
        order = [
            each
            for each in queue_order(
                self.virtual.pending.values(),
                self.virtual.history(self.now),
                Fairness(),
                self.now,
            )
            if any(request.cards for request in each.requests)
        ]
        hosts = [each for each in self.virtual.pending.values() if each not in order]
        for waiting in (*(order if self.depth == 0 else order[:1]), *hosts):
            if len(waiting.requests) == 1:
                found = place(self.virtual.columns, waiting.requests[0], "binpack", NODES)
            else:
                placer = ColumnarPlacer(self.virtual.columns.copy())
                gang = place_all(placer, waiting.requests, self.policy, proximity=waiting.proximity)
                assert isinstance(gang, Unschedulable)
                continue
            assert isinstance(found, Unschedulable)


class WorkConservingMachine(VirtualMachine):
    """Nothing reserves cards, so everything that fits starts."""

    depth = 0


TestWithReservations = pytest.mark.timeout(600)(VirtualMachine.TestCase)
TestWithReservations.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestWorkConserving = pytest.mark.timeout(600)(WorkConservingMachine.TestCase)
TestWorkConserving.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_all_ends_empty_when_all_depart() -> None:
    """Nothing of any request is left on any card."""
    queue = VirtualQueue(NODES, TargetPolicy("binpack", ExpectedWorkload(())), Fairness())
    gang = (Request(Memory(500)),) * 3
    queue.arrive(PendingRequest("g", gang, 0.0))
    (started,) = queue.schedule(0.0)
    assert len(started.placements) == 3
    for pod in range(3):
        queue.end("g", pod, 1.0)
    assert not queue.running
    assert all(
        queue.columns.card_usage(node.name, card.uuid).holders == 0
        for node in NODES
        for card in node.cards
    )
    with pytest.raises(KeyError):
        queue.end("g", 0, 2.0)
