"""Serves the node's metrics for Prometheus: /metrics, /healthz and /readyz."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fenka.core.inventory import Card
from fenka.dialects import gpu_manager
from fenka.dialects.gpu_manager import Metric as GpuManagerMetric
from fenka.kubernetes.http_listener import (
    MAX_READERS,
    HttpListener,
    ThrottledText,
    listening_socket,
    serve_app,
)
from fenka.node.monitor.usage import MIB, SliceUsage, UsageSample

_CONTAINER = ("namespace", "pod", "container", "uuid", "index", "model", "node")
_CARD = ("uuid", "index", "model", "node")


class Exporter(Collector):
    """Renders the last sample. violations: how often each kind was reported."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.sample = UsageSample()
        self.violations = {"memory_limit": 0, "compute_limit": 0, "unmanaged_process": 0}

    def collect(self) -> Iterable[Metric]:
        """Implement prometheus_client's Collector."""
        yield from self._containers()
        yield from self._cards()
        yield from self._gpu_manager_metrics()
        violations = CounterMetricFamily(
            "fenka_node_violations",
            "Violations of limits, by kind.",
            labels=("kind",),
        )
        for kind, count in self.violations.items():
            violations.add_metric((kind,), count)
        yield violations

    def _containers(self) -> Iterator[Metric]:
        columns: Sequence[tuple[str, str, Callable[[SliceUsage], float | None]]] = (
            ("memory_limit_bytes", "Limit of card memory.", lambda usage: usage.limit_bytes),
            (
                "memory_held_bytes",
                "Card memory in use, as its programs report.",
                lambda usage: usage.self_reported_bytes,
            ),
            (
                "memory_used_bytes",
                "Card memory in use, as the driver reports.",
                lambda usage: usage.driver_reported_bytes,
            ),
            (
                "utilization_ratio",
                "Share of the card's time, 0 to 1.",
                lambda usage: usage.compute,
            ),
            ("processes", "Processes on the card.", lambda usage: usage.processes),
        )
        cards: dict[str, Card] = {card.uuid: card for card in self.sample.cards}
        for name, text, value in columns:
            family = GaugeMetricFamily(f"fenka_container_gpu_{name}", text, labels=_CONTAINER)
            for usage in self.sample.usages:
                lease, card, amount = usage.token.lease, cards.get(usage.uuid), value(usage)
                if lease is not None and card is not None and amount is not None:
                    labels = (lease.namespace, lease.pod, lease.container, *self._labels(card))
                    family.add_metric(labels, amount)
            yield family

    def _cards(self) -> Iterator[Metric]:
        allocated: dict[str, int] = {}
        for usage in self.sample.usages:
            allocated[usage.uuid] = allocated.get(usage.uuid, 0) + usage.requested_bytes

        def reading(name: str, scale: float = 1) -> Callable[[Card], float | None]:
            def of(card: Card) -> float | None:
                reading = self.sample.readings.get(card.uuid)
                value = None if reading is None else getattr(reading, name)
                return None if value is None else value * scale

            return of

        columns: Sequence[tuple[str, str, Callable[[Card], float | None]]] = (
            ("memory_total_bytes", "Total memory.", lambda card: card.memory_mib * MIB),
            ("memory_used_bytes", "Memory in use by any process.", reading("used_mib", MIB)),
            (
                "memory_allocated_bytes",
                "Memory allocated to containers.",
                lambda card: allocated.get(card.uuid, 0),
            ),
            (
                "utilization_ratio",
                "Share of time in which a kernel ran.",
                reading("utilisation", 0.01),
            ),
            ("temperature_celsius", "Temperature.", reading("temperature_c")),
            ("power_watts", "Power draw.", reading("power_w")),
            ("healthy", "1 if the card is usable.", lambda card: float(card.healthy)),
            ("cordoned", "1 if the card accepts no new pods.", lambda card: float(card.cordoned)),
        )
        for name, text, value in columns:
            family = GaugeMetricFamily(f"fenka_card_{name}", text, labels=_CARD)
            for card in self.sample.cards:
                amount = value(card)
                if amount is not None:
                    family.add_metric(self._labels(card), amount)
            yield family

    def _gpu_manager_metrics(self) -> Iterator[Metric]:
        """Yield gpu-manager's metrics: per card of a container, and in total; requests only in total."""
        used, requested_time, memory, requested_memory = gpu_manager.METRICS
        columns: Sequence[
            tuple[GpuManagerMetric, str, bool, Callable[[SliceUsage], float | None]]
        ] = (
            (used, "Percent of the card's time.", True, lambda usage: _times(usage.compute, 100)),
            (
                requested_time,
                "Cards' time that it asks for: 0.4 is 40 % of one card.",
                False,
                lambda usage: usage.requested_percent / 100,
            ),
            (
                memory,
                "MiB of card memory in use.",
                True,
                lambda usage: usage.driver_reported_bytes // MIB,
            ),
            (
                requested_memory,
                "MiB of card memory that it asks for.",
                False,
                lambda usage: usage.requested_bytes // MIB,
            ),
        )
        indexes: dict[str, int] = {card.uuid: card.index for card in self.sample.cards}
        containers: dict[tuple[str, ...], list[SliceUsage]] = {}
        for usage in self.sample.usages:
            lease = usage.token.lease
            if lease is not None and usage.uuid in indexes:
                labels = lease.pod, lease.namespace, self._node, lease.container
                containers.setdefault(labels, []).append(usage)
        for metric, text, by_card, value in columns:
            names = (*gpu_manager.METRIC_LABELS, metric.label)
            family = GaugeMetricFamily(metric.name, text, labels=names)
            for container, usages in containers.items():
                amounts = [
                    (usage, amount) for usage in usages if (amount := value(usage)) is not None
                ]
                for usage, amount in amounts if by_card else ():
                    family.add_metric((*container, f"gpu{indexes[usage.uuid]}"), amount)
                if amounts:
                    total = sum(amount for _, amount in amounts)
                    family.add_metric((*container, "total"), total)
            yield family

    def _labels(self, card: Card) -> tuple[str, str, str, str]:
        return card.uuid, str(card.index), card.model, self._node


def _times(share: float | None, factor: float) -> float | None:
    return None if share is None else share * factor


def serve(
    exporter: Exporter, port: int, ready: Callable[[], bool]
) -> contextlib.AbstractAsyncContextManager[None]:
    """Serve on all addresses while the block runs. Raises OSError."""
    registry = CollectorRegistry()
    registry.register(exporter)
    text = ThrottledText(lambda: (generate_latest(registry),))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=await text(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if ready():
            return web.Response(text="ok\n")
        return web.Response(text="not registered with the kubelet\n", status=503)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    return serve_app(app, listening_socket(None, port), HttpListener(max_connections=MAX_READERS))
