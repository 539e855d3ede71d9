"""Test what the API serves, byte for byte, and how values become quantities."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.metrics_adapter.exposition import MAX_VALUE, failure, quantity, resource_list, value_list

GOLDEN = Path(__file__).parent / "golden"
TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("resources.json", resource_list()),
        ("value.json", value_list("fenka_requests", 12.5, TIME)),
        ("failure.json", failure(503, "pod bert-0 does not answer within 2 s on port admin")),
    ],
)
def test_body_is_the_golden_file(name: str, body: bytes) -> None:
    """kubectl and autoscalers read these."""
    assert body.decode() + "\n" == (GOLDEN / name).read_text()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (3, "3"),
        (0.5, "500m"),
        (12.5, "12500m"),
        (0.07, "70m"),
        (0.0001, "1m"),
        (2.0001, "2001m"),
        (MAX_VALUE, "1000000000000"),
    ],
)
def test_quantity_is_rounded_up_to_thousandths(value: float, expected: str) -> None:
    """Autoscalers read thousandths."""
    assert quantity(value) == expected


@given(st.floats(min_value=0, max_value=1e9))
def test_quantity_is_within_a_thousandth_of_the_value(value: float) -> None:
    """It is never lower, apart from the error of floating-point numbers."""
    text = quantity(value)
    thousandths = int(text[:-1]) if text.endswith("m") else int(text) * 1000
    assert value * 1000 - 1e-5 <= thousandths < value * 1000 + 1
