"""The metrics of a node: its cards, and what containers use of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from fenka.core.inventory import WHOLE_COMPUTE, Card
from fenka.core.mig.layouts import flexibility
from fenka.core.units import MIB
from fenka.dialects import gpu_manager
from fenka.dialects.gpu_manager import Metric as GpuManagerMetric
from fenka.dialects.mig_records import DividedCard
from fenka.isolation.driver_usage import NO_ACTIVITY, Activity
from fenka.node.lease.store import Lease
from fenka.node.mig_instances import ObservedInstance
from fenka.node.monitor.usage import NodeUsage, SliceUsage
from fenka.server.gpu_metrics import (
    CARD,
    INSTANCE,
    CardSample,
    GpuMetrics,
    Rows,
    SliceSample,
    add_rows,
    scaled,
)


class Exporter(GpuMetrics):
    """Renders the last sample of a node.

    Attributes:
        activity: what leases have used so far, by token and the device's UUID.
    """

    def __init__(self, node: str, driver: Callable[[], tuple[str, str]] | None = None) -> None:
        super().__init__(node, driver)
        self.sample = NodeUsage()
        self.activity: Mapping[tuple[str, str], Activity] = {}
        self.divided: Sequence[DividedCard] = ()
        self.instances: Sequence[ObservedInstance] = ()

    def collect(self) -> Iterable[Metric]:
        """Implement prometheus_client's Collector."""
        self.cards, self.slices = self._card_samples(), self._slice_samples()
        yield from super().collect()
        yield from self._divided_cards()
        yield from self._instances()
        yield from self._gpu_manager_metrics()

    def _card_samples(self) -> list[CardSample]:
        allocated = Counter[str]()
        for usage in self.sample.usages:
            allocated[usage.card] += usage.requested_bytes
        return [
            CardSample(card, self.sample.readings.get(card.uuid), allocated[card.uuid])
            for card in self.sample.cards
        ]

    def _slice_samples(self) -> list[SliceSample]:
        cards: dict[str, Card] = {card.uuid: card for card in self.sample.cards}
        instances = {instance.uuid: instance for instance in self.instances}
        return [
            SliceSample(
                _container(usage.lease),
                card,
                usage.device,
                _instance_labels(instances.get(usage.device)),
                usage.limit_bytes,
                usage.self_reported_bytes,
                usage.driver_reported_bytes,
                usage.compute,
                usage.busy,
                usage.processes,
                usage.limit_percent if usage.limit_percent < WHOLE_COMPUTE else None,
                usage.requested_percent,
                activity.busy_s,
                usage.throttled_s,
                usage.out_of_memory,
                activity.started_at,
                activity.last_active_at,
            )
            for usage in self.sample.usages
            if (card := cards.get(usage.card)) is not None
            for activity in [self.activity.get((usage.token, usage.device), NO_ACTIVITY)]
        ]

    def _divided_cards(self) -> Iterator[Metric]:
        cards: dict[str, Card] = {card.uuid: card for card in self.sample.cards}
        counts: dict[tuple[str, ...], float] = {}
        ratios: list[tuple[Sequence[str], float]] = []
        for card in self.divided:
            if card.uuid not in cards:
                continue
            labels = self.labels(cards[card.uuid])
            for place, state in card.instances.items():
                key = (*labels, place.profile.name, state)
                counts[key] = counts.get(key, 0) + 1
            left = flexibility(card.geometry, card.instances) / flexibility(card.geometry, ())
            ratios.append((labels, float(left)))
        text = "MIG instances, by profile and state: own, unhealthy, leaving, foreign."
        yield _gauge("fenka_card_instances", text, (*CARD, "profile", "state"), counts.items())
        text = "How many more instances fit, all profiles weighted alike: 1 on an empty card."
        yield _gauge("fenka_card_flexibility_ratio", text, CARD, ratios)

    def _instances(self) -> Iterator[Metric]:
        cards: dict[str, Card] = {card.uuid: card for card in self.sample.cards}
        rows = [
            (
                (
                    instance.card,
                    *self.labels(cards[instance.card], instance.uuid),
                    *_instance_labels(instance),
                ),
                instance,
            )
            for instance in self.instances
            if instance.uuid and instance.card in cards
        ]

        def used(instance: ObservedInstance) -> float | None:
            reading = self.sample.readings.get(instance.uuid)
            return None if reading is None else scaled(reading.used_mib, MIB)

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
            yield _gauge(f"fenka_instance_{name}", text, ("card", *CARD, *INSTANCE), values)

    def _gpu_manager_metrics(self) -> Iterator[Metric]:
        """Yield gpu-manager's metrics: per card of a container, and in total; requests only in total."""
        used, requested_time, memory, requested_memory = gpu_manager.METRICS
        columns: Sequence[
            tuple[GpuManagerMetric, str, bool, Callable[[SliceUsage], float | None]]
        ] = (
            (used, "Percent of the card's time.", True, lambda usage: scaled(usage.compute, 100)),
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


def _container(lease: Lease) -> tuple[str, str, str]:
    return lease.namespace, lease.pod, lease.container


def _instance_labels(instance: ObservedInstance | None) -> tuple[str, str, str]:
    if instance is None:
        return "", "", ""
    return instance.gpu_instance, instance.compute_instance, instance.profile


def _gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    return add_rows(GaugeMetricFamily(name, text, labels=labels), labels, rows)
