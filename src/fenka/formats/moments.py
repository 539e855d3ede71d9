"""Moments as people write them, `fri 09:00` or `2026-12-04 09:00`, by the clock of a machine's time zone."""

import re
from datetime import date, datetime, time, timedelta, tzinfo

from fenka.core.errors import INVALID_INPUT, FenkaError

WEEK = timedelta(days=7)
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})")
_DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")


class InvalidMoment(FenkaError):
    """The text is no moment; the message says what to write instead."""

    exit_code = INVALID_INPUT


def parse_moment(text: str, now: datetime, after: datetime | None = None) -> datetime:
    """Return the first such moment after another one, as a wall clock shows it.

    `now`, `today` and `tomorrow` are those of the person who writes, whatever `after` is. They, and a date,
    may be before `after`.

    Args:
        text: `now`, or a clock after a day's name, `today`, `tomorrow`, a date or nothing.
        now: wall clock, without a zone.
        after: what a clock alone, or a day's name, follows; None for `now`.

    Raises:
        InvalidMoment: for another text, or a moment beyond the year 9999.
    """
    try:
        return _parsed(text, now, now if after is None else after)
    except OverflowError:
        raise _invalid(text) from None


def _parsed(text: str, now: datetime, after: datetime) -> datetime:
    """Return the moment. Raises InvalidMoment, OverflowError."""
    words = text.lower().split()
    if words == ["now"]:
        return now
    match = _CLOCK.fullmatch(words[-1]) if 1 <= len(words) <= 2 else None
    if match is None or int(match[1]) > 23 or int(match[2]) > 59:
        raise _invalid(text)
    clock, today = time(int(match[1]), int(match[2])), after.date()
    if len(words) == 1:
        moment = datetime.combine(today, clock)
        return moment if moment > after else moment + timedelta(days=1)
    day = words[0]
    if day in ("today", "tomorrow"):
        return datetime.combine(now.date() + timedelta(days=day == "tomorrow"), clock)
    if day[:3] in DAYS and _day_name(day).startswith(day):
        ahead = (DAYS.index(day[:3]) - today.weekday()) % 7
        moment = datetime.combine(today + timedelta(days=ahead), clock)
        return moment if moment > after else moment + WEEK
    found = _DATE.fullmatch(day)
    try:
        return datetime.combine(date(*map(int, found.groups())), clock) if found else _fail(text)
    except ValueError:
        raise _invalid(text) from None


def _day_name(day: str) -> str:
    names = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
    return names[DAYS.index(day[:3])]


def _fail(text: str) -> datetime:
    raise _invalid(text)


def _invalid(text: str) -> InvalidMoment:
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    return InvalidMoment(
        f"{shown!r} is no time: write 'fri 09:00', 'tomorrow 09:00', '2026-12-04 09:00' or 09:00"
    )


def check_exists(moment: datetime, zone: tzinfo) -> None:
    """Raise InvalidMoment for a wall clock that is left out when clocks go forward."""
    local = moment.replace(tzinfo=zone)
    try:
        shown = datetime.fromtimestamp(local.timestamp(), zone).replace(tzinfo=None)
    except (OverflowError, ValueError):  # The year 9999 ends elsewhere.
        raise _invalid(f"{moment:%Y-%m-%d %H:%M}") from None
    if shown != moment:
        raise InvalidMoment(
            f"there is no {moment:%H:%M} on {moment:%Y-%m-%d}, when clocks go forward: choose another time"
        )


def seconds(moment: datetime, zone: tzinfo) -> float:
    """Return Unix seconds of a wall clock: the first if it comes twice, an hour later if it is left out."""
    return moment.replace(tzinfo=zone, fold=0).timestamp()


def midnight(now: float, zone: tzinfo) -> float:
    """Return when the day began in this zone, in Unix seconds."""
    local = datetime.fromtimestamp(now, zone)
    began = seconds(datetime.combine(local.date(), time()), zone)
    return min(began, now)


def span(start: float, end: float, zone: tzinfo) -> str:
    """Return `Fri 4 Dec 09:00 to 17:00`, with the day of the end if that is another one."""
    begin, until = (datetime.fromtimestamp(at, zone) for at in (start, end))
    last = f"{until:%H:%M}" if begin.date() == until.date() else moment_text(until)
    return f"{moment_text(begin)} to {last}"


def moment_text(moment: datetime) -> str:
    """Return `Fri 4 Dec 09:00`."""
    return f"{moment:%a} {moment.day} {moment:%b %H:%M}"
