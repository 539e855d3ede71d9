"""Bills: FOCUS against a golden file, and against its validator where that is installed; OpenCost's JSON."""

import csv
import io
import json
import os
import re
import subprocess
from decimal import Decimal
from pathlib import Path

import pytest

from fenka.views.usage_exports import focus_csv, opencost_json
from fenka.views.usage_report import grouped
from tests.views.usage_records import PRICES, RECORDS

GOLDEN = Path(__file__).parent / "golden"
BILL = grouped(RECORDS, "job", daily=True), PRICES, "EUR", "gpu-17"

VALIDATOR = os.environ.get("FENKA_FOCUS_VALIDATOR", "")
"""The command `focus-validator` of release 1.0.0, the last one for Python 3.11."""

VALIDATORS_FAULTS = {
    "BillingCurrency_IsCurrencyCode",
    "InvoiceIssuer_Required",
    "Provider_Required",
    "Publisher_Required",
    "ResourceID_Required",
    "SkuPriceId_Nullable",
}
"""Checks of that release which fail for every file: they name columns that FOCUS 1.0 has under other names
(ChargeType; InvoiceIssuer, Provider and Publisher without Name; ResourceID), or need a file that it lacks."""


def test_a_bill_is_the_golden_one_when_it_is_made() -> None:
    """FENKA_GOLDEN=write writes it."""
    bill = focus_csv(*BILL)
    file = GOLDEN / "focus.csv"
    if os.environ.get("FENKA_GOLDEN") == "write":
        file.write_text(bill)
    assert bill == file.read_text()


def test_costs_are_price_times_quantity_when_a_bill_is_read() -> None:
    """Each row, and the sum of the rows, to the digits that are printed."""
    rows = [*csv.DictReader(io.StringIO(focus_csv(*BILL)))]
    assert len(rows) == len(BILL[0])
    for row in rows:
        product = Decimal(row["ListUnitPrice"]) * Decimal(row["PricingQuantity"])
        assert abs(product - Decimal(row["BilledCost"])) < Decimal("1e-8")
        assert row["BilledCost"] == row["EffectiveCost"] == row["ListCost"] == row["ContractedCost"]
        assert row["ChargePeriodStart"] < row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
        assert json.loads(row["Tags"])
    assert abs(sum(Decimal(row["BilledCost"]) for row in rows) - Decimal("18.194033333")) < Decimal(
        "1e-7"
    )


def test_a_bill_has_its_columns_when_nothing_was_used() -> None:
    """Readers find the header."""
    header, *rows = focus_csv([], {}, "EUR", "gpu-17").splitlines()
    assert header == focus_csv(*BILL).splitlines()[0]
    assert rows == []


@pytest.mark.process
@pytest.mark.skipif(not VALIDATOR, reason="FENKA_FOCUS_VALIDATOR names no focus-validator")
def test_the_validator_finds_only_its_own_faults_when_it_reads_a_bill(tmp_path: Path) -> None:
    """The FinOps Foundation's validator, with the rules of FOCUS 1.0."""
    bill = tmp_path / "bill.csv"
    bill.write_text(focus_csv(*BILL))
    result = subprocess.run(
        [VALIDATOR, "--data-file", str(bill), "--validate-version", "1.0"],
        capture_output=True,
        text=True,
        check=False,
    )
    failed = set(re.findall(r"^(\w+) failed:", result.stdout, re.MULTILINE))
    assert failed == VALIDATORS_FAULTS, result.stdout + result.stderr


def test_each_day_is_a_response_when_opencost_reads_it() -> None:
    """Windows of a day, as OpenCost asks for them; ids are unique; costs are those of the bill."""
    responses = opencost_json(*BILL)
    assert [response["start"] for response in responses] == [
        "2026-11-01T00:00:00Z",
        "2026-11-02T00:00:00Z",
        "2026-11-30T00:00:00Z",
    ]
    costs = [cost for response in responses for cost in response["costs"]]
    assert len({cost["id"] for cost in costs}) == len(costs)
    assert sum(cost["billedCost"] for cost in costs) == pytest.approx(18.194033333)
    assert {response["currency"] for response in responses} == {"EUR"}
    by_team: dict[str, float] = {}
    for cost in costs:
        team = cost["labels"].get("team", cost["labels"]["usage"])
        by_team[team] = by_team.get(team, 0) + cost["billedCost"]
    assert by_team == pytest.approx(
        {"vision": 10.15, "audio": 4.194033333, "idle": 3.85, "unobserved": 0}, abs=1e-6
    )
