"""Metrics of a gateway, and whether it is ready: `/metrics`, `/healthz` and `/readyz` on a port of their own.

`fenka_gateway_requests` is the signal for scaling: requests at replicas and requests that wait for one.
"""

from collections.abc import Callable, Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fenka.gateway.dispatcher import BUCKETS_S, Durations
from fenka.gateway.server import Gateway
from fenka.jobs.routing_table import replica_label
from fenka.server.listener import ThrottledText

PREFIX = "fenka_gateway"


class GatewayMetrics(Collector):
    """The metrics of one gateway process, read when Prometheus asks."""

    def __init__(self, gateway: Gateway, table_valid: Callable[[], bool]) -> None:
        self._gateway, self._table_valid = gateway, table_valid
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> Iterator[bytes]:
        """Yield the metrics in Prometheus' format."""
        yield generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics are read when they are asked for."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Implement prometheus_client's Collector."""
        dispatcher = self._gateway.dispatcher
        router, waiting = dispatcher.router, len(dispatcher.buffer)
        yield _gauge(
            "requests", "Requests at replicas or waiting for one", router.in_flight + waiting
        )
        yield _gauge("requests_waiting", "Requests that wait for a replica", waiting)
        yield _gauge("waiting_bytes", "Memory of requests that wait", dispatcher.buffer.total_bytes)
        yield _gauge(
            "connections", "Connections of clients", len(self._gateway.clients.connections)
        )
        yield _gauge("table_valid", "0 if the newest routing table is invalid", self._table_valid())
        yield from self._versions()
        yield from self._responses()
        yield from self._outcomes()

    def _versions(self) -> Iterator[Metric]:
        router = self._gateway.dispatcher.router
        in_flight = GaugeMetricFamily(
            f"{PREFIX}_requests_in_flight", "Requests at replicas", labels=("version",)
        )
        weight = GaugeMetricFamily(
            f"{PREFIX}_version_weight", "Weight of a version", labels=("version",)
        )
        idle = GaugeMetricFamily(
            f"{PREFIX}_version_idle_seconds",
            "Time since a version got its last request",
            labels=("version",),
        )
        now = self._gateway.dispatcher.clock()
        for version in router.versions.values():
            in_flight.add_metric((version.name,), version.in_flight)
            weight.add_metric((version.name,), version.weight)
            if version.used_at is not None:
                idle.add_metric((version.name,), now - version.used_at)
        replicas = GaugeMetricFamily(
            f"{PREFIX}_replicas", "Replicas by state", labels=("version", "state")
        )
        ending = GaugeMetricFamily(
            f"{PREFIX}_terminating_requests",
            "Requests at a replica that gets no new ones",
            labels=("version", "replica"),
        )
        states: dict[tuple[str, str], int] = {}
        for replica in router.replicas():
            state = "unreachable" if replica.failures else "ready"
            if replica.terminating:
                state = "terminating"
                label = replica_label(replica.host, replica.ports)
                ending.add_metric((replica.version, label), replica.in_flight)
            states[replica.version, state] = states.get((replica.version, state), 0) + 1
        for labels, count in states.items():
            replicas.add_metric(labels, count)
        yield from (in_flight, weight, idle, replicas, ending)

    def _responses(self) -> Iterator[Metric]:
        statistics = self._gateway.dispatcher.statistics
        responses = CounterMetricFamily(
            f"{PREFIX}_responses", "Responses by version and status", labels=("version", "status")
        )
        for (version, status), count in statistics.responses.items():
            responses.add_metric((version, str(status)), count)
        yield responses
        seconds = HistogramMetricFamily(
            f"{PREFIX}_request_seconds", "Time to the end of the response", labels=("version",)
        )
        for version, durations in statistics.durations.items():
            seconds.add_metric((version,), list(_cumulative(durations)), durations.total_s)
        yield seconds

    def _outcomes(self) -> Iterator[Metric]:
        statistics = self._gateway.dispatcher.statistics
        rejected = CounterMetricFamily(
            f"{PREFIX}_rejected", "Requests without a complete response", labels=("reason",)
        )
        for reason, count in statistics.rejected.items():
            rejected.add_metric((reason,), count)
        yield rejected
        for name, text, count in (
            ("buffered", "Requests that waited for a replica", statistics.buffered),
            ("abandoned", "Requests whose clients hung up", statistics.abandoned),
            ("retries", "Requests that were sent a second time", statistics.retries),
            ("unreachable", "Connections that replicas did not accept", statistics.unreachable),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=count)


def admin_app(gateway: Gateway, metrics: GatewayMetrics) -> web.Application:
    """Return the application with the metrics. A gateway is ready from its first table until it drains."""
    text = ThrottledText(metrics.text)

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=await text(), content_type="text/plain")

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        if gateway.clients.draining:
            return web.Response(status=503, text="the gateway ends\n")
        if not gateway.dispatcher.has_table:
            return web.Response(status=503, text="the replicas are not known yet\n")
        return web.Response(text="ok\n")

    app = web.Application()
    for path, handler in (("/metrics", show), ("/healthz", alive), ("/readyz", ready)):
        app.router.add_get(path, handler)
    return app


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _cumulative(durations: Durations) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip([*map(str, BUCKETS_S), "+Inf"], durations.counts, strict=True):
        total += count
        yield bound, total
