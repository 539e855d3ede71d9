"""Durations and percentages as people write them in options and files."""

import re

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?(?:ms|[smhd]))+")


_PART = re.compile(r"([0-9.]+)([a-z]+)")


def parse_duration(text: str) -> float | None:
    """Return the seconds of `90s`, `0.5s`, `2h30m` or `7d`; None if it is no duration or has no unit."""
    if not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


_PERCENT = re.compile(r"([0-9]{1,3})%?")


def parse_percent(text: str) -> int | None:
    """Return a share of `50` or `50%`; None if the text is no percentage from 0 to 100."""
    found = _PERCENT.fullmatch(text)
    return int(found[1]) if found and int(found[1]) <= 100 else None
