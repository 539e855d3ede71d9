"""Metrics of a program in Prometheus' format. Their names and meaning are listed in the docs."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Rows = Iterable[tuple[Sequence[str], float]]
"""The values of the labels, with a value each."""


class ProgramMetrics(Collector):
    """Metrics of which `collect` yields those that are read when Prometheus asks.

    Attributes:
        registry: has them, and those that are counted as things happen.
        prefix: of all names that `gauge` and its like are given.
    """

    prefix: str

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.registry.register(self)

    def text(self) -> Iterator[bytes]:
        """Yield the metrics in Prometheus' format."""
        yield generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics are read when they are asked for."""
        return ()

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """Return a gauge without labels."""
        return GaugeMetricFamily(self.prefix + name, text, value=value)

    def gauges(self, name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
        """Return a gauge with labels."""
        return _with_rows(GaugeMetricFamily(self.prefix + name, text, labels=labels), rows)

    def counters(self, name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
        """Return a counter with labels."""
        return _with_rows(CounterMetricFamily(self.prefix + name, text, labels=labels), rows)


def _with_rows(family: CounterMetricFamily | GaugeMetricFamily, rows: Rows) -> Metric:
    for labels, value in rows:
        family.add_metric(labels, value)
    return family
