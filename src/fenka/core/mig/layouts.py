"""The layouts of a card model, and how many more instances each one leaves possible."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache

from fenka.core.mig.geometry import Geometry, Place, Profile

Layout = frozenset[Place]

REMEMBERED = 1 << 14
"""Layouts of which the best places are remembered: the cards of a cluster are in a few hundred."""


@cache
def all_layouts(geometry: Geometry) -> tuple[Layout, ...]:
    """Return every legal layout of a card, the empty one first."""
    places = sorted(geometry.places, key=lambda place: place.start)
    layouts: list[tuple[Place, ...]] = [()]
    for place in places:
        layouts += [(*layout, place) for layout in layouts if not geometry.conflict(layout, place)]
    return tuple(frozenset(layout) for layout in layouts)


def capacity(geometry: Geometry, layout: Collection[Place], profile: Profile) -> int:
    """Return how many more instances of one profile alone fit beside a layout."""
    present = [*layout]
    for start in profile.starts:  # all have one length: taking the first that is free is optimal
        place = Place(profile, start)
        if not geometry.conflict(present, place):
            present.append(place)
    return len(present) - len(layout)


def filled(layout: Collection[Place]) -> int:
    """Return how many slices of the memory axis are taken."""
    return sum(place.profile.size for place in layout)


@lru_cache(maxsize=REMEMBERED)
def free_counts(geometry: Geometry, layout: Layout) -> Mapping[str, int]:
    """Return how many more instances of each plain profile fit, each for itself; none that does not fit."""
    counts = {
        profile.name: capacity(geometry, layout, profile)
        for profile in geometry.profiles
        if profile.plain
    }
    return {name: count for name, count in counts.items() if count}


@cache
def _plain_profiles(geometry: Geometry) -> tuple[tuple[Profile, int], ...]:
    return tuple(
        (profile, capacity(geometry, (), profile)) for profile in geometry.profiles if profile.plain
    )


def flexibility(geometry: Geometry, layout: Collection[Place]) -> Fraction:
    """Return the sum over plain profiles of size x capacity / capacity of the empty card."""
    return sum(
        (
            Fraction(profile.size * capacity(geometry, layout, profile), empty)
            for profile, empty in _plain_profiles(geometry)
        ),
        Fraction(0),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """The place of a new instance: the number of the card, and the start on it."""

    card: int
    start: int


def best_place(
    cards: Sequence[tuple[Geometry, Layout]], name: str, kept_free: Sequence[int] = ()
) -> Choice | None:
    """Return the place for a profile that leaves the largest flexibility over all cards.

    Ties go to the fuller card, then to the lower card, then to the higher start. None if it fits nowhere.

    Args:
        cards: each with what is occupied; idle instances count as free.
        name: the profile.
        kept_free: for each card the slices, as bits, that must stay free; empty for none.
    """
    best: tuple[Fraction, int, int, int] | None = None
    for number, (geometry, layout) in enumerate(cards):
        profile = geometry.by_name.get(name)
        if profile is None:
            continue
        on_card = _best_start(geometry, layout, profile, kept_free[number] if kept_free else 0)
        if on_card is not None:
            rank = (on_card[0], filled(layout), -number, on_card[1])
            best = rank if best is None else max(best, rank)
    return best and Choice(-best[2], best[3])


@lru_cache(maxsize=REMEMBERED)
def flexibility_lost(geometry: Geometry, layout: Layout, place: Place) -> Fraction:
    """Return the flexibility that is lost when an instance is added to a layout."""
    return flexibility(geometry, layout) - flexibility(geometry, {*layout, place})


@lru_cache(maxsize=REMEMBERED)
def _best_start(
    geometry: Geometry, layout: Layout, profile: Profile, kept_free: int
) -> tuple[Fraction, int] | None:
    """Return the gain of flexibility, mostly negative, and the start; None if it fits nowhere."""
    places = (Place(profile, start) for start in profile.starts)
    options = [
        (-flexibility_lost(geometry, layout, place), place.start)
        for place in places
        if not (place.mask & kept_free or geometry.conflict(layout, place))
    ]
    return max(options, default=None)
