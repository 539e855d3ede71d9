"""What the pending queue keeps between two calls: with it the result is that of a queue without a past."""

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from fenka.cluster.objects import Pod
from fenka.cluster.pending_queue import OVERDUE_TTL_S, PendingQueue
from fenka.cluster.queue_snapshot import QueueSnapshot
from fenka.cluster.state import ClusterState
from fenka.core.backfill import complete
from fenka.core.inventory import Toleration
from fenka.core.queue import Fairness
from fenka.dialects import gpushare
from fenka.dialects.nodes import CORDONED, MODE_LABEL, PLACEMENT_LABEL
from tests.builders import T4_MIB, Json, a_node, gang_labels, on_card
from tests.fakes.queue import START, UNSCHEDULABLE, make, stamp

PLAIN = Fairness(penalty_per_request_s=0)
NAMES = ("a", "b")
LABELS: list[Json] = [
    {},
    {"zone": "x"},
    {PLACEMENT_LABEL: "spread"},
    {MODE_LABEL: "core_mem"},
    {MODE_LABEL: "cgpu"},
    # they contradict each other: the node admits nothing new
    {"gpushare": "true", "cgpu": "false"},
]


class QueueCaches(RuleBasedStateMachine):
    """Nodes a and b have two cards each. All pods that are bound have started."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.now = itertools.count(), 100.0
        self.state = ClusterState(a_node(name, T4_MIB, T4_MIB) for name in NAMES)
        self.queue = PendingQueue(self.state, "binpack", PLAIN)
        self.open: dict[str, Pod] = {}
        self.bound: dict[str, Json] = {}

    # ---- pods ----

    @rule(
        units=st.integers(1, 15),
        priority=st.sampled_from([None, 0, 5]),
        runs=st.none() | st.integers(10, 200),
        selector=st.sampled_from([{}, {}, {"zone": "x"}]),
        cards=st.sampled_from([1, 1, 2]),
        in_gang=st.sampled_from([False, False, True]),
    )
    def create(
        self,
        units: int,
        priority: int | None,
        runs: int | None,
        selector: Json,
        cards: int,
        in_gang: bool,
    ) -> None:
        """A pod comes; 15 units are more than any card has."""
        name = f"p{next(self.ids):03}"
        labels = {gpushare.COUNT: str(cards), **(gang_labels("g", 2) if in_gang else {})}
        given: Json = {"priority": priority, "runs": runs, "labels": labels}
        self.open[name] = make(
            name,
            units * cards,
            self.now,
            said=UNSCHEDULABLE,
            spec={"nodeSelector": selector},
            **given,
        )

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """A pending pod is deleted."""
        name = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[name]
        self.queue.forget(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def tolerate(self, data: st.DataObject) -> None:
        """A pending pod gets a toleration, the only rule about nodes that can change."""
        name = data.draw(st.sampled_from(sorted(self.open)))
        spec = replace(self.open[name].spec, tolerations=(Toleration(operator="Exists"),))
        self.open[name] = replace(self.open[name], spec=spec)

    @rule(
        units=st.integers(1, 14),
        node=st.sampled_from(NAMES),
        card=st.integers(0, 1),
        runs=st.none() | st.integers(10, 200),
    )
    def hold(self, units: int, node: str, card: int, runs: int | None) -> None:
        """A pod is bound, whatever else the card holds."""
        name = f"h{next(self.ids):03}"
        given: Json = {"node": node, "annotations": on_card(card, units), "runs": runs}
        self.bound[name] = {"units": units, "at": self.now, "started": self.now, **given}
        self.state.set_pod(make(name, **self.bound[name]))

    @precondition(lambda self: self.bound)
    @rule(data=st.data(), ends=st.booleans())
    def let_go(self, data: st.DataObject, ends: bool) -> None:
        """A pod ends, or is deleted with a grace period."""
        name = data.draw(st.sampled_from(sorted(self.bound)))
        if ends:
            del self.bound[name]
            self.state.forget_pod(name)
            self.queue.forget(name)
            return
        pod = make(name, **self.bound[name])
        pod.metadata.deletion_timestamp = stamp(self.now + 30)
        self.state.set_pod(pod)

    # ---- nodes ----

    @rule(
        name=st.sampled_from(NAMES),
        labels=st.sampled_from(LABELS),
        cordoned=st.sampled_from(["", "0", "0,1"]),
        unschedulable=st.booleans(),
        sizes=st.sampled_from([(T4_MIB, T4_MIB), (T4_MIB, 7611), ()]),
    )
    def change_node(
        self, name: str, labels: Json, cordoned: str, unschedulable: bool, sizes: tuple[int, ...]
    ) -> None:
        """A node changes in any way, or has no cards any more."""
        given: dict[str, Any] = {"annotations": {CORDONED: cordoned}, "labels": labels}
        self.state.set_node(a_node(name, *sizes, unschedulable=unschedulable, **given))

    @rule(name=st.sampled_from(NAMES), unhealthy=st.sampled_from([(), (0,), (0, 1)]))
    def report_health(self, name: str, unhealthy: tuple[int, ...]) -> None:
        """A health daemon names cards."""
        self.state.set_unhealthy(name, frozenset(unhealthy))

    @rule(name=st.sampled_from(NAMES))
    def remove_node(self, name: str) -> None:
        """A node goes; its pods stay for a while."""
        self.state.forget_node(name)

    @rule(seconds=st.sampled_from([1.0, 20.0, OVERDUE_TTL_S, 300.0]))
    def wait(self, seconds: float) -> None:
        """Deadlines pass."""
        self.now += seconds

    # ---- what holds ----

    def _schedule(self, queue: PendingQueue) -> QueueSnapshot:
        return complete(queue.schedule(self.open.values(), START + self.now))

    @invariant()
    def result_is_that_of_a_new_queue(self) -> None:
        """In all that a snapshot has, sentences included."""
        seasoned = self._schedule(self.queue)
        fresh = self._schedule(PendingQueue(self.state, "binpack", PLAIN))
        assert seasoned.entries == fresh.entries
        assert [it.why for it in seasoned.entries] == [it.why for it in fresh.entries]
        assert seasoned.can_reserve == fresh.can_reserve
        assert seasoned.node_of_card == fresh.node_of_card


TestQueueCaches = QueueCaches.TestCase
TestQueueCaches.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
