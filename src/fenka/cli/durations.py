"""Durations as screens show them and as options take them."""

from fenka.cli.errors import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.dialects import durations

_SIZES = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_YEAR = 365 * 86400


def short_duration(seconds: float) -> str:
    """Return a duration in its largest unit, cut, as kubectl and arena do: 59s, 10m, 12h, 20d, 1y."""
    whole = max(int(seconds), 0)
    if whole >= _YEAR:
        return f"{whole // _YEAR}y"
    unit = next((unit for unit, size in _SIZES.items() if whole >= size), "s")
    return f"{whole // _SIZES[unit]}{unit}"


def parse_duration(option: str, text: str) -> int:
    """Return the seconds of `10h`, `1h30m` or `7d`. Raises UserError, naming the option."""
    seconds = durations.parse_duration(text)
    if seconds is None or seconds % 1:
        raise UserError(
            f"invalid {option} {text!r}: expected a duration such as 30m, 10h or 7d", INVALID_INPUT
        )
    return int(seconds)
