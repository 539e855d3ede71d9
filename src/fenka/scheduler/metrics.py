"""What Prometheus is told. Names and meaning are listed in docs/scheduler.md."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterState, requests_gpu
from fenka.dialects.base import driver_uuid
from fenka.scheduler.binder import Binder
from fenka.scheduler.informers import ClusterInformers
from fenka.scheduler.queue_controller import QueueController

MIB = 1024 * 1024
SHOWN = 50
"""Positions, so that the number of series stays bounded."""
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """One replica's."""

    def __init__(self, state: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(state)
        self.requests = Histogram(
            "fenka_scheduler_request_seconds",
            "Time to answer kube-scheduler, by verb",
            ["verb"],
            buckets=BUCKETS,
            registry=self._registry,
        )
        self.forwarded = Counter(
            "fenka_scheduler_forwarded",
            "Calls that were passed on to the leader, by verb",
            ["verb"],
            registry=self._registry,
        )

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)


class StateCollector(Collector):
    """Read from the world when Prometheus asks; nothing is counted twice."""

    def __init__(
        self,
        world: ClusterState,
        cluster: ClusterInformers,
        binder: Binder,
        leading: Callable[[], QueueController | None],
    ) -> None:
        """leading: the order that this replica keeps, None where another leads."""
        self._world, self._cluster, self._binder = world, cluster, binder
        self._leading = leading
        self.expiries: Callable[[], Mapping[str, float]] = dict
        """When certificates end, in seconds since 1970, by name."""

    def describe(self) -> Iterable[Metric]:
        """Nothing before there is a world."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Everything."""
        yield from self._cards()
        yield from self._queue()
        order = self._leading()
        if order is not None:
            yield from self._order(order)
        binds = CounterMetricFamily(
            "fenka_scheduler_binds", "Bindings by how they ended", labels=["outcome"]
        )
        for outcome, count in self._binder.outcomes.items():
            binds.add_metric([outcome], count)
        yield binds
        ages = GaugeMetricFamily(
            "fenka_scheduler_watch_age_seconds",
            "Since the API server was last heard about a collection",
            labels=["collection"],
        )
        for name, watch in self._cluster.watches.items():
            ages.add_metric([name], watch.age_s)
        yield ages
        expiries = GaugeMetricFamily(
            "fenka_scheduler_certificate_expiry_timestamp_seconds",
            "When a certificate of this replica ends, since 1970",
            labels=["name"],
        )
        for name, at in self.expiries().items():
            expiries.add_metric([name], at)
        yield expiries
        yield GaugeMetricFamily(
            "fenka_scheduler_leading", "1 on the replica that binds", value=int(order is not None)
        )

    def _cards(self) -> Iterator[Metric]:
        labels = ["node", "index", "uuid", "model"]
        total = GaugeMetricFamily(
            "fenka_scheduler_card_memory_bytes", "Memory of a card", labels=labels
        )
        held = GaugeMetricFamily(
            "fenka_scheduler_card_memory_allocated_bytes",
            "Memory of a card that pods hold",
            labels=labels,
        )
        usable = GaugeMetricFamily(
            "fenka_scheduler_card_usable", "0 for a sick or cordoned card", labels=labels
        )
        for share in self._world.shared_nodes():
            for card in share.node.cards:
                values = [share.node.name, str(card.index), driver_uuid(card.uuid), card.model]
                total.add_metric(values, card.memory_mib * MIB)
                used = self._world.card_usage(share.node.name, card.uuid)
                held.add_metric(values, used.memory_mib * MIB)
                usable.add_metric(values, int(card.healthy and not card.cordoned))
        return iter((total, held, usable))

    def _queue(self) -> Iterator[Metric]:
        now = time.time()
        ages = [now - _created(it) for it in self._cluster.pods.objects.values() if _waits(it)]
        yield GaugeMetricFamily(
            "fenka_scheduler_waiting_pods", "Pods that want a slice and have none", value=len(ages)
        )
        yield GaugeMetricFamily(
            "fenka_scheduler_waiting_oldest_seconds",
            "Age of the oldest of them",
            value=max(ages, default=0.0),
        )

    def _order(self, order: QueueController) -> Iterator[Metric]:
        positions = GaugeMetricFamily(
            "fenka_scheduler_waiting_position",
            f"Of the first {SHOWN} that wait: 1 is served next",
            labels=["namespace", "pod"],
        )
        for number, place in enumerate(order.places()[:SHOWN], start=1):
            positions.add_metric([place.waiter.namespace, place.waiter.name], number)
        yield positions
        yield GaugeMetricFamily(
            "fenka_scheduler_starvation_seconds",
            "By how much later a request has come, at most, that was served before one that still waits",
            value=order.max_bypass_s,
        )
        yield GaugeMetricFamily(
            "fenka_scheduler_starvation_bound_seconds",
            "What that is never more than",
            value=order.max_bypass_bound_s,
        )


def _waits(pod: Pod) -> bool:
    return not pod.spec.node_name and not pod.finished and requests_gpu(pod)


def _created(pod: Pod) -> float:
    try:
        return datetime.fromisoformat(pod.metadata.creation_timestamp).timestamp()
    except ValueError:
        return time.time()
