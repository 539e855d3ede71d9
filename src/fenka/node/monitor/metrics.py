"""The metrics of a node: its cards, and what containers use of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fenka.core.inventory import Card
from fenka.core.mig.layouts import flexibility
from fenka.core.units import MIB
from fenka.dialects import gpu_manager
from fenka.dialects.gpu_manager import Metric as GpuManagerMetric
from fenka.dialects.mig_records import DividedCard
from fenka.node.lease.store import Lease
from fenka.node.mig_instances import ObservedInstance
from fenka.node.monitor.usage import NodeUsage, SliceUsage
from fenka.server.metrics import ProgramMetrics

_CARD = ("uuid", "index", "model", "node")
_INSTANCE = ("gi", "ci", "profile")
"""Only slices of MIG instances have these."""
_CONTAINER = ("namespace", "pod", "container", *_CARD, *_INSTANCE)


class Exporter(ProgramMetrics):
    """Renders the last sample. violations: how often each kind was reported."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node
        self.sample = NodeUsage()
        self.divided: Sequence[DividedCard] = ()
        self.instances: Sequence[ObservedInstance] = ()
        self.violations = {"memory_limit": 0, "compute_limit": 0, "unmanaged_process": 0}

    def collect(self) -> Iterable[Metric]:
        """Implement prometheus_client's Collector."""
        yield from self._containers()
        yield from self._cards()
        yield from self._divided_cards()
        yield from self._instances()
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
            (
                "busy_ratio",
                "Share of the slice's time in use, 0 to 1: the card's if the slice reserves no share.",
                lambda usage: usage.busy,
            ),
            ("processes", "Processes on the card.", lambda usage: usage.processes),
        )
        cards: dict[str, Card] = {card.uuid: card for card in self.sample.cards}
        instances = {instance.uuid: instance for instance in self.instances}
        rows = []
        for usage in self.sample.usages:
            card = cards.get(usage.card)
            if card is not None:
                labels = self._labels(card, usage.device)
                of_instance = _instance_labels(instances.get(usage.device))
                rows.append(((*_container(usage.lease), *labels, *of_instance), usage))
        for name, text, value in columns:
            values = ((labels, value(usage)) for labels, usage in rows)
            yield _gauge(f"fenka_container_gpu_{name}", text, _CONTAINER, values)

    def _cards(self) -> Iterator[Metric]:
        allocated: dict[str, int] = {}
        for usage in self.sample.usages:
            allocated[usage.card] = allocated.get(usage.card, 0) + usage.requested_bytes

        def reading(name: str, scale: float = 1) -> Callable[[Card], float | None]:
            def of(card: Card) -> float | None:
                reading = self.sample.readings.get(card.uuid)
                return None if reading is None else _scaled(getattr(reading, name), scale)

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
            values = ((self._labels(card), value(card)) for card in self.sample.cards)
            yield _gauge(f"fenka_card_{name}", text, _CARD, values)

    def _divided_cards(self) -> Iterator[Metric]:
        cards: dict[str, Card] = {card.uuid: card for card in self.sample.cards}
        counts: dict[tuple[str, ...], float] = {}
        ratios: list[tuple[Sequence[str], float]] = []
        for card in self.divided:
            if card.uuid not in cards:
                continue
            labels = self._labels(cards[card.uuid])
            for place, state in card.instances.items():
                key = (*labels, place.profile.name, state)
                counts[key] = counts.get(key, 0) + 1
            left = flexibility(card.geometry, card.instances) / flexibility(card.geometry, ())
            ratios.append((labels, float(left)))
        text = "MIG instances, by profile and state: own, unhealthy, leaving, foreign."
        yield _gauge("fenka_card_instances", text, (*_CARD, "profile", "state"), counts.items())
        text = "How many more instances fit, all profiles weighted alike: 1 on an empty card."
        yield _gauge("fenka_card_flexibility_ratio", text, _CARD, ratios)

    def _instances(self) -> Iterator[Metric]:
        cards: dict[str, Card] = {card.uuid: card for card in self.sample.cards}
        rows = [
            (
                (
                    instance.card,
                    *self._labels(cards[instance.card], instance.uuid),
                    *_instance_labels(instance),
                ),
                instance,
            )
            for instance in self.instances
            if instance.uuid and instance.card in cards
        ]

        def used(instance: ObservedInstance) -> float | None:
            reading = self.sample.readings.get(instance.uuid)
            return None if reading is None else _scaled(reading.used_mib, MIB)

        columns: Sequence[tuple[str, str, Callable[[ObservedInstance], float | None]]] = (
            ("memory_total_bytes", "Total memory.", lambda instance: instance.memory_mib * MIB),
            ("memory_used_bytes", "Memory in use by any process.", used),
            (
                "healthy",
                "1 if it is usable.",
                lambda instance: float(instance.state != "unhealthy"),
            ),
        )
        for name, text, value in columns:
            values = ((labels, value(instance)) for labels, instance in rows)
            yield _gauge(f"fenka_instance_{name}", text, ("card", *_CARD, *_INSTANCE), values)

    def _gpu_manager_metrics(self) -> Iterator[Metric]:
        """Yield gpu-manager's metrics: per card of a container, and in total; requests only in total."""
        used, requested_time, memory, requested_memory = gpu_manager.METRICS
        columns: Sequence[
            tuple[GpuManagerMetric, str, bool, Callable[[SliceUsage], float | None]]
        ] = (
            (used, "Percent of the card's time.", True, lambda usage: _scaled(usage.compute, 100)),
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
                lambda usage: usage.piece.memory_mib,
            ),
        )
        indexes: dict[str, int] = {card.uuid: card.index for card in self.sample.cards}
        containers: dict[tuple[str, ...], list[SliceUsage]] = {}
        for usage in self.sample.usages:
            if usage.card in indexes:
                namespace, pod, container = _container(usage.lease)
                containers.setdefault((pod, namespace, self._node, container), []).append(usage)
        for metric, text, by_card, value in columns:
            rows: list[tuple[Sequence[str], float]] = []
            for labels, usages in containers.items():
                amounts = [
                    (usage, amount) for usage in usages if (amount := value(usage)) is not None
                ]
                if by_card:
                    rows += [
                        ((*labels, f"gpu{indexes[usage.card]}"), amount)
                        for usage, amount in amounts
                    ]
                if amounts:
                    rows.append(((*labels, "total"), sum(amount for _, amount in amounts)))
            yield _gauge(metric.name, text, (*gpu_manager.METRIC_LABELS, metric.label), rows)

    def _labels(self, card: Card, device: str = "") -> tuple[str, str, str, str]:
        """Return the values of _CARD. device: UUID of an instance of the card."""
        return device or card.uuid, str(card.index), card.model, self._node


def _container(lease: Lease) -> tuple[str, str, str]:
    return lease.namespace, lease.pod, lease.container


def _instance_labels(instance: ObservedInstance | None) -> tuple[str, str, str]:
    if instance is None:
        return "", "", ""
    return instance.gpu_instance, instance.compute_instance, instance.profile


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _gauge(
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], float | None]],
) -> Metric:
    """Return a metric. rows: the labels' values with a value each; None is left out."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        if value is not None:
            labelled = {
                label: content
                for label, content in zip(labels, values, strict=True)
                if content or label not in _INSTANCE
            }
            family.add_sample(name, labelled, value)
    return family
