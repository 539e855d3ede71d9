"""Units of card memory: the figures of cGPU and gpu-manager, and that no rounding overcommits a card."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.units import card_units, format_units, mib_to_units, percent, units_to_mib
from tests.core.builders import GIB, T4_MIB, V100_MIB

CARDS = st.integers(1, 200_000)
UNITS = st.sampled_from([1, 100, 256, GIB])


@pytest.mark.parametrize(
    ("card_mib", "unit_mib", "expected"),
    [
        # S1: 15079 / 1024 = 14.7 -> 14
        (T4_MIB, GIB, 14),
        # gpushare's device plugin: 16276 / 1024 = 15.9 -> 15
        (16276, GIB, 15),
        # S5.2, gpu-manager's units: 16384 / 256 = 64
        (16384, 256, 64),
        # S5.1: in MiB a card has as many units as MiB
        (V100_MIB, 1, 16130),
        # 1023 / 1024 -> 0, and 1024 / 1024 = 1
        (1023, GIB, 0),
        (1024, GIB, 1),
    ],
)
def test_card_has_whole_units_when_its_memory_is_no_multiple_of_the_unit(
    card_mib: int, unit_mib: int, expected: int
) -> None:
    """A card has its memory divided by the unit, rounded down."""
    assert card_units(card_mib, unit_mib) == expected


@pytest.mark.parametrize(
    ("units", "card_mib", "unit_mib", "expected"),
    [
        # S1: 15079 * 4 / 14 = 4308.28… -> 4308, the figure in the article's screen
        (4, T4_MIB, GIB, 4308),
        # 15079 * 1 / 14 = 1077.07… -> 1077
        (1, T4_MIB, GIB, 1077),
        # 15079 * 12 / 14 = 12924.8… -> 12924 = 3 * 4308
        (12, T4_MIB, GIB, 12924),
        # all units are all memory
        (14, T4_MIB, GIB, T4_MIB),
        # nothing is nothing
        (0, T4_MIB, GIB, 0),
        # S5.2: 16384 * 24 / 64 = 6144 = 24 * 256, nothing to share out
        (24, 16384, 256, 6144),
        # S5.1: in MiB exactly what is asked for
        (8065, V100_MIB, 1, 8065),
    ],
)
def test_units_get_a_share_of_the_rest_when_they_become_mib(
    units: int, card_mib: int, unit_mib: int, expected: int
) -> None:
    """The MiB beyond a card's whole units are divided among them, as cGPU does."""
    assert units_to_mib(units, card_mib, unit_mib) == expected


def test_two_units_fit_when_three_shares_of_four_are_taken() -> None:
    """12 of 14 units are taken: 2 more fit, 3 do not."""
    # 15079 - 3 * 4308 = 2155; 15079 * 2 / 14 = 2154.1; 15079 * 3 / 14 = 3231.2
    left = T4_MIB - 3 * units_to_mib(4, T4_MIB, GIB)
    assert left == 2155
    assert units_to_mib(2, T4_MIB, GIB) == 2154 <= left < units_to_mib(3, T4_MIB, GIB)


def test_units_are_an_error_when_the_card_is_smaller_than_one() -> None:
    """The error says so, instead of a division by zero."""
    with pytest.raises(ValueError, match=r"^a card of 512 MiB has no unit of 1024 MiB$"):
        units_to_mib(1, 512, GIB)
    assert mib_to_units(512, 512, GIB) == 0


@pytest.mark.parametrize(
    ("mib", "expected", "text"),
    [
        # what 4 units give, and one MiB more or less: 4309 * 14 / 15079 = 4.0007
        (4308, 4, "4"),
        (4309, 4309 * 14 / T4_MIB, "4.0"),
        (4307, 4307 * 14 / T4_MIB, "4.0"),
        # 4096 * 14 / 15079 = 3.80…
        (4096, 4096 * 14 / T4_MIB, "3.8"),
        (0, 0, "0"),
        (T4_MIB, 14, "14"),
    ],
)
def test_units_are_whole_only_when_the_size_is_one_of_units(
    mib: int, expected: float, text: str
) -> None:
    """Exact sizes become fractions of units."""
    found = mib_to_units(mib, T4_MIB, GIB)
    assert (found, type(found)) == (expected, type(expected))
    assert format_units(found) == text


@settings(deadline=None)
@given(card_mib=CARDS, unit_mib=UNITS, data=st.data())
def test_units_are_the_same_when_they_are_converted_to_mib_and_back(
    card_mib: int, unit_mib: int, data: st.DataObject
) -> None:
    """This holds for every number of units of every card."""
    total = card_units(card_mib, unit_mib)
    if total:
        amount = data.draw(st.integers(0, total))
        found = mib_to_units(units_to_mib(amount, card_mib, unit_mib), card_mib, unit_mib)
        assert (found, type(found)) == (amount, int)


@settings(deadline=None)
@given(card_mib=CARDS, unit_mib=UNITS, data=st.data())
def test_shares_fit_the_card_when_its_units_are_divided_in_any_way(
    card_mib: int, unit_mib: int, data: st.DataObject
) -> None:
    """Each next share fits into what is left."""
    left = total = card_units(card_mib, unit_mib)
    held = 0
    while left:
        amount = data.draw(st.integers(max(1, left // 3), left))
        held += units_to_mib(amount, card_mib, unit_mib)
        left -= amount
        assert units_to_mib(left, card_mib, unit_mib) <= card_mib - held
    assert held <= card_mib
    # Each floor loses less than one MiB.
    assert not total or held > card_mib - total


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [
        # S1: 1200 / 14 = 85.7; S2: 200 / 28 = 7.1, 1800 / 28 = 64.3, 2000 / 28 = 71.4, 2500 / 28 = 89.3
        (12, 14, 85),
        (2, 28, 7),
        (18, 28, 64),
        (20, 28, 71),
        (25, 28, 89),
        # 800 / 28 = 28.57; 1200 / 64 = 18.75; 2000 / 64 = 31.25
        (8, 28, 28),
        (12, 64, 18),
        (20, 64, 31),
        (14, 14, 100),
        (0, 14, 0),
        # an empty cluster: S3 prints 0/0 (0%)
        (0, 0, 0),
        # overcommitted: 2000 / 16 = 125
        (20, 16, 125),
        # truncated however near: 99.9999999…, in bytes of a 128-GiB card
        (128 * 2**30 - 1, 128 * 2**30, 99),
        # fractions of units whose product is a hair too small: 0.17 * 100 / 0.17 = 99.99999999999999
        (0.17, 0.17, 100),
        (0.29, 1, 29),
        (3.8, 14, 27),
    ],
)
def test_percentage_is_truncated_when_it_is_no_whole_number(
    part: float, whole: float, expected: int
) -> None:
    """arena and gpushare print percentages so."""
    assert percent(part, whole) == expected


@settings(deadline=None)
@given(part=st.integers(0, 10**9), whole=st.integers(1, 10**9))
def test_percentage_is_exact_when_both_numbers_are_whole(part: int, whole: int) -> None:
    """It has no rounding error of floats."""
    assert percent(part, whole) == part * 100 // whole


@settings(deadline=None)
@given(whole=st.floats(0.01, 1e6))
def test_percentage_is_100_when_part_and_whole_are_equal(whole: float) -> None:
    """This holds for fractions too."""
    assert percent(whole, whole) == 100
