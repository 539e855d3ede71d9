"""Prometheus metrics of the autoscaler. Their names and meaning are listed in docs/reference/metrics.md."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from fenka.autoscaler.snapshot import Snapshot
from fenka.autoscaler.supply import pauses
from fenka.cloud.port import InstanceState
from fenka.cluster.autoscaling import OrderRecord
from fenka.core.nodes.plan import NodePlan
from fenka.server.metrics import ProgramMetrics

PREFIX = "fenka_autoscaler_"
PLAN_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
OFFER_BUCKETS = (5, 10, 20, 30, 60, 90, 120, 180, 300, 600, 900)


class ActivityCounts:
    """Counts of what has happened since this process started."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.plan_seconds = Histogram(
            f"{PREFIX}plan_seconds",
            "Time to make a plan",
            buckets=PLAN_BUCKETS,
            registry=self.registry,
        )
        self.time_to_offer = Histogram(
            f"{PREFIX}time_to_offer_seconds",
            "Time from an order until a node of it offers its cards",
            buckets=OFFER_BUCKETS,
            registry=self.registry,
        )
        self.orders = Counter(
            f"{PREFIX}orders",
            "Orders by group and outcome",
            ["group", "outcome"],
            registry=self.registry,
        )
        self.gap_ratio = 0.0

    def planned(self, plan: NodePlan, seconds: float) -> None:
        """Count a plan."""
        self.plan_seconds.observe(seconds)
        self.gap_ratio = plan.cost / plan.bound - 1 if plan.bound > 0 else 0.0

    def advanced(self, snapshot: Snapshot, changes: Mapping[str, OrderRecord | None]) -> None:
        """Count what has become of orders. snapshot: from before the changes."""
        for name, changed in changes.items():
            known = snapshot.orders.get(name)
            if changed is None:
                continue
            before = known.slots if known is not None else ()
            for number, slot in enumerate(changed.slots):
                offered = number < len(before) and before[number].offering_at is not None
                if slot.offering_at is not None and not offered:
                    self.time_to_offer.observe(max(slot.offering_at - changed.written_at, 0.0))
            outcome = changed.failure or changed.state
            earlier = None if known is None else known.failure or known.state
            if outcome != earlier and (changed.failure or changed.state == "offering"):
                self.orders.labels(changed.group, outcome).inc()


class Metrics(ProgramMetrics):
    """The metrics of one replica."""

    prefix = PREFIX

    def __init__(
        self,
        counts: ActivityCounts,
        snapshot: Callable[[], Snapshot],
        *,
        leading: Callable[[], bool],
        unserved: Callable[[], int],
        reclaims: Callable[[], Mapping[str, int]],
    ) -> None:
        """Args:
        counts: what has happened.
        snapshot: returns what is there.
        leading: whether this replica leads.
        unserved: returns the number of pods that no node is bought for.
        reclaims: returns take-backs by group.
        """
        self._counts, self._snapshot, self._leading = counts, snapshot, leading
        self._unserved, self._reclaims = unserved, reclaims
        super().__init__(counts.registry)

    def collect(self) -> Iterator[Metric]:
        """Return the gauges; those of the cluster on the leader alone."""
        leading = self._leading()
        yield self.gauge("leading", "1 on the replica that acts", leading)
        yield self.counters(
            "reclaims",
            "Take-backs of spot nodes by group",
            ["group"],
            (((group,), count) for group, count in self._reclaims().items()),
        )
        if leading:
            yield from self._of_cluster(self._snapshot())

    def _of_cluster(self, snapshot: Snapshot) -> Iterator[Metric]:
        yield self.gauges(
            "nodes", "Nodes by group and state", ["group", "state"], node_counts(snapshot).items()
        )
        yield self.gauges(
            "price_per_hour",
            "What the nodes cost an hour now",
            ["capacity"],
            (((capacity,), price) for capacity, price in price_by_capacity(snapshot).items()),
        )
        yield self.gauges(
            "backoff_until_seconds",
            "Until when an offer is not tried, since 1970",
            ["offer"],
            (
                ((f"{key.group}/{key.type}/{key.zone}",), pause.until)
                for key, pause in pauses(snapshot).items()
            ),
        )
        yield self.gauge("unserved_pods", "Pods that no node is bought for", self._unserved())
        yield self.gauge(
            "plan_gap_ratio",
            "By how much the last plan's cost exceeds the bound, at most",
            self._counts.gap_ratio,
        )


def node_counts(snapshot: Snapshot) -> dict[tuple[str, str], int]:
    """Return the number of nodes by group and state, also of those that are asked for."""
    counts = {
        (group.name, state): 0
        for group in snapshot.config.groups
        for state in ("asked", "starting", "ready", "ending")
    }
    joined = {node.spec.provider_id for node in snapshot.own_nodes() if node.ready}
    for instance in snapshot.instances.values():
        state = "ready" if instance.provider_id in joined else "starting"
        if instance.state is InstanceState.ENDING:
            state = "ending"
        key = instance.offer.group, state
        counts[key] = counts.get(key, 0) + 1
    for _, _, record, _ in snapshot.slots(("written", "asked")):
        key = record.group, "asked"
        counts[key] = counts.get(key, 0) + 1
    return counts


def price_by_capacity(snapshot: Snapshot) -> dict[str, float]:
    """Return what the instances cost an hour, at the prices of now."""
    prices = {"on-demand": 0.0, "spot": 0.0}
    for instance in snapshot.instances.values():
        prices[instance.offer.capacity] += snapshot.price_of(instance.offer)
    return prices
