"""How long offers are not tried after they failed. Pure: it follows from the failed orders that are kept.

An offer pauses for `start.backoff`, twice as long after each further failure, up to `start.backoffMost`. A
failure is forgotten after three hours.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fenka.autoscaler.view import View, offer_of
from fenka.cloud.config import Start
from fenka.cloud.port import OfferKey
from fenka.cluster.autoscaling import Failure, OrderRecord

FORGOTTEN_S = 3 * 3600.0
TOO_DEAR_S = 300.0
"""Between two looks at a market that was above the cap."""

OF_GROUP: frozenset[Failure] = frozenset({"quota", "denied"})
"""Failures that concern all offers of a group."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Until when an offer is not tried, and why."""

    until: float
    failure: Failure
    why: str


def pauses(view: View) -> dict[OfferKey, Pause]:
    """Return the offers that are not tried now."""
    failures = [
        record
        for record in view.orders.values()
        if record.failure is not None and _failed_at(record) > view.now - FORGOTTEN_S
    ]
    failures.sort(key=_failed_at)
    found: dict[OfferKey, Pause] = {}
    for key in view.offers:
        own = [each for each in failures if _concerns(each, key)]
        ends = [_pause(view.config.start, own[: number + 1]) for number in range(len(own))]
        longest = max(ends, key=lambda pause: pause.until, default=None)
        if longest is not None and longest.until > view.now:
            found[key] = longest
    return found


def is_forgotten(record: OrderRecord, now: float) -> bool:
    """Return whether a failed order is of no more use."""
    return record.failure is None or _failed_at(record) <= now - FORGOTTEN_S


def _concerns(record: OrderRecord, key: OfferKey) -> bool:
    if record.failure in OF_GROUP:
        return record.group == key.group
    return offer_of(record) == key


def _pause(start: Start, failures: list[OrderRecord]) -> Pause:
    """Return the pause after the last of these failures."""
    last = failures[-1]
    assert last.failure is not None
    doubling = min(len(failures) - 1, 20)
    length = min(start.backoff * 2**doubling, start.backoff_most)
    if last.failure in OF_GROUP:
        length = start.backoff_most
    elif last.failure == "too dear":
        length = TOO_DEAR_S
    return Pause(_failed_at(last) + length, last.failure, last.why)


def _failed_at(record: OrderRecord) -> float:
    return record.changed_at if record.changed_at is not None else record.written_at


def next_try(paused: Mapping[OfferKey, Pause]) -> float | None:
    """Return when the first of these offers is tried again."""
    return min((pause.until for pause in paused.values()), default=None)
