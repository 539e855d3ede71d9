"""A small mapping is equal to its dictionary in all that a mapping does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.mappings import small_mapping


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=6))
def test_small_mapping_equals_the_dictionary(given_items: dict[str, int | str]) -> None:
    """Also where a value equals a key."""
    small = small_mapping(given_items)
    assert small == given_items
    assert given_items == small
    assert small == small_mapping(given_items)
    assert not small != given_items  # noqa: SIM202
    assert dict(small) == {**small} == given_items
    assert list(small) == list(given_items)
    assert list(small.items()) == list(given_items.items())
    assert list(small.values()) == list(given_items.values())
    assert len(small) == len(given_items)
    assert bool(small) is bool(given_items)
    for key in (*given_items, *given_items.values(), "other"):
        assert (key in small) is (key in given_items)
        assert small.get(str(key), 7) == given_items.get(str(key), 7)
    for key, value in given_items.items():
        assert small[key] == value
    assert small != {**given_items, "other": 1}
    with pytest.raises(KeyError):
        _ = small["other"]
