"""The queue under any events in any order: after each of them its answers are consistent."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fenka.cluster.objects import QUEUE_GATE, Pod
from fenka.cluster.pending_queue import DEPTH
from fenka.cluster.queue_state import RESERVATION_TTL_S, queue_state
from fenka.cluster.state import ClusterState
from fenka.core.backfill import complete
from fenka.core.queue import Fairness
from fenka.core.usage import UsageOverlay
from fenka.dialects import gpushare
from tests.builders import T4_MIB, Json, a_node, on_card
from tests.fakes.queue import START, UNSCHEDULABLE, make

NAMES = ("a", "b")
GATED: Json = {"schedulingGates": [{"name": QUEUE_GATE}]}


class QueueMachine(RuleBasedStateMachine):
    """`open` has the pods without a node, `bound` the others. Nodes a and b have two T4 each."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count()
        self.now = START
        self.cluster = ClusterState([a_node(name, T4_MIB, T4_MIB) for name in NAMES])
        self.queue = queue_state(self.cluster, fairness=Fairness())
        self.open: dict[str, Pod] = {}
        self.bound: dict[str, Pod] = {}
        self.rejected: set[str] = set()
        self.fitted: dict[str, tuple[float, bool]] = {}
        """Since when each entry has fitted, or had until it left the queue; and if it was tried since."""

    def _set(self, pod: Pod) -> None:
        self.cluster.set_pod(pod)
        self.queue.set_pod(pod, self.now)

    # ---- events ----

    @rule(
        units=st.integers(1, 15),
        namespace=st.sampled_from(["x", "y"]),
        priority=st.sampled_from([0, 0, 5]),
        runs=st.none() | st.integers(10, 100),
        how=st.sampled_from(["new", "unschedulable", "gated"]),
    )
    def create(self, units: int, namespace: str, priority: int, runs: int | None, how: str) -> None:
        """A pod comes; 15 units are more than any card has."""
        name = f"p{next(self.ids):03}"
        self.open[name] = make(
            name,
            units,
            self.now - START,
            runs=runs,
            spec=GATED if how == "gated" else {},
            namespace=namespace,
            said=UNSCHEDULABLE if how == "unschedulable" else {},
            priority=priority,
        )
        self._set(self.open[name])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), nodes=st.frozensets(st.sampled_from(NAMES), min_size=1))
    def reject(self, data: st.DataObject, nodes: frozenset[str]) -> None:
        """kube-scheduler tries a pod, and none of these nodes fits it."""
        uid = data.draw(st.sampled_from(sorted(self.open)))
        self.rejected.add(uid)
        if uid in self.fitted:
            self.fitted[uid] = self.fitted[uid][0], True
        self.queue.reject(self.open[uid], sorted(nodes), self.now)

    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        """The first pods that fit are bound where they fit, or assumed only."""
        fitting = [it for it in self.queue.entries() if it.placements]
        if not fitting:
            return
        entry = data.draw(st.sampled_from(fitting[:2]))
        (placement,) = entry.placements
        uid = entry.pending.id
        pod = self.open[uid]
        self._drop(uid)
        self.cluster.assume(pod, (placement,))
        units, namespace = pod.amount(gpushare.MEMORY), pod.metadata.namespace
        record: Json = {"annotations": on_card(placement.slices[0].card, units)}
        self.bound[uid] = make(uid, units, namespace=namespace, node=placement.node, **record)
        self._set(self.bound[uid])

    @precondition(lambda self: self.open or self.bound)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """A pod goes."""
        uid = data.draw(st.sampled_from(sorted({*self.open, *self.bound})))
        self._drop(uid)
        self.cluster.forget_pod(uid)
        self.queue.forget_pod(uid, self.now)

    @rule(seconds=st.sampled_from([1.0, 4.0, RESERVATION_TTL_S]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    @rule(data=st.data())
    def relist(self, data: st.DataObject) -> None:
        """List the pods again; one may have gone meanwhile."""
        gone = data.draw(st.sampled_from([None, *self.open, *self.bound]))
        if gone is not None:
            self._drop(gone)
        pods = [*self.open.values(), *self.bound.values()]
        self.cluster.replace_pods(pods)
        self.queue.replace_pods(pods, self.now)

    def _drop(self, uid: str) -> None:
        self.open.pop(uid, None)
        self.bound.pop(uid, None)
        self.rejected.discard(uid)
        self.fitted.pop(uid, None)

    # ---- what must hold ----

    @invariant()
    def answers_are_consistent(self) -> None:
        """After the queue was scheduled for what has happened."""
        complete(self.queue.schedule({}, self.now))
        self._entries_are_the_pending_pods()
        self._entries_are_ordered_and_have_one_answer()
        self._placements_fit_together()
        self._constraints_are_those_of_the_entries_before()

    def _entries_are_the_pending_pods(self) -> None:
        """All that a node could hold are in it, but for those that were not tried for too long."""
        assert not self.queue.is_stale({}, self.now)
        ids = [it.pending.id for it in self.queue.entries()]
        assert len(set(ids)) == len(ids)
        pending = {
            uid
            for uid, pod in self.open.items()
            if uid in self.rejected or pod.unschedulable is not None or pod.gated_by(QUEUE_GATE)
        }
        possible = {uid for uid in pending if self.queue.position(self.open[uid], self.now)}
        assert set(ids) <= possible
        assert self.queue.is_empty is (not pending)
        for uid in possible - set(ids):
            assert self.now - self.fitted[uid][0] >= RESERVATION_TTL_S
        for entry in self.queue.entries():
            uid = entry.pending.id
            since, tried = self.fitted.get(uid, (self.now, False))
            if self.now - since >= RESERVATION_TTL_S:
                # kube-scheduler has tried it, so it may fit again, elsewhere.
                assert tried
                since, tried = self.now, False
            self.fitted[uid] = since, tried
            if not entry.placements:
                del self.fitted[uid]

    def _entries_are_ordered_and_have_one_answer(self) -> None:
        """Each fits or has a reason; only the first that do not fit reserve cards."""
        entries = self.queue.entries()
        assert [it.sort_key for it in entries] == sorted(it.sort_key for it in entries)
        assert all(bool(it.placements) != bool(it.why) for it in entries)
        waiting = [it.reservation is not None for it in entries if not it.placements]
        assert waiting == sorted(waiting, reverse=True)
        assert sum(waiting) == min(DEPTH, len(waiting))

    def _placements_fit_together(self) -> None:
        """All placements of the queue beside what pods hold: nothing is promised twice."""
        usage = UsageOverlay(self.cluster)
        for entry in self.queue.entries():
            for placement in entry.placements:
                usage.add(placement)
        for shared in self.cluster.shared_nodes():
            for card in shared.node.cards:
                used = usage.card_usage(shared.node.name, card.uuid)
                assert used.memory_mib <= card.memory_mib

    def _constraints_are_those_of_the_entries_before(self) -> None:
        """The first entry has none; each position is that of the queue."""
        entries = self.queue.entries()
        for number, entry in enumerate(entries, start=1):
            pod = self.open[entry.pending.id]
            constraints = self.queue.constraints(pod, self.now)
            assert (constraints.position, constraints.total) == (number, len(entries))
            earlier = {it.pending.id for it in entries[: number - 1] if it.placements}
            held = {it.entry_id for each in constraints.held.values() for it in each}
            assert held == earlier
            cards = [it.reservation.cards for it in entries[: number - 1] if it.reservation]
            assert constraints.reserved <= frozenset().union(*cards)
            if pod.spec.active_deadline_seconds is None:
                assert constraints.reserved == frozenset().union(*cards)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=80, stateful_step_count=30)
