"""Layouts and flexibility, against the figures that are published for real cards."""

from fractions import Fraction

import pytest

from fenka.core.mig.geometry import TABLES, Geometry, Place, profile_name
from fenka.core.mig.layouts import Choice, all_layouts, best_place, capacity, flexibility
from tests.core.mig import exhaustive

A100, A30 = TABLES["A100-40G"], TABLES["A30"]


def without(geometry: Geometry, *names: str) -> Geometry:
    """Return the geometry without some profiles."""
    profiles = tuple(each for each in geometry.profiles if each.name not in names)
    return Geometry(geometry.model, geometry.compute, geometry.sms, profiles)


def at(geometry: Geometry, *places: tuple[str, int]) -> frozenset[Place]:
    """Return a layout."""
    return frozenset(Place(geometry.by_name[name], start) for name, start in places)


@pytest.mark.parametrize(
    ("geometry", "layouts", "maximal", "multisets"),
    [
        (without(A100, "1g.5gb+me", "1g.10gb"), 298, 19, 14),
        (without(A100, "1g.5gb+me"), 723, 78, 38),
        (A100, 2319, 239, 64),
        (without(A30, "1g.6gb+me", "2g.12gb+me"), 26, 5, 4),
        (A30, 76, 17, 8),
    ],
)
def test_layouts_are_as_many_as_nvidia_allows(
    geometry: Geometry, layouts: int, maximal: int, multisets: int
) -> None:
    """All legal ones, those to which nothing can be added, and those as sets of profiles."""
    rows = all_layouts(geometry)
    full = [row for row in rows if all(geometry.conflict(row, place) for place in geometry.places)]
    kinds = {tuple(sorted(place.profile.name for place in row)) for row in full}
    assert (len(rows), len(full), len(kinds)) == (layouts, maximal, multisets)


@pytest.mark.parametrize("model", ["A100-40G", "A30"])
def test_capacity_equals_exhaustion_when_layouts_are_random(model: str) -> None:
    """For every profile beside every seventh layout."""
    geometry = TABLES[model]
    for row in all_layouts(geometry)[::7]:
        for profile in geometry.profiles:
            expected = exhaustive.fitting(geometry, list(row), profile)
            assert capacity(geometry, row, profile) == expected, (row, profile)


@pytest.mark.parametrize(("model", "expected"), [("A100-40G", 21), ("H100-80G", 21), ("A30", 7)])
def test_flexibility_is_the_sum_of_sizes_when_the_card_is_empty(model: str, expected: int) -> None:
    """Every plain profile counts its size; those with attributes count nothing."""
    assert flexibility(TABLES[model], ()) == expected


def test_flexibility_counts_the_share_that_still_fits() -> None:
    """1g 3/7, double 2·2/4, 2g 2·1/3, 3g 4·1/2; no 4g, no 7g."""
    expected = Fraction(3, 7) + 1 + Fraction(2, 3) + 2
    assert flexibility(A100, at(A100, ("4g.20gb", 0))) == expected


def test_best_place_leaves_most_possible_when_cards_are_empty() -> None:
    """A 1g at 6 leaves 4g, three 2g and a 3g at 0; the driver begins there, too."""
    assert best_place([(A100, frozenset())], "1g.5gb") == Choice(0, 6)


def test_best_place_prefers_the_fuller_card_when_flexibility_is_equal() -> None:
    """Two places that cost the same: the higher start of the fuller card."""
    half = at(A30, ("2g.12gb", 0))
    cards = [(A30, frozenset[Place]()), (A30, half), (A30, half)]
    assert best_place(cards, "2g.12gb") == Choice(1, 2)


def test_best_place_is_none_when_no_card_has_room_or_the_profile() -> None:
    """Another model's profile and a full card."""
    full = at(A30, ("4g.24gb", 0))
    assert best_place([(A30, full)], "1g.6gb") is None
    assert best_place([(A30, full)], "1g.5gb") is None


@pytest.mark.parametrize(
    ("model", "percents"),
    [
        ("A100-40G", [12, 12, 12, 25, 38, 51, 90]),
        ("H100-80G", [12, 12, 19, 24, 45, 48, 100]),
        ("B200", [12, 12, 20, 24, 47, 48, 100]),
        ("A30", [25, 25, 50, 50, 100]),
    ],
)
def test_compute_of_an_instance_is_its_share_of_the_card_rounded_down(
    model: str, percents: list[int]
) -> None:
    """In NVML's order: 1g, 1g+me, double, 2g, 3g, 4g, 7g."""
    geometry = TABLES[model]
    assert [geometry.compute_percent(each) for each in geometry.profiles] == percents


@pytest.mark.parametrize(
    ("compute", "mib", "total_mib", "name"),
    [
        (1, 4864, 40960, "1g.5gb"),
        (2, 9984, 40960, "2g.10gb"),
        (1, 5952, 24576, "1g.6gb"),
        (3, 40448, 81920, "3g.40gb"),
    ],
)
def test_profile_name_follows_from_nvmls_figures(
    compute: int, mib: int, total_mib: int, name: str
) -> None:
    """Eighths of the card, rounded up."""
    assert profile_name(compute, mib, total_mib << 20) == name
