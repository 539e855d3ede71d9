"""Durations on screens and in options."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cli.common_options import parse_duration, short_duration
from fenka.cli.error_report import UserError


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (10 * 60 + 59, "10m"),
        (12 * 3600 + 3599, "12h"),
        (20 * 86400, "20d"),
        (364 * 86400, "364d"),
        (400 * 86400, "1y"),
    ],
)
def test_short_duration_is_the_largest_unit_cut(seconds: float, text: str) -> None:
    """As kubectl and arena have it."""
    assert short_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300), ("1h30m", 5400), ("7d", 604800), ("0s", 0), ("10h", 36000)]
)
def test_parse_duration_adds_up_units(text: str, seconds: int) -> None:
    """As Go writes durations."""
    assert parse_duration("--since", text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-5m", "5 m", "1e9s", "٣h"])
def test_parse_duration_names_the_option_when_it_is_none(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(UserError, match="--since"):
        parse_duration("--since", text)


@given(st.text(max_size=20))
def test_parse_duration_raises_nothing_but_user_errors(text: str) -> None:
    """Whatever was typed."""
    with contextlib.suppress(UserError):
        assert parse_duration("--since", text) >= 0
