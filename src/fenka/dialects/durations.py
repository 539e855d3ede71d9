"""Durations as people write them in options and files."""

import re

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?(?:ms|[smhd]))+")
_PART = re.compile(r"([0-9.]+)([a-z]+)")


def parse_duration(text: str) -> float | None:
    """Return the seconds of `90s`, `0.5s`, `2h30m` or `7d`; None if it is no duration or has no unit."""
    if not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
