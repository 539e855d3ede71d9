"""Prometheus metrics. Their names and meaning are listed in docs/scheduler.md."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterState
from fenka.core.inventory import Card
from fenka.core.usage import CardUsage
from fenka.dialects.base import driver_uuid
from fenka.scheduler.informers import ClusterInformers
from fenka.scheduler.queue_controller import QueueController

MIB = 1024 * 1024
SHOWN = 50
"""Positions that are shown, so that the number of series is bounded."""
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


_CARD_METRICS: tuple[tuple[str, str, Callable[[Card, CardUsage], int]], ...] = (
    (
        "fenka_scheduler_card_memory_bytes",
        "Memory of a card",
        lambda card, _: card.memory_mib * MIB,
    ),
    (
        "fenka_scheduler_card_memory_allocated_bytes",
        "Memory of a card that is allocated to pods",
        lambda _, used: used.memory_mib * MIB,
    ),
    (
        "fenka_scheduler_card_usable",
        "0 for an unhealthy or cordoned card",
        lambda card, _: card.healthy and not card.cordoned,
    ),
)


class Metrics:
    """The metrics of one replica."""

    def __init__(self, state: "StateCollector") -> None:
        self._state = state
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
            "Calls that were forwarded to the leader, by verb",
            ["verb"],
            registry=self._registry,
        )

    def text(self) -> Iterator[bytes]:
        """Yield the metrics in Prometheus' format, in parts."""
        yield from self._state.cards()
        yield generate_latest(self._registry)


class StateCollector(Collector):
    """Reads the cluster when Prometheus asks; nothing is counted twice."""

    def __init__(
        self,
        cluster: ClusterState,
        informers: ClusterInformers,
        queue: QueueController,
        outcomes: Mapping[str, int],
        is_leading: Callable[[], bool],
        expiries: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Args:
        cluster: the cards, and what is used of them.
        informers: how old the collections are, and all pods.
        queue: the pending pods; shown by the leader.
        outcomes: the number of bindings by outcome.
        is_leading: whether this replica leads.
        expiries: returns when certificates end, in seconds since 1970, by name.
        """
        self._cluster, self._informers, self._queue = cluster, informers, queue
        self._outcomes, self._is_leading, self._expiries = outcomes, is_leading, expiries

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics are read when they are asked for."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Return all metrics but those of cards."""
        yield from self._pending_pods()
        leading = self._is_leading()
        if leading:
            yield from self._positions()
        binds = CounterMetricFamily(
            "fenka_scheduler_binds", "Bindings by outcome", labels=["outcome"]
        )
        for outcome, count in self._outcomes.items():
            binds.add_metric([outcome], count)
        yield binds
        ages = GaugeMetricFamily(
            "fenka_scheduler_watch_age_seconds",
            "Time since the API server last reported a collection",
            labels=["collection"],
        )
        for name, informer in self._informers.by_collection.items():
            ages.add_metric([name], informer.age_s)
        yield ages
        expiries = GaugeMetricFamily(
            "fenka_scheduler_certificate_expiry_timestamp_seconds",
            "When a certificate of this replica expires, since 1970",
            labels=["name"],
        )
        for name, at in self._expiries().items():
            expiries.add_metric([name], at)
        yield expiries
        yield GaugeMetricFamily(
            "fenka_scheduler_leading", "1 on the replica that binds", value=int(leading)
        )

    def cards(self) -> Iterator[bytes]:
        """Yield the metrics of all cards, node by node: prometheus_client would take a second for 40,000."""
        shared_nodes = self._cluster.shared_nodes()
        for name, help_text, value in _CARD_METRICS:
            yield f"# HELP {name} {help_text}\n# TYPE {name} gauge\n".encode()
            for shared in shared_nodes:
                node = shared.node.name
                lines = (
                    f"{name}{_labels(node, card)} "
                    f"{float(value(card, self._cluster.card_usage(node, card.uuid)))}\n"
                    for card in shared.node.cards
                )
                yield "".join(lines).encode()

    def _pending_pods(self) -> Iterator[Metric]:
        now = time.time()
        ages = [
            now - _created(it) for it in self._informers.pods.objects.values() if _is_pending(it)
        ]
        yield GaugeMetricFamily(
            "fenka_scheduler_waiting_pods",
            "Pods that request a slice and have none",
            value=len(ages),
        )
        yield GaugeMetricFamily(
            "fenka_scheduler_waiting_oldest_seconds",
            "Age of the oldest of them",
            value=max(ages, default=0.0),
        )

    def _positions(self) -> Iterator[Metric]:
        positions = GaugeMetricFamily(
            "fenka_scheduler_waiting_position",
            f"Position of the first {SHOWN} pending pods: 1 is served next",
            labels=["namespace", "pod"],
        )
        for number, entry in enumerate(self._queue.entries()[:SHOWN], start=1):
            positions.add_metric([entry.pending.namespace, entry.pending.name], number)
        yield positions
        yield GaugeMetricFamily(
            "fenka_scheduler_starvation_seconds",
            "By how much later a request came, at most, that was served before one that still waits",
            value=self._queue.max_bypass_s,
        )
        yield GaugeMetricFamily(
            "fenka_scheduler_starvation_bound_seconds",
            "Upper bound of fenka_scheduler_starvation_seconds",
            value=self._queue.max_bypass_bound_s,
        )


def _labels(node: str, card: Card) -> str:
    model, uuid = _escaped(card.model), _escaped(driver_uuid(card.uuid))
    return f'{{index="{card.index}",model="{model}",node="{node}",uuid="{uuid}"}}'


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _is_pending(pod: Pod) -> bool:
    return not pod.spec.node_name and not pod.finished and pod.demand().requests_gpu


def _created(pod: Pod) -> float:
    try:
        return datetime.fromisoformat(pod.metadata.creation_timestamp).timestamp()
    except ValueError:
        return time.time()
