"""Metrics of pending requests, with the same names for a cluster's scheduler and a workstation's daemon."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from fenka.core.reasons import ReasonCode

WAIT_BUCKETS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


def wait_histogram(registry: CollectorRegistry) -> Histogram:
    """Return the histogram of waits that have ended with a grant."""
    return Histogram(
        "fenka_scheduler_wait_seconds",
        "Time from a request to its grant",
        buckets=WAIT_BUCKETS,
        registry=registry,
    )


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A pending request: its namespace, on a workstation its user; and since when it is pending."""

    namespace: str
    requested_at: float


def pending_metrics(pending: Collection[PendingSample], now: float) -> Iterator[Metric]:
    """Yield how many requests are pending, since when, and whose."""
    oldest_s = now - min((sample.requested_at for sample in pending), default=now)
    text = "Pods that request a slice and have none"
    yield GaugeMetricFamily("fenka_scheduler_waiting_pods", text, value=len(pending))
    text = "Age of the oldest of them"
    yield GaugeMetricFamily("fenka_scheduler_waiting_oldest_seconds", text, value=oldest_s)
    family = GaugeMetricFamily(
        "fenka_scheduler_namespace_waiting_pods",
        "Pods that request a slice and have none, by namespace",
        labels=("namespace",),
    )
    for namespace, count in sorted(Counter(sample.namespace for sample in pending).items()):
        family.add_metric((namespace,), count)
    yield family


def reason_metric(reasons: Iterable[ReasonCode | None]) -> Metric:
    """Return how many pending requests have which reason. All reasons are published, also those of none.

    reasons: Of each request the one that most cards have; None if there is no card.
    """
    counts = Counter(reasons)
    family = GaugeMetricFamily(
        "fenka_scheduler_waiting_reasons",
        "Pending requests at the front of the queue by the reason that most cards have",
        labels=("reason",),
    )
    for code in ReasonCode:
        family.add_metric((code.name.lower(),), counts[code])
    return family
