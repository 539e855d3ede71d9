"""Random histories of pods and gangs through the extender: departures, retries and time, with invariants."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fenka.cluster.gang_placement import INCOMPLETE_TTL_S, RESERVATION_TTL_S
from fenka.cluster.objects import Pod
from fenka.cluster.placement import QueueConstraints
from fenka.core.units import units_to_mib
from tests.builders import GIB, T4_MIB, Json, gang_labels, node_json, on_card
from tests.core.builders import device
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import make

CARDS = {"a": 1, "b": 2}


@dataclass
class Bound:
    """A pod that runs."""

    node: str
    card: int
    units: int


class ExtenderMachine(RuleBasedStateMachine):
    """`bound` has the pods that run, by UID; `barrier` members that wait for the others of their gang."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = ExtenderHarness(
            [node_json(name, *[T4_MIB] * count) for name, count in CARDS.items()]
        )
        self.settled: list[str] = []
        self.cluster.gangs.on_settled = self.settled.append
        self.units: dict[str, int] = {}
        self.gang_of: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.lost: set[str] = set()
        self.bound: dict[str, Bound] = {}
        self.barrier: dict[str, str] = {}
        self.tried_all = False

    # ---- pods come ----

    @rule(units=st.integers(1, 15), limit=st.none() | st.integers(5, 40))
    def create(self, units: int, limit: int | None) -> None:
        """A single pod; 15 units are more than any card has."""
        self._put(f"p{len(self.units):03}", units, limit)

    @precondition(lambda self: len(self.sizes) < 3)
    @rule(size=st.integers(2, 3), units=st.sampled_from([4, 7, 10, 14]))
    def create_gang(self, size: int, units: int) -> None:
        """All members of a gang."""
        gang = f"g{len(self.sizes)}"
        self.sizes[gang] = size
        for _ in range(size):
            name = f"p{len(self.units):03}"
            self.gang_of[name] = gang
            self._put(name, units, None)

    def _put(self, name: str, units: int, limit: int | None) -> None:
        self.units[name] = units
        self.tried_all = False
        self.cluster.set(self._pod(name, limit))

    def _pod(self, name: str, limit: int | None = None, node: str = "", card: int = 0) -> Pod:
        gang, units = self.gang_of.get(name), self.units[name]
        labels = gang_labels(gang, self.sizes[gang]) if gang else {}
        record: Json = {"node": node, "annotations": on_card(card, units)} if node else {}
        return make(name, units, self.cluster.now, runs=limit, labels=labels, **record)

    # ---- kube-scheduler tries them ----

    def waiting(self) -> list[str]:
        """Return the pods that kube-scheduler has in its queue, the oldest first."""
        return sorted(self.cluster.pods.keys() - self.bound.keys() - self.barrier.keys())

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        """Try one pod, new or refused before."""
        self._try(data.draw(st.sampled_from(self.waiting())))

    @rule()
    def retry_all(self) -> None:
        """Try all pods until no further one starts, as kube-scheduler does when something has ended."""
        for _ in range(len(self.units) + 1):
            before = len(self.bound)
            for name in self.waiting():
                self._try(name)
            if len(self.bound) == before:
                break
        self.tried_all = True

    def _try(self, name: str) -> None:
        pod = self.cluster.pods[name]
        if name not in self.gang_of:
            started = self.cluster.start(pod)
            if started.partition("/")[0] in CARDS:
                self._see_bound(name, started)
            return
        fitting = self.cluster.filter(pod)
        if fitting:
            self.barrier[name] = fitting[0]
            if self.cluster.gangs.arrive(pod, fitting[0]) is False:
                del self.barrier[name]
        self._bind_settled()

    def _bind_settled(self) -> None:
        keys = set(self.settled)
        self.settled.clear()
        for name, node in list(self.barrier.items()):
            pod = self.cluster.pods[name]
            if self.cluster.gangs.key(pod) in keys:
                del self.barrier[name]
                if self.cluster.gangs.may_bind(pod, node):
                    self._see_bound(name, self.cluster.bind(pod, node))

    def _see_bound(self, name: str, where: str) -> None:
        """The informer brings the pod as it was bound."""
        node, _, card = where.partition("/")
        self.bound[name] = Bound(node, int(card), self.units[name])
        limit = self.cluster.pods[name].spec.active_deadline_seconds
        self.cluster.set(self._pod(name, limit, node, int(card)))

    # ---- pods go, and time passes ----

    @precondition(lambda self: self.cluster.pods)
    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        """A pod ends or is deleted, bound or not."""
        name = data.draw(st.sampled_from(sorted(self.cluster.pods)))
        self.bound.pop(name, None)
        self.barrier.pop(name, None)
        self.tried_all = False
        if name in self.gang_of:
            self.lost.add(self.gang_of[name])
        self.cluster.gone(name)
        self.cluster.gangs.expire()
        self._bind_settled()

    @rule(seconds=st.sampled_from([1.0, 5.0, RESERVATION_TTL_S, INCOMPLETE_TTL_S]))
    def wait(self, seconds: float) -> None:
        """Reservations of gangs expire."""
        self.cluster.now += seconds
        self.tried_all = False
        self.cluster.gangs.expire()
        self._bind_settled()

    # ---- what must hold ----

    @invariant()
    def release_undoes_place(self) -> None:
        """Of each card exactly that is in use which the pods that run have, and no more than it has."""
        for node, count in CARDS.items():
            for index in range(count):
                held = sum(
                    units_to_mib(pod.units, T4_MIB, GIB)
                    for pod in self.bound.values()
                    if (pod.node, pod.card) == (node, index)
                )
                used = self.cluster.state.card_usage(node, device(index, node)).memory_mib
                promised = self.cluster.gangs.live.usage.card_usage(node, device(index, node))
                assert used == held
                assert used <= promised.memory_mib <= T4_MIB

    @invariant()
    def no_gang_is_half_placed(self) -> None:
        """All of its members run or none, unless one was deleted."""
        for gang, size in self.sizes.items():
            running = sum(self.gang_of.get(name) == gang for name in self.bound)
            assert gang in self.lost or running in (0, size)

    @invariant()
    def first_of_the_queue_does_not_wait_if_it_fits(self) -> None:
        """Once all were tried, no card has room for the single pod that is served next."""
        entries = self.cluster.queue.refreshed(0.0).entries()
        if not self.tried_all or not entries or len(entries[0].pending.pods) > 1:
            return
        (pod,) = entries[0].pending.pods
        if pod.metadata.uid in self.waiting() and pod.metadata.uid not in self.gang_of:
            names = list(CARDS)
            result = self.cluster.evaluator.filter(pod, names, QueueConstraints())
            assert not result.fitting


TestExtender = pytest.mark.timeout(600)(ExtenderMachine.TestCase)
TestExtender.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
