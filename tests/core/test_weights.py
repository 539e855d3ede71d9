"""How weights divide the requests of a service."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.scaling import shares


@pytest.mark.parametrize(
    ("weights", "versions", "expected"),
    [
        ({"v1": 90, "v2": 10}, ["v1"], {"v1": 100}),
        ({"v1": 50, "v2": 25, "v3": 25}, ["v1", "v2"], {"v1": 67, "v2": 33}),
        (None, ["v1", "v2", "v3"], {"v1": 34, "v2": 33, "v3": 33}),
        ({"v1": 100}, ["v2"], {}),
        ({"v1": 100}, ["v1", "v2"], {"v1": 100, "v2": 0}),
        (None, [], {}),
    ],
)
def test_shares_keep_the_proportion_of_weights(
    weights: dict[str, int] | None, versions: list[str], expected: dict[str, int]
) -> None:
    """A version that is not there gets nothing."""
    assert shares(weights, versions) == expected


@given(st.dictionaries(st.text(max_size=2), st.integers(0, 10**30), min_size=1))
def test_shares_add_up_to_100_whatever_the_weights(weights: dict[str, int]) -> None:
    """They come from an annotation."""
    found = shares(weights, weights)
    assert sum(found.values()) == (100 if any(weights.values()) else 0)
    for name, share in found.items():
        assert share >= 100 * weights[name] // sum(weights.values())
