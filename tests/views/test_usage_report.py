"""Sums of the ledger for screens."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.metering import Amounts, LineKind
from fenka.history.series import Holder, UsageGroup, UsageRecord
from fenka.views.usage_report import (
    NoPrice,
    as_decimal,
    check_prices,
    grouped,
    record_cost,
    total_row,
    usage_rows,
    visible_to,
)
from tests.views.usage_records import A10, ANNA, BEN, DAY, PRICES, RECORDS, T4, held


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("user", [("anna", 29, "10.15"), ("ben", 9.333333, "4.194033333")]),
        ("namespace", [("anna", 29, "10.15"), ("ben", 9.333333, "4.194033333")]),
        ("team", [("vision", 29, "10.15"), ("audio", 9.333333, "4.194033333")]),
        (
            "job",
            [
                ("train", 27, "9.45"),
                ('a "b", c', 9.333333, "4.194033333"),
                ("train", 2, "0.7"),
            ],
        ),
    ],
)
def test_usage_is_added_up_when_it_is_grouped(
    by: UsageGroup, expected: list[tuple[str, float, str]]
) -> None:
    """Who has the most comes first; the elastic node costs what was paid: 1/3 h at 0.4321."""
    rows = usage_rows(RECORDS, by, PRICES)
    assert [(row.name, row.card_hours, str(row.cost)) for row in rows[:-2]] == expected
    assert [(row.kind, row.name, row.card_hours) for row in rows[-2:]] == [
        (LineKind.IDLE, "", 11),
        (LineKind.UNOBSERVED, "", 0),
    ]
    total = total_row(rows, RECORDS, PRICES)
    assert (total.name, total.card_hours) == ("total", 49.333333)
    assert total.cost == Decimal("18.194033333")


def test_shares_are_of_what_is_known_when_use_was_measured() -> None:
    """A quarter of anna's memory was used; of the elastic node nothing is known."""
    rows = {row.name: row for row in usage_rows(RECORDS, "user", PRICES)}
    assert (rows["anna"].used_share, rows["anna"].busy_hours) == (0.25, 14.5)
    unknown = usage_rows(RECORDS[-1:], "user", PRICES)[0]
    assert (unknown.used_share, unknown.busy_hours) == (None, None)


def test_only_that_part_has_a_price_when_a_model_has_none() -> None:
    """What was paid is known without a list; a line without any price has no cost."""
    rows = {row.name: row.cost for row in usage_rows(RECORDS, "user", {})}
    assert rows["anna"] is None
    assert rows["ben"] == Decimal("0.144033333")
    with pytest.raises(NoPrice, match=r'^Tesla T4 has no price: write "Tesla T4" = 0\.35$'):
        check_prices(RECORDS, {A10: 1}, 'write "{model}" = 0.35')
    check_prices(RECORDS, PRICES, "")


AMOUNTS = st.builds(Amounts, *[st.integers(0, 10**14)] * len(Amounts._fields))
SOME_RECORDS = st.lists(
    st.builds(
        UsageRecord,
        st.integers(DAY, DAY + 3),
        st.sampled_from(LineKind),
        st.sampled_from([ANNA, BEN]),
        st.sampled_from(["", "n"]),
        st.sampled_from([T4, A10]),
        st.one_of(st.none(), st.integers(0, 10**9)),
        AMOUNTS,
    )
)


@given(records=SOME_RECORDS, by=st.sampled_from(["user", "namespace", "team", "job"]))
def test_nothing_is_lost_when_records_are_grouped(
    records: list[UsageRecord], by: UsageGroup
) -> None:
    """Amounts and exact costs of all groups are those of all records."""
    for daily in (False, True):
        sums = grouped(records, by, daily=daily)
        assert _total(sums) == _total(records)
        assert all(
            record.holder == Holder("") for record in sums if record.kind is not LineKind.HELD
        )


def _total(records: list[UsageRecord]) -> tuple[Amounts, Fraction]:
    amounts = Amounts()
    for record in records:
        amounts = amounts.plus(record.amounts)
    return amounts, sum(
        (record_cost(record, PRICES) or Fraction(0) for record in records), Fraction(0)
    )


def test_money_has_no_more_digits_than_it_needs_when_it_is_printed() -> None:
    """Neither an exponent nor zeros at the end."""
    assert [
        str(as_decimal(Fraction(*amount))) for amount in ((70, 100), (100, 1), (1, 3), (0, 1))
    ] == [
        *("0.7", "100", "0.333333333", "0"),
    ]


def test_days_stay_apart_when_a_bill_is_made() -> None:
    """A bill has a row for each day."""
    days = [
        record.day for record in grouped([held(ANNA, 1), held(ANNA, 1, DAY + 1)], "job", daily=True)
    ]
    assert days == [DAY, DAY + 1]


def test_others_are_one_sum_without_names_when_a_user_reads() -> None:
    """Nothing of the sums is lost, so that all lines together still are cards × time."""
    mine = visible_to(RECORDS, ANNA.uid)
    for by in ("user", "team", "job"):
        rows, all_rows = usage_rows(mine, by, PRICES), usage_rows(RECORDS, by, PRICES)
        assert {row.owner or row.name for row in rows if row.kind is LineKind.HELD} == {
            ANNA.team if by == "team" else "anna",
            "others",
        }
        assert sum(row.card_hours for row in rows) == sum(row.card_hours for row in all_rows)
