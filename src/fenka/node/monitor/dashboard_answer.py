"""Answers the dashboard: the last sample of a node as NodeFigures."""

import msgspec

from fenka.core.inventory import DeviceId
from fenka.core.units import MIB
from fenka.isolation.driver_usage import NO_ACTIVITY
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.usage import SliceUsage
from fenka.views.node_figures import CardFigures, NodeFigures, SliceFigures

_encode = msgspec.json.Encoder().encode


def encode_figures(exporter: Exporter, now: float) -> bytes:
    """Return the last sample as JSON. now: Unix seconds."""
    return _encode(node_figures(exporter, now))


def node_figures(exporter: Exporter, now: float) -> NodeFigures:
    """Return the last sample. now: Unix seconds."""
    sample = exporter.sample
    readings = (sample.readings.get(card.uuid) for card in sample.cards)
    cards = [
        CardFigures(
            reading.uuid,
            reading.used_mib,
            None if reading.utilisation is None else reading.utilisation / 100,
            reading.temperature_c,
            reading.power_w,
            reading.power_limit_w,
        )
        for reading in readings
        if reading is not None
    ]
    over = {usage.key for usage in sample.over_memory}
    longer = {usage.key for usage in sample.over_compute}
    slices = [
        _slice(
            exporter, usage, now, over_memory=usage.key in over, over_compute=usage.key in longer
        )
        for usage in sample.usages
    ]
    return NodeFigures(now, cards, slices)


def _slice(
    exporter: Exporter, usage: SliceUsage, now: float, *, over_memory: bool, over_compute: bool
) -> SliceFigures:
    activity = exporter.activity.get((usage.token, usage.device), NO_ACTIVITY)
    active_at = activity.last_active_at
    place = DeviceId(usage.piece.uuid)
    limit = f"its {usage.limit_bytes // MIB} MiB of {place}"
    sentences = {
        f"holds more than {limit}, as the driver reports": over_memory,
        f"has had more than its {usage.limit_percent} % of the time of {place}": over_compute,
    }
    return SliceFigures(
        usage.lease.uid,
        place,
        # Where the driver reports no process's memory, the programs' own account does.
        (usage.driver_reported_bytes or usage.self_reported_bytes) // MIB,
        usage.compute,
        None if active_at is None else max(now - active_at, 0.0),
        "; ".join(sentence for sentence, holds in sentences.items() if holds),
    )
