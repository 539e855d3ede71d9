"""Prometheus metrics. Their names and meaning are listed in docs/reference/metrics.md."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from fenka.cluster.objects import Pod, seconds
from fenka.cluster.queue_snapshot import QueueEntry
from fenka.cluster.state import ClusterState
from fenka.core.columnar_placer import count_reasons
from fenka.core.inventory import Card
from fenka.core.reasons import main_reason
from fenka.core.units import MIB
from fenka.dialects.base import SharedNode, driver_uuid
from fenka.scheduler.binder import OUTCOMES
from fenka.scheduler.informers import ClusterInformers
from fenka.scheduler.queue_controller import QueueController
from fenka.server.metrics import ProgramMetrics
from fenka.server.queue_metrics import (
    PendingSample,
    pending_metrics,
    reason_metric,
    wait_histogram,
)

SHOWN = 50
"""Positions that are shown, so that the number of series is bounded."""
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


_CARD_METRICS: tuple[tuple[str, str, Callable[[Card, int], int]], ...] = (
    (
        "fenka_scheduler_card_memory_bytes",
        "Memory of a card",
        lambda card, _: card.memory_mib * MIB,
    ),
    (
        "fenka_scheduler_card_memory_allocated_bytes",
        "Memory of a card that is allocated to pods",
        lambda _, used_mib: used_mib * MIB,
    ),
    (
        "fenka_scheduler_card_usable",
        "0 for an unhealthy or cordoned card",
        lambda card, _: card.healthy and not card.cordoned,
    ),
)


class SchedulerMetrics(ProgramMetrics):
    """The metrics of one replica."""

    prefix = "fenka_scheduler_"

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
        super().__init__()
        self.requests = Histogram(
            "fenka_scheduler_request_seconds",
            "Time to answer kube-scheduler, by verb",
            ["verb"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.waits = wait_histogram(self.registry)
        self._counted: Sequence[QueueEntry] = ()
        """The queue when its reasons were counted."""
        self._reasons = reason_metric(())
        self.forwarded = Counter(
            "fenka_scheduler_forwarded",
            "Calls that were forwarded to the leader, by verb",
            ["verb"],
            registry=self.registry,
        )

    def observe_bound(self, pod: Pod) -> None:
        """Record how long a pod has waited that is bound now."""
        now = time.time()
        self.waits.observe(max(now - (seconds(pod.metadata.creation_timestamp) or now), 0))

    def text(self) -> Iterator[bytes]:
        """Yield the metrics in Prometheus' format, in parts."""
        yield from self._cards()
        if self._is_leading():
            for _ in self._count_reasons():
                yield b""
        yield from super().text()

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of the replica and of the queue."""
        leading = self._is_leading()
        yield self.gauge("leading", "1 on the replica that binds", leading)
        yield from pending_metrics(*self._pending_pods())
        if leading:
            yield from self._positions()
        yield self.counters(
            "binds",
            "Bindings by outcome",
            ["outcome"],
            (((outcome,), self._outcomes.get(outcome, 0)) for outcome in OUTCOMES),
        )
        yield self.gauges(
            "watch_age_seconds",
            "Time since the API server last reported a collection",
            ["collection"],
            (((name,), informer.age_s) for name, informer in self._informers.by_collection.items()),
        )
        yield self.gauges(
            "certificate_expiry_timestamp_seconds",
            "When a certificate of this replica expires, since 1970",
            ["name"],
            (((name,), expires_at) for name, expires_at in self._expiries().items()),
        )

    def _cards(self) -> Iterator[bytes]:
        """Yield the metrics of all cards, node by node: prometheus_client would take a second for 40,000."""
        shared_nodes = self._cluster.shared_nodes()
        for name, help_text, value in _CARD_METRICS:
            yield f"# HELP {name} {help_text}\n# TYPE {name} gauge\n".encode()
            for shared in shared_nodes:
                node = shared.node.name
                lines = (
                    f"{name}{_labels(node, card)} {float(value(card, self._used_mib(shared, card)))}\n"
                    for card in shared.physical_cards
                )
                yield "".join(lines).encode()

    def _used_mib(self, shared: SharedNode, card: Card) -> int:
        """Return the memory of a card that is allocated to pods, of a divided one on its instances."""
        node = shared.node
        used = self._cluster.card_usage(node.name, card.uuid).memory_mib
        if not card.divided:
            return used
        return used + sum(
            self._cluster.card_usage(node.name, instance.uuid).memory_mib
            for instance in node.cards
            if instance.parent == card.uuid
        )

    def _pending_pods(self) -> tuple[list[PendingSample], float]:
        now = time.time()
        return [
            PendingSample(pod.metadata.namespace, seconds(pod.metadata.creation_timestamp) or now)
            for pod in self._informers.pods.objects.values()
            if _is_pending(pod)
        ], now

    def _count_reasons(self) -> Iterator[None]:
        """Count why the first entries wait, in steps: one of 8,000 cards takes 0.6 ms."""
        entries = self._queue.state.entries()
        if entries is self._counted:
            return
        rejections = [
            entry.unschedulable for entry in entries[:SHOWN] if entry.unschedulable is not None
        ]
        yield from count_reasons(rejections)
        reasons = [main_reason(rejection.counts()) for rejection in rejections]
        self._counted, self._reasons = entries, reason_metric(reasons)

    def _positions(self) -> Iterator[Metric]:
        queue = self._queue.state
        yield self._reasons
        pending = [entry.pending for entry in queue.entries()[:SHOWN]]
        yield self.gauges(
            "waiting_position",
            f"Position of the first {SHOWN} pending pods: 1 is served next",
            ["namespace", "pod"],
            (
                ((entry.namespace, entry.name), position)
                for position, entry in enumerate(pending, start=1)
            ),
        )
        yield self.gauge(
            "bypassed_seconds",
            "By how much later a request came, at most, that was served before one that still waits",
            queue.max_bypass_s(),
        )
        yield self.gauge(
            "max_penalty_seconds",
            "Upper bound of fenka_scheduler_bypassed_seconds",
            queue.max_bypass_bound_s,
        )


def _labels(node: str, card: Card) -> str:
    model, uuid = _escaped(card.model), _escaped(driver_uuid(card.uuid))
    return f'{{index="{card.index}",model="{model}",node="{node}",uuid="{uuid}"}}'


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _is_pending(pod: Pod) -> bool:
    return not pod.spec.node_name and not pod.finished and pod.demand().requests_gpu
