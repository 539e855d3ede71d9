"""Sums that the page shows: how requests waited, and who had how much of the cards."""

from datetime import UTC, datetime

from fenka.core.metering import HOUR_US, Amounts, LineKind
from fenka.history.series import HistoryEvent, Holder, UsageRecord
from fenka.views.board import UsageLine, WaitSums
from fenka.views.board_sums import first_days, usage_lines, wait_sums


def event(at: int, job: str, kind: str) -> HistoryEvent:
    """An event of a job."""
    return HistoryEvent(at, job, kind)


def test_waits_are_those_of_requests_that_were_granted_since() -> None:
    """a waited 60 s, b not at all, c 180 s since before the span, d still waits, e was granted before it."""
    events = [
        *(event(900, "c", "asked"), event(900, "e", "asked"), event(950, "e", "granted")),
        *(event(1000, "a", "asked"), event(1001, "b", "asked"), event(1002, "b", "granted")),
        *(event(1060, "a", "granted"), event(1080, "c", "granted"), event(1090, "c", "resized")),
        *(event(1100, "d", "asked"), event(1100, "a", "ended")),
    ]
    assert wait_sums(events, 1000) == WaitSums(3, 2, 120.0, 180.0)
    assert wait_sums([], 0) == WaitSums(0, 0, None, None)


def test_a_clock_that_was_set_back_makes_no_negative_wait() -> None:
    """And a request whose beginning is not recorded has not waited as far as is known."""
    events = [event(50, "a", "asked"), event(40, "a", "granted"), event(60, "b", "granted")]
    assert wait_sums(events, 0) == WaitSums(2, 0, None, None)


def test_usage_has_a_line_for_each_user_and_for_nobody() -> None:
    """Without a price there is no cost."""

    def record(kind: LineKind, user: str, model: str) -> UsageRecord:
        amounts = Amounts(HOUR_US, 1024 * HOUR_US, 0, 512 * HOUR_US, 1024 * HOUR_US)
        return UsageRecord(1, kind, Holder(user, user=user), "", model, None, amounts)

    records = [record(LineKind.HELD, "anna", "T4"), record(LineKind.IDLE, "", "A10")]
    assert usage_lines(records, "user", {"T4": 350_000}) == [
        UsageLine("held", "anna", 1.0, 1.0, 0.5, 0.35),
        UsageLine("idle", "", 1.0, 1.0, 0.5, None),
    ]


def test_month_begins_with_its_first_day() -> None:
    """In UTC, also on the first and on the last day."""
    for day, today in ((1, 20_758), (28, 20_785), (30, 20_787)):
        now = datetime(2026, 11, day, 23, 59, tzinfo=UTC).timestamp()
        assert first_days(now) == (20_758, today)
