"""Prometheus' view of the node: /metrics, /healthz and /readyz."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fenka.core.inventory import Card
from fenka.dialects import gpu_manager
from fenka.dialects.gpu_manager import Metric as TheirMetric
from fenka.kubernetes.http_listener import (
    MAX_READERS,
    HttpListener,
    ThrottledText,
    listening_socket,
    serve_app,
)
from fenka.node.monitor.usage import MIB, UsageSample, Use

_CONTAINER = ("namespace", "pod", "container", "uuid", "index", "model", "node")
_CARD = ("uuid", "index", "model", "node")


class Exporter(Collector):
    """Renders the last look. violations: how often each kind of offence was reported."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.sample = UsageSample()
        self.violations = {"memory_limit": 0, "compute_limit": 0, "unmanaged_process": 0}

    def collect(self) -> Iterable[Metric]:
        """As prometheus_client wants it."""
        yield from self._containers()
        yield from self._cards()
        yield from self._in_gpu_managers_names()
        violations = CounterMetricFamily(
            "fenka_node_violations",
            "Programs that got round their limit, by how.",
            labels=("kind",),
        )
        for kind, count in self.violations.items():
            violations.add_metric((kind,), count)
        yield violations

    def _containers(self) -> Iterator[Metric]:
        columns: Sequence[tuple[str, str, Callable[[Use], float | None]]] = (
            ("memory_limit_bytes", "Card memory that it may hold.", lambda it: it.limit_bytes),
            (
                "memory_held_bytes",
                "Card memory by its own account.",
                lambda it: it.self_reported_bytes,
            ),
            (
                "memory_used_bytes",
                "Card memory by the driver's account.",
                lambda it: it.driver_reported_bytes,
            ),
            ("utilization_ratio", "Share of the card's time, 0 to 1.", lambda it: it.compute),
            ("processes", "Processes on the card.", lambda it: it.processes),
        )
        cards: dict[str, Card] = {card.uuid: card for card in self.sample.cards}
        for name, text, value in columns:
            family = GaugeMetricFamily(f"fenka_container_gpu_{name}", text, labels=_CONTAINER)
            for use in self.sample.uses:
                lease, card, amount = use.token.lease, cards.get(use.uuid), value(use)
                if lease is not None and card is not None and amount is not None:
                    labels = (lease.namespace, lease.pod, lease.container, *self._of(card))
                    family.add_metric(labels, amount)
            yield family

    def _cards(self) -> Iterator[Metric]:
        allocated: dict[str, int] = {}
        for use in self.sample.uses:
            allocated[use.uuid] = allocated.get(use.uuid, 0) + use.requested_bytes

        def reading(name: str, scale: float = 1) -> Callable[[Card], float | None]:
            def of(card: Card) -> float | None:
                found = self.sample.readings.get(card.uuid)
                value = None if found is None else getattr(found, name)
                return None if value is None else value * scale

            return of

        columns: Sequence[tuple[str, str, Callable[[Card], float | None]]] = (
            ("memory_total_bytes", "All of its memory.", lambda card: card.memory_mib * MIB),
            ("memory_used_bytes", "Memory in use, whoever uses it.", reading("used_mib", MIB)),
            (
                "memory_allocated_bytes",
                "Booked by its containers.",
                lambda card: allocated.get(card.uuid, 0),
            ),
            ("utilization_ratio", "Share of time with a kernel.", reading("utilisation", 0.01)),
            ("temperature_celsius", "Temperature.", reading("temperature_c")),
            ("power_watts", "Power drawn.", reading("power_w")),
            ("healthy", "1 if it can be used.", lambda card: float(card.healthy)),
            ("cordoned", "1 if it admits nobody.", lambda card: float(card.cordoned)),
        )
        for name, text, value in columns:
            family = GaugeMetricFamily(f"fenka_card_{name}", text, labels=_CARD)
            for card in self.sample.cards:
                amount = value(card)
                if amount is not None:
                    family.add_metric(self._of(card), amount)
            yield family

    def _in_gpu_managers_names(self) -> Iterator[Metric]:
        """Each card of a container and their total; of what it asks for, as gpu-manager, the total alone."""
        used, asked_time, memory, asked_memory = gpu_manager.METRICS
        columns: Sequence[tuple[TheirMetric, str, bool, Callable[[Use], float | None]]] = (
            (used, "Percent of the card's time.", True, lambda it: _times(it.compute, 100)),
            (
                asked_time,
                "CardHealth' time that it asks for: 0.4 is 40 % of one card.",
                False,
                lambda it: it.requested_percent / 100,
            ),
            (
                memory,
                "MiB of card memory in use.",
                True,
                lambda it: it.driver_reported_bytes // MIB,
            ),
            (
                asked_memory,
                "MiB of card memory that it asks for.",
                False,
                lambda it: it.requested_bytes // MIB,
            ),
        )
        indexes: dict[str, int] = {card.uuid: card.index for card in self.sample.cards}
        containers: dict[tuple[str, ...], list[Use]] = {}
        for use in self.sample.uses:
            lease = use.token.lease
            if lease is not None and use.uuid in indexes:
                whose = lease.pod, lease.namespace, self._node, lease.container
                containers.setdefault(whose, []).append(use)
        for metric, text, by_card, value in columns:
            labels = (*gpu_manager.METRIC_LABELS, metric.label)
            family = GaugeMetricFamily(metric.name, text, labels=labels)
            for container, uses in containers.items():
                amounts = [(it, amount) for it in uses if (amount := value(it)) is not None]
                for it, amount in amounts if by_card else ():
                    family.add_metric((*container, f"gpu{indexes[it.uuid]}"), amount)
                if amounts:
                    total = sum(amount for _, amount in amounts)
                    family.add_metric((*container, "total"), total)
            yield family

    def _of(self, card: Card) -> tuple[str, str, str, str]:
        return card.uuid, str(card.index), card.model, self._node


def _times(share: float | None, factor: float) -> float | None:
    return None if share is None else share * factor


def serve(
    exporter: Exporter, port: int, ready: Callable[[], bool]
) -> contextlib.AbstractAsyncContextManager[None]:
    """Listen on all addresses while the block runs. Raises OSError."""
    registry = CollectorRegistry()
    registry.register(exporter)
    text = ThrottledText(lambda: generate_latest(registry))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=text(),
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
    return serve_app(app, listening_socket(None, port), HttpListener(most=MAX_READERS))
