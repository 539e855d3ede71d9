"""Dictionaries of bounded size: what tenants choose never makes them grow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster import mappings
from fenka.cluster.mappings import LIMIT, MAX_SHARED_BYTES, SHARED, RecentDict, SharedValues


def test_oldest_key_is_dropped_when_one_more_is_set() -> None:
    """LIMIT are kept."""
    known = RecentDict[int, int]()
    for number in range(LIMIT):
        known[number] = number
    assert (len(known), 0 in known) == (LIMIT, True)
    known[LIMIT] = LIMIT
    assert (len(known), 0 in known, 1 in known, known[LIMIT]) == (LIMIT, False, True, LIMIT)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_keys_that_were_set_last_are_kept(keys: list[int]) -> None:
    """Setting a key again makes it recent; reading it does not. LIMIT is 3 here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mappings, "LIMIT", 3)
        known = RecentDict[int, int]()
        for number, key in enumerate(keys):
            known[key] = number
            _ = known.get(0)
    expected = [*dict.fromkeys(reversed(keys))][:3]
    assert [*known] == expected[::-1]
    assert known == {key: len(keys) - 1 - keys[::-1].index(key) for key in expected}


def test_key_can_be_removed_when_it_is_gone() -> None:
    """Pods that are reported as deleted do not take the place of others."""
    known = RecentDict[str, None]()
    known["a"] = None
    assert known.pop("a", None) is None
    assert known.pop("a", 7) == 7
    assert len(known) == 0


@pytest.mark.parametrize(
    ("length", "kept"),
    [(0, True), (1, True), (MAX_SHARED_BYTES, True), (MAX_SHARED_BYTES + 1, False)],
)
def test_value_is_kept_when_its_key_is_short(length: int, kept: bool) -> None:
    """Keys encode what tenants wrote."""
    values = SharedValues[int]()
    values[b"x" * length] = 1
    assert (b"x" * length in values) is kept


def test_all_is_forgotten_when_the_table_is_full() -> None:
    """A key that is too long forgets nothing."""
    values = SharedValues[int]()
    for number in range(SHARED):
        values[str(number).encode()] = number
    values[b"x" * (MAX_SHARED_BYTES + 1)] = 0
    assert len(values) == SHARED
    values[b"new"] = 1
    assert values == {b"new": 1}
