"""Sums of the ledger of usage: by user, namespace, team or job, with what they cost."""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.metering import HOUR_US, NO_AMOUNTS, Amounts, LineKind, cost
from fenka.history.series import Holder, UsageGroup, UsageRecord

_COMMON: dict[UsageGroup, tuple[str, ...]] = {
    "user": ("user", "uid"),
    "namespace": ("namespace",),
    "team": ("team",),
    "job": Holder.__struct_fields__,
}
"""The fields of a holder that the records of one sum have in common."""

_GIB_HOUR = 1024 * HOUR_US


class NoPrice(FenkaError):
    """A bill has cards without a price."""

    exit_code = INVALID_INPUT


class UsageRow(msgspec.Struct, frozen=True):
    """A line of `fenka usage`. None: not known, or without prices.

    Attributes:
        kind: held, idle or unobserved.
        name: Of the user, namespace, team or job; empty unless it was held.
        owner: The job's user; empty for other groups.
        id: The job's; empty for other groups.
        card_hours: What is charged of the cards' time.
        held_gib_hours, used_gib_hours: Memory. The use counts for the time in which it was known.
        used_share: The used part of the held memory, 0 to 1.
        busy_hours: The cards' time that it had.
        cost: In the currency of the prices.
    """

    kind: LineKind
    name: str
    owner: str
    id: str
    card_hours: float
    held_gib_hours: float
    used_gib_hours: float
    used_share: float | None
    busy_hours: float | None
    cost: Decimal | None


OTHERS = Holder("", name="others", user="others", team="others", namespace="others")
"""The holder of what other users than the reader have held."""


def visible_to(records: Iterable[UsageRecord], uid: int) -> list[UsageRecord]:
    """Return the records as a user may read them: their own, and the sums of all others without names."""
    return [
        record
        if record.kind is not LineKind.HELD or record.holder.uid == uid
        else msgspec.structs.replace(record, holder=OTHERS)
        for record in records
    ]


def grouped(
    records: Iterable[UsageRecord], by: UsageGroup, *, daily: bool = False
) -> list[UsageRecord]:
    """Return the sums of records. Nodes stay apart only by day, for bills."""
    sums: dict[UsageRecord, Amounts] = {}
    for record in records:
        holder = record.holder
        common = {name: getattr(holder, name) for name in _COMMON[by]}
        key = msgspec.structs.replace(
            record,
            day=record.day if daily else -1,
            node=record.node if daily else "",
            holder=Holder(**{"id": "", **common}) if record.kind is LineKind.HELD else Holder(""),
            amounts=NO_AMOUNTS,
        )
        sums[key] = sums.get(key, NO_AMOUNTS).plus(record.amounts)
    return [msgspec.structs.replace(key, amounts=amounts) for key, amounts in sums.items()]


def price_of(record: UsageRecord, prices: Mapping[str, int]) -> int | None:
    """Return what an hour of the card costs: as it was paid, else by the list; None without a price."""
    return prices.get(record.model) if record.paid is None else record.paid


def record_cost(record: UsageRecord, prices: Mapping[str, int]) -> Fraction | None:
    """Return what a record costs, exactly; None without a price."""
    price = price_of(record, prices)
    return None if price is None else cost(record.amounts.card_us, price)


def check_prices(records: Iterable[UsageRecord], prices: Mapping[str, int], remedy: str) -> None:
    """Raise NoPrice if a record's card has none. remedy: what to do, with `{model}` for the card's model."""
    for record in records:
        if price_of(record, prices) is None:
            raise NoPrice(f"{record.model} has no price: {remedy.format(model=record.model)}")


def usage_rows(
    records: Iterable[UsageRecord], by: UsageGroup, prices: Mapping[str, int]
) -> list[UsageRow]:
    """Return the lines of a report: holders with the most first, then idle and unobserved time.

    A line costs what is known of its price; one without any known price costs None.
    """
    sums: dict[tuple[LineKind, Holder], tuple[Amounts, Fraction | None]] = {}
    for record in grouped(records, by):
        key = record.kind, record.holder
        amounts, costs = sums.get(key, (NO_AMOUNTS, None))
        charged = record_cost(record, prices)
        total = charged if costs is None else costs + (charged or 0)
        sums[key] = amounts.plus(record.amounts), total
    order = list(LineKind)
    rows = sorted(sums.items(), key=lambda item: (order.index(item[0][0]), -item[1][0].card_us))
    return [_row(kind, holder, by, *value) for (kind, holder), value in rows]


def total_row(
    rows: Iterable[UsageRow], records: Iterable[UsageRecord], prices: Mapping[str, int]
) -> UsageRow:
    """Return the sum of all records, of which `rows` are the lines."""
    amounts, costs = NO_AMOUNTS, Fraction(0)
    for record in records:
        amounts = amounts.plus(record.amounts)
        costs += record_cost(record, prices) or 0
    priced = any(row.cost is not None for row in rows)
    total = _row(LineKind.HELD, Holder(""), "user", amounts, costs if priced else None)
    return msgspec.structs.replace(total, name="total")


def _row(
    kind: LineKind, holder: Holder, by: UsageGroup, amounts: Amounts, costs: Fraction | None
) -> UsageRow:
    name = {"user": holder.user, "namespace": holder.namespace, "team": holder.team}
    measured, timed = amounts.measured, amounts.timed_us
    return UsageRow(
        kind=kind,
        name=name.get(by, holder.name),
        owner=holder.user if by == "job" else "",
        id=holder.id,
        card_hours=round(amounts.card_us / HOUR_US, 6),
        held_gib_hours=round(amounts.memory / _GIB_HOUR, 6),
        used_gib_hours=round(amounts.used / _GIB_HOUR, 6),
        used_share=round(amounts.used / measured, 4) if measured else None,
        busy_hours=round(amounts.busy_us / HOUR_US, 6) if timed else None,
        cost=None if costs is None else as_decimal(costs),
    )


def as_decimal(amount: Fraction) -> Decimal:
    """Return an amount of money, rounded to what a card costs in a microsecond at any price."""
    return round(Decimal(amount.numerator) / Decimal(amount.denominator), 9).normalize() + 0
