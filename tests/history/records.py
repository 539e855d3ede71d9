"""Observations and batches of one card, by seconds since a day's beginning."""

from collections.abc import Mapping
from itertools import pairwise

from fenka.core.inventory import DeviceId
from fenka.core.metering import (
    DAY_US,
    SECOND_US,
    Holding,
    MeteredCard,
    Observation,
    UsageLedger,
    add,
    charges,
)
from fenka.history.history_store import Batch, Figures
from fenka.history.series import Holder

DAY = 20_700
"""In 2026."""
START = DAY * 86400
T4 = MeteredCard(DeviceId("GPU-0"), "Tesla T4", 15079)
ANNA = Holder("j1", "train", "anna", 1000, "vision", "anna", "run", "4")
BEN = Holder("j2", "train", "ben", 1001, "audio", "ben", "run", "4")
MIB = 1 << 20


def observed(at_s: float, *holders: Holder, observer: str = "o") -> Observation:
    """The card at a time, of which each of these holds 4308 MiB."""
    at_us = int(at_s * SECOND_US)
    holdings = [Holding(holder.id, T4.uuid, 4308) for holder in holders]
    return Observation(DAY * DAY_US + at_us, at_us, "b", observer, [T4], holdings)


def charged(*observations: Observation, figures: Mapping[str, Figures] | None = None) -> Batch:
    """A batch with the usage between these observations."""
    usage: UsageLedger = {}
    for before, after in pairwise(observations):
        add(usage, charges(before, after))
    last = observations[-1]
    at = last.at_us // SECOND_US
    return Batch(
        *(at, [ANNA, BEN], figures or {}),
        usage=usage,
        first=observations[0],
        last=last,
    )


def sample(at: int, used_mib: int | None, job: str = "j1") -> Batch:
    """A batch with one reading of one program, at so many seconds."""
    return Batch(START + at, [ANNA, BEN], {job: (used_mib, 4308, None, 0, 0)})
