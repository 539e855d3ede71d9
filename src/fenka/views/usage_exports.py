"""Usage in the formats of billing tools: FOCUS (CSV) and OpenCost's custom costs (JSON).

FOCUS is the FinOps Foundation's specification of bills. The columns are those that version 1.0 requires, and
later versions have them, too. OpenCost's plugins answer with messages of the same columns.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec

from fenka.core.metering import DAY_US, HOUR_US, NO_AMOUNTS, PRICE_SCALE, LineKind
from fenka.history.series import Holder, UsageRecord
from fenka.views.usage_report import as_decimal, price_of, record_cost

FOCUS_VERSION = "1.0"

UNIT = "GPU-Hours"
"""Of a whole card; a slice has its part of it."""

_SERVICE = "GPU sharing"
_ISSUER = "fenka"

_ABSENT = (
    "AvailabilityZone",
    "ChargeClass",
    "CommitmentDiscountCategory",
    "CommitmentDiscountId",
    "CommitmentDiscountName",
    "CommitmentDiscountStatus",
    "CommitmentDiscountType",
    "RegionId",
    "RegionName",
)
"""Columns that a bill must have, and that nothing here fills."""

_NOTHING = UsageRecord(0, LineKind.IDLE, Holder(""), "", "", None, NO_AMOUNTS)
"""Its row names all other columns."""


def focus_csv(
    records: Iterable[UsageRecord], prices: Mapping[str, int], currency: str, account: str
) -> str:
    """Return a bill: a row for each day and job, and for each day's idle and unobserved time.

    Args:
        records: By day and job. Their cards have prices.
        prices: In millionths for an hour of a card, by model.
        currency: A code of ISO 4217.
        account: The machine or cluster.
    """
    rows = [_focus_row(record, prices, currency, account) for record in records]
    columns = sorted({*_ABSENT, *_focus_row(_NOTHING, prices, currency, account)})
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _focus_row(
    record: UsageRecord, prices: Mapping[str, int], currency: str, account: str
) -> dict[str, object]:
    price = Decimal(price_of(record, prices) or 0) / PRICE_SCALE
    charge = _text(as_decimal(record_cost(record, prices) or Fraction(0)))
    quantity = _text(as_decimal(Fraction(record.amounts.card_us, HOUR_US)))
    start, end, month, next_month = _periods(record.day)
    holder = record.holder
    return {
        "BilledCost": charge,
        "BillingAccountId": account,
        "BillingAccountName": account,
        "BillingCurrency": currency,
        "BillingPeriodEnd": next_month,
        "BillingPeriodStart": month,
        "ChargeCategory": "Usage",
        "ChargeDescription": describe(record),
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": end,
        "ChargePeriodStart": start,
        "ConsumedQuantity": quantity,
        "ConsumedUnit": UNIT,
        "ContractedCost": charge,
        "ContractedUnitPrice": _text(price),
        "EffectiveCost": charge,
        "InvoiceIssuerName": _ISSUER,
        "ListCost": charge,
        "ListUnitPrice": _text(price),
        "PricingCategory": "Standard" if record.paid is None else "Dynamic",
        "PricingQuantity": quantity,
        "PricingUnit": UNIT,
        "ProviderName": _ISSUER,
        "PublisherName": _ISSUER,
        "ResourceId": _resource(record),
        "ResourceName": holder.name or record.kind.value,
        "ResourceType": "GPU slice" if holder.id else "GPU",
        "ServiceCategory": "Compute",
        "ServiceName": _SERVICE,
        "SkuId": record.model,
        "SkuPriceId": f"{record.model}@{_text(price)}",
        "SubAccountId": holder.namespace,
        "SubAccountName": holder.namespace,
        "Tags": msgspec.json.encode(_tags(record)).decode(),
    }


def opencost_json(
    records: Sequence[UsageRecord], prices: Mapping[str, int], currency: str, account: str
) -> list[dict[str, Any]]:
    """Return OpenCost's CustomCostResponse of each day, as protobuf's JSON has it.

    The arguments are those of `focus_csv`.
    """
    days: dict[int, list[UsageRecord]] = {}
    for record in records:
        days.setdefault(record.day, []).append(record)
    return [
        {
            "metadata": {"focus_version": FOCUS_VERSION},
            "costSource": "gpu",
            "domain": _ISSUER,
            "version": "v1",
            "currency": currency,
            "start": _periods(day)[0],
            "end": _periods(day)[1],
            "costs": [_custom_cost(record, prices, account) for record in of_day],
        }
        for day, of_day in sorted(days.items())
    ]


def _custom_cost(record: UsageRecord, prices: Mapping[str, int], account: str) -> dict[str, Any]:
    charge = float(record_cost(record, prices) or 0)
    price = (price_of(record, prices) or 0) / PRICE_SCALE
    resource, quantity = _resource(record), record.amounts.card_us / HOUR_US
    start, _, month, next_month = _periods(record.day)
    return {
        "accountName": account,
        "chargeCategory": "Usage",
        "description": describe(record),
        "resourceName": record.holder.name or record.kind.value,
        "resourceType": "GPU slice" if record.holder.id else "GPU",
        "id": f"{account}/{start}/{record.model}/{record.node}/{price}/{resource}",
        "providerId": resource,
        "billedCost": charge,
        "listCost": charge,
        "listUnitPrice": price,
        "usageQuantity": quantity,
        "usageUnit": UNIT,
        "labels": _tags(record),
        "extendedAttributes": {
            "billingPeriodStart": month,
            "billingPeriodEnd": next_month,
            "accountId": account,
            "chargeFrequency": "Usage-Based",
            "effectiveCost": charge,
            "invoiceIssuer": _ISSUER,
            "provider": _ISSUER,
            "publisher": _ISSUER,
            "serviceCategory": "Compute",
            "serviceName": _SERVICE,
            "skuId": record.model,
            "subAccountId": record.holder.namespace,
            "subAccountName": record.holder.namespace,
            "pricingQuantity": quantity,
            "pricingUnit": UNIT,
            "pricingCategory": "Standard" if record.paid is None else "Dynamic",
        },
    }


def describe(record: UsageRecord) -> str:
    """Return what a record is charged for, in words."""
    holder = record.holder
    if not holder.id:
        return f"{record.kind.value} time of {record.model}"
    owner = holder.user or holder.namespace
    return f"{holder.kind} {holder.name} of {owner}: {holder.asks} of {record.model}"


def _resource(record: UsageRecord) -> str:
    return record.holder.id or f"{record.kind.value}/{record.model}"


def _tags(record: UsageRecord) -> dict[str, str]:
    holder = record.holder
    tags = {
        "team": holder.team,
        "user": holder.user,
        "namespace": holder.namespace,
        "node": record.node,
        "usage": record.kind.value,
    }
    return {name: value for name, value in tags.items() if value}


def _periods(day: int) -> tuple[str, str, str, str]:
    """Return the beginning and end of a day, and of its month."""
    start = datetime.fromtimestamp(day * DAY_US // 1_000_000, UTC)
    end = datetime.fromtimestamp((day + 1) * DAY_US // 1_000_000, UTC)
    month = start.replace(day=1)
    following = month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)
    return tuple(at.strftime("%Y-%m-%dT%H:%M:%SZ") for at in (start, end, month, following))  # type: ignore[return-value]


def _text(amount: Decimal) -> str:
    """Return a number without an exponent, which bills do not have."""
    return f"{amount:f}"
