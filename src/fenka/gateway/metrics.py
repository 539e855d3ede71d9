"""Metrics of a gateway.

`fenka_gateway_requests` is the signal for scaling: requests at replicas and requests that wait for one.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from fenka.gateway.dispatcher import BUCKETS_S, Durations
from fenka.gateway.server import Gateway
from fenka.jobs.routing_table import replica_label
from fenka.server.metrics import ProgramMetrics


class GatewayMetrics(ProgramMetrics):
    """The metrics of one gateway process."""

    prefix = "fenka_gateway_"

    def __init__(self, gateway: Gateway, table_valid: Callable[[], bool]) -> None:
        self._gateway, self._table_valid = gateway, table_valid
        super().__init__()

    def collect(self) -> Iterator[Metric]:
        """Implement prometheus_client's Collector."""
        dispatcher = self._gateway.dispatcher
        router, waiting = dispatcher.router, len(dispatcher.buffer)
        yield self.gauge(
            "requests", "Requests at replicas or waiting for one", router.in_flight + waiting
        )
        yield self.gauge("requests_waiting", "Requests that wait for a replica", waiting)
        yield self.gauge(
            "waiting_bytes", "Memory of requests that wait", dispatcher.buffer.total_bytes
        )
        yield self.gauge(
            "connections", "Connections of clients", len(self._gateway.clients.connections)
        )
        yield self.gauge(
            "table_valid", "0 if the newest routing table is invalid", self._table_valid()
        )
        yield from self._versions()
        yield from self._responses()
        yield from self._outcomes()

    def _versions(self) -> Iterator[Metric]:
        router = self._gateway.dispatcher.router
        now = self._gateway.dispatcher.clock()
        versions = {(name,): version for name, version in router.versions.items()}
        states = Counter[tuple[str, str]]()
        ending = list[tuple[tuple[str, str], int]]()
        for replica in router.replicas():
            state = "unreachable" if replica.failures else "ready"
            if replica.terminating:
                state = "terminating"
                label = replica_label(replica.host, replica.ports)
                ending.append(((replica.version, label), replica.in_flight))
            states[replica.version, state] += 1
        yield self.gauges(
            "requests_in_flight",
            "Requests at replicas",
            ("version",),
            ((name, version.in_flight) for name, version in versions.items()),
        )
        yield self.gauges(
            "version_weight",
            "Weight of a version",
            ("version",),
            ((name, version.weight) for name, version in versions.items()),
        )
        yield self.gauges(
            "version_idle_seconds",
            "Time since a version got its last request",
            ("version",),
            (
                (name, now - version.used_at)
                for name, version in versions.items()
                if version.used_at is not None
            ),
        )
        yield self.gauges("replicas", "Replicas by state", ("version", "state"), states.items())
        yield self.gauges(
            "terminating_requests",
            "Requests at a replica that gets no new ones",
            ("version", "replica"),
            ending,
        )

    def _responses(self) -> Iterator[Metric]:
        statistics = self._gateway.dispatcher.statistics
        yield self.counters(
            "responses",
            "Responses by version and status",
            ("version", "status"),
            (
                ((version, str(status)), count)
                for (version, status), count in statistics.responses.items()
            ),
        )
        seconds = HistogramMetricFamily(
            f"{self.prefix}request_seconds", "Time to the end of the response", labels=("version",)
        )
        for version, durations in statistics.durations.items():
            seconds.add_metric((version,), list(_cumulative(durations)), durations.total_s)
        yield seconds

    def _outcomes(self) -> Iterator[Metric]:
        statistics = self._gateway.dispatcher.statistics
        yield self.counters(
            "rejected",
            "Requests without a complete response",
            ("reason",),
            (((reason,), count) for reason, count in statistics.rejected.items()),
        )
        for name, text, count in (
            ("buffered", "Requests that waited for a replica", statistics.buffered),
            ("abandoned", "Requests whose clients hung up", statistics.abandoned),
            ("retries", "Requests that were sent a second time", statistics.retries),
            ("unreachable", "Connections that replicas did not accept", statistics.unreachable),
        ):
            yield CounterMetricFamily(self.prefix + name, text, value=count)


def _cumulative(durations: Durations) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip([*map(str, BUCKETS_S), "+Inf"], durations.counts, strict=True):
        total += count
        yield bound, total
