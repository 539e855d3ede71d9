"""Metrics of cards and of the slices that programs have of them.

A node's program and a workstation's daemon publish them by the same names. There is a series for each lease
and card, so programs cannot create any. An unknown value has no series: 0 would be a measurement.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fenka import __version__
from fenka.core.inventory import Card
from fenka.core.units import MIB
from fenka.server.metrics import ProgramMetrics

CARD = ("uuid", "index", "model", "node")
INSTANCE = ("gi", "ci", "profile")
"""Only slices of MIG instances have these."""
CONTAINER = ("namespace", "pod", "container", *CARD, *INSTANCE)

XID_KINDS = ("card", "program", "note")
"""All of them are published from 0 on, because `increase` does not count what a series begins with."""


class CardReading(Protocol):
    """The driver's current figures of a card; None if it does not report one."""

    @property
    def used_mib(self) -> int | None: ...  # noqa: D102
    @property
    def utilisation(self) -> int | None: ...  # noqa: D102
    @property
    def temperature_c(self) -> int | None: ...  # noqa: D102
    @property
    def power_w(self) -> float | None: ...  # noqa: D102
    @property
    def power_limit_w(self) -> float | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class CardSample:
    """A card at one moment. allocated_bytes: memory of all slices on it."""

    card: Card
    reading: CardReading | None
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class SliceSample:
    """A slice of a card at one moment. None means that a value is unknown, or that there is no limit.

    Attributes:
        holder: namespace, pod and container; on a workstation user, job and the job's kind.
        device: UUID of the card or of its instance.
        instance: values of INSTANCE; empty for a slice of a whole card.
        compute: share of the card's time in use, 0 to 1.
        busy: share of the slice's time in use, 0 to 1.
        limit_percent: the most of the card's time that it may use; None if unlimited.
        promised_percent: what of it is reserved for it; 0 for nothing.
        busy_s: card time used so far.
        throttled_s: time that its threads have waited because of the limit of compute so far, all added up.
        out_of_memory: how often it was refused memory so far.
        started_at: Unix seconds of its granting.
        last_active_at: Unix seconds of the last look at which it had used the card since the one before.
    """

    holder: tuple[str, str, str]
    card: Card
    device: str
    instance: tuple[str, str, str]
    limit_bytes: int
    self_reported_bytes: int | None
    driver_reported_bytes: int | None
    compute: float | None
    busy: float | None
    processes: int
    limit_percent: int | None
    promised_percent: int
    busy_s: float | None = None
    throttled_s: float | None = None
    out_of_memory: int | None = None
    started_at: float | None = None
    last_active_at: float | None = None


Rows = Iterable[tuple[Sequence[str], float | None]]
"""The values of the labels, with a value each; None is left out."""


class GpuMetrics(ProgramMetrics):
    """Renders the last sample.

    Attributes:
        cards: the cards.
        slices: what programs have of them.
        xids: the number of XIDs so far, by the card's UUID and kind.
        violations: how often each kind was reported.
    """

    prefix = "fenka_"

    def __init__(
        self,
        node: str,
        driver: Callable[[], tuple[str, str]] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Args:
        node: the machine's name.
        driver: returns the driver's version, and the newest CUDA version that it supports.
        registry: has the metrics.
        """
        super().__init__(registry)
        self._node, self._driver = node, driver
        self.cards: Sequence[CardSample] = ()
        self.slices: Sequence[SliceSample] = ()
        self.xids: Mapping[tuple[str, str], int] = Counter()
        self.violations = {"memory_limit": 0, "compute_limit": 0, "unmanaged_process": 0}

    def collect(self) -> Iterable[Metric]:
        """Implement prometheus_client's Collector."""
        yield from self._slice_gauges()
        yield from self._slice_counters()
        yield from self._card_gauges()
        yield self.counters(
            "card_xid_errors",
            "XIDs that the driver reported, by kind: card (unusable), program, note.",
            (*CARD, "kind"),
            (
                ((*self.labels(sample.card), kind), self.xids.get((sample.card.uuid, kind), 0))
                for sample in self.cards
                for kind in XID_KINDS
            ),
        )
        yield self.counters(
            "node_violations",
            "Violations of limits, by kind.",
            ("kind",),
            (((kind,), count) for kind, count in self.violations.items()),
        )
        if self._driver is not None:
            yield self.gauges(
                "node_info",
                "1, with the versions of fenka and of the driver.",
                ("node", "version", "driver_version", "cuda_version"),
                [((self._node, __version__, *self._driver()), 1)],
            )

    def _slice_gauges(self) -> Iterator[Metric]:
        columns: Sequence[tuple[str, str, Callable[[SliceSample], float | None]]] = (
            ("memory_limit_bytes", "Limit of card memory.", lambda sample: sample.limit_bytes),
            (
                "memory_held_bytes",
                "Card memory in use, as its programs report.",
                lambda sample: sample.self_reported_bytes,
            ),
            (
                "memory_used_bytes",
                "Card memory in use, as the driver reports.",
                lambda sample: sample.driver_reported_bytes,
            ),
            (
                "utilization_ratio",
                "Share of the card's time, 0 to 1.",
                lambda sample: sample.compute,
            ),
            (
                "busy_ratio",
                "Share of the slice's time in use, 0 to 1: the card's if the slice reserves no share.",
                lambda sample: sample.busy,
            ),
            ("processes", "Processes on the card.", lambda sample: sample.processes),
            (
                "compute_limit_ratio",
                "The most of the card's time that it may use, 0 to 1; absent if unlimited.",
                lambda sample: scaled(sample.limit_percent, 0.01),
            ),
            (
                "compute_promised_ratio",
                "Share of the card's time that is reserved for it, 0 to 1; absent if none is.",
                lambda sample: scaled(sample.promised_percent or None, 0.01),
            ),
            (
                "start_timestamp_seconds",
                "When its slice was granted, since 1970.",
                lambda sample: sample.started_at,
            ),
            (
                "last_active_timestamp_seconds",
                "When it last used the card, since 1970: at first its granting, or the exporter's start.",
                lambda sample: sample.last_active_at,
            ),
        )
        for name, text, value in columns:
            family = GaugeMetricFamily(f"fenka_container_gpu_{name}", text, labels=CONTAINER)
            yield add_rows(family, CONTAINER, self._slice_rows(value))

    def _slice_counters(self) -> Iterator[Metric]:
        columns: Sequence[tuple[str, str, Callable[[SliceSample], float | None]]] = (
            ("busy_seconds", "Card time used.", lambda sample: sample.busy_s),
            (
                "throttled_seconds",
                "Time that threads waited because of the limit of compute, all added up.",
                lambda sample: sample.throttled_s,
            ),
            (
                "out_of_memory",
                "Requests for card memory that did not fit in the slice.",
                lambda sample: sample.out_of_memory,
            ),
        )
        for name, text, value in columns:
            family = CounterMetricFamily(f"fenka_container_gpu_{name}", text, labels=CONTAINER)
            yield add_rows(family, CONTAINER, self._slice_rows(value), suffix="_total")

    def _slice_rows(self, value: Callable[[SliceSample], float | None]) -> Rows:
        for sample in self.slices:
            labels = self.labels(sample.card, sample.device)
            yield (*sample.holder, *labels, *sample.instance), value(sample)

    def _card_gauges(self) -> Iterator[Metric]:
        def reading(name: str, scale: float = 1) -> Callable[[CardSample], float | None]:
            def of(sample: CardSample) -> float | None:
                reading = sample.reading
                return None if reading is None else scaled(getattr(reading, name), scale)

            return of

        columns: Sequence[tuple[str, str, Callable[[CardSample], float | None]]] = (
            ("memory_total_bytes", "Total memory.", lambda sample: sample.card.memory_mib * MIB),
            ("memory_used_bytes", "Memory in use by any process.", reading("used_mib", MIB)),
            (
                "memory_allocated_bytes",
                "Memory allocated to containers.",
                lambda sample: sample.allocated_bytes,
            ),
            (
                "utilization_ratio",
                "Share of time in which a kernel ran.",
                reading("utilisation", 0.01),
            ),
            ("temperature_celsius", "Temperature.", reading("temperature_c")),
            ("power_watts", "Power draw.", reading("power_w")),
            ("power_limit_watts", "Limit of the power draw.", reading("power_limit_w")),
            ("healthy", "1 if the card is usable.", lambda sample: float(sample.card.healthy)),
            (
                "cordoned",
                "1 if the card accepts no new pods.",
                lambda sample: float(sample.card.cordoned),
            ),
        )
        for name, text, value in columns:
            rows = ((self.labels(sample.card), value(sample)) for sample in self.cards)
            family = GaugeMetricFamily(f"fenka_card_{name}", text, labels=CARD)
            yield add_rows(family, CARD, rows)

    def labels(self, card: Card, device: str = "") -> tuple[str, str, str, str]:
        """Return the values of CARD. device: UUID of an instance of the card."""
        return device or card.uuid, str(card.index), card.model, self._node


def scaled(value: float | None, factor: float) -> float | None:
    """Return a value in another unit; None if it is None."""
    return None if value is None else value * factor


def add_rows(family: Metric, names: Sequence[str], rows: Rows, suffix: str = "") -> Metric:
    """Add samples to a metric, and return it. Labels of INSTANCE are left out if they are empty."""
    for values, value in rows:
        if value is not None:
            labelled = {
                label: content
                for label, content in zip(names, values, strict=True)
                if content or label not in INSTANCE
            }
            family.add_sample(family.name + suffix, labelled, value)
    return family
