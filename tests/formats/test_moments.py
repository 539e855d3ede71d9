"""Moments by the clock of a time zone. 28 November 2026 is a Saturday."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from fenka.formats.moments import (
    WEEK,
    InvalidMoment,
    check_exists,
    midnight,
    parse_moment,
    seconds,
    span,
)

NOW = datetime(2026, 11, 28, 12, 0)
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", "2026-11-28 12:00"),
        ("13:30", "2026-11-28 13:30"),
        ("9:00", "2026-11-29 09:00"),
        ("12:00", "2026-11-29 12:00"),
        ("fri 09:00", "2026-12-04 09:00"),
        ("Friday 09:00", "2026-12-04 09:00"),
        ("sat 11:59", "2026-12-05 11:59"),
        ("sat 12:01", "2026-11-28 12:01"),
        ("today 09:00", "2026-11-28 09:00"),
        ("tomorrow 23:59", "2026-11-29 23:59"),
        ("2026-12-24 00:00", "2026-12-24 00:00"),
    ],
)
def test_moment_is_the_next_one_after(text: str, moment: str) -> None:
    """Days and clocks come again; dates do not."""
    assert parse_moment(text, NOW) == datetime.fromisoformat(moment)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("tomorrow 17:00", "2026-11-29 17:00"),
        ("today 17:00", "2026-11-28 17:00"),
        ("now", "2026-11-28 12:00"),
        ("17:00", "2026-11-29 17:00"),
        ("08:00", "2026-11-30 08:00"),
        ("sun 17:00", "2026-11-29 17:00"),
        ("mon 17:00", "2026-11-30 17:00"),
    ],
)
def test_words_are_of_now_when_the_moment_follows_another(text: str, moment: str) -> None:
    """A booking from tomorrow at 9 to tomorrow at 17 is of 8 hours; a clock alone follows its beginning."""
    start = parse_moment("tomorrow 09:00", NOW)
    assert parse_moment(text, NOW, start) == datetime.fromisoformat(moment)


@pytest.mark.parametrize("text", ["08:00", "fri 08:00", "tomorrow 08:00"])
def test_moment_is_refused_when_it_is_beyond_the_calendar(text: str) -> None:
    """The last day has no next one."""
    last = datetime(9999, 12, 31, 12, 0)
    with pytest.raises(InvalidMoment, match="is no time"):
        parse_moment(text, last)
    with pytest.raises(InvalidMoment, match="9999-12-31 23:59' is no time"):
        check_exists(datetime(9999, 12, 31, 23, 59), ZoneInfo("America/New_York"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fri",
        "24:00",
        "9",
        "frisbee 09:00",
        "2026-02-30 09:00",
        "fri 09:00 CET",
        "-1:00",
        "x" * 99,
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    """With what to write instead, in one line."""
    with pytest.raises(InvalidMoment, match=r"^'.{0,40}' is no time: write 'fri 09:00', .*$"):
        parse_moment(text, NOW)


def test_clocks_that_are_left_out_are_refused_and_double_ones_are_the_first() -> None:
    """In Berlin 02:30 is left out on 29 March 2026, and comes twice on 25 October: first in summer time."""
    with pytest.raises(InvalidMoment, match="there is no 02:30 on 2026-03-29"):
        check_exists(datetime(2026, 3, 29, 2, 30), BERLIN)
    check_exists(datetime(2026, 3, 29, 3, 0), BERLIN)
    check_exists(datetime(2026, 10, 25, 2, 30), BERLIN)
    assert seconds(datetime(2026, 10, 25, 2, 30), BERLIN) == (
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC).timestamp()
    )
    assert seconds(datetime(2026, 3, 29, 2, 30), BERLIN) == (
        datetime(2026, 3, 29, 1, 30, tzinfo=UTC).timestamp()
    )


def test_a_week_later_is_the_same_clock() -> None:
    """From Friday 23 to 30 October 2026, 7 × 24 h and the hour that comes twice pass."""
    friday = datetime(2026, 10, 23, 9, 0)
    assert seconds(friday + WEEK, BERLIN) - seconds(friday, BERLIN) == (7 * 24 + 1) * 3600


def test_midnight_is_that_of_the_zone() -> None:
    """At 23:30 UTC it is half past midnight in Berlin. The day of the change has 25 hours."""
    late = datetime(2026, 11, 28, 23, 30, tzinfo=UTC).timestamp()
    assert midnight(late, BERLIN) == late - 1800
    assert midnight(late, UTC) == late - 23.5 * 3600
    change = datetime(2026, 10, 25, 23, 0, tzinfo=BERLIN).timestamp()
    assert midnight(change, BERLIN) == change - 24 * 3600


def test_span_names_the_day_once() -> None:
    """Or both, if the end is on another one."""
    begin = datetime(2026, 12, 4, 9, 0, tzinfo=BERLIN).timestamp()
    assert span(begin, begin + 8 * 3600, BERLIN) == "Fri 4 Dec 09:00 to 17:00"
    assert span(begin, begin + 24 * 3600, BERLIN) == "Fri 4 Dec 09:00 to Sat 5 Dec 09:00"
