"""How a card comes to have the instances that an administrator asks for."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.mig.geometry import Geometry, Place
from fenka.core.mig.layouts import Layout, all_layouts


class ImpossibleLayout(FenkaError):
    """The card cannot have these instances."""

    exit_code = INVALID_INPUT


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """The changes on a card, ordered by start.

    Attributes:
        layout: what the card has in the end.
        destroy: idle instances that go.
        create: instances that can be created once these are gone.
        blocked: instances that must wait, each with those in its way.
        leaving: instances that are in use and not wanted.
    """

    layout: Layout
    destroy: tuple[Place, ...]
    create: tuple[Place, ...]
    blocked: Mapping[Place, tuple[Place, ...]]
    leaving: tuple[Place, ...]


def plan_layout(
    geometry: Geometry,
    counts: Mapping[str, int],
    idle: Collection[Place],
    used: Collection[Place],
) -> LayoutChange:
    """Return the fewest changes to a layout with so many instances of each profile.

    Args:
        geometry: the card's.
        counts: the number of instances by profile.
        idle: instances that may be destroyed.
        used: instances that stay until their programs have ended.

    Raises:
        ImpossibleLayout: The card has no such profile, or has not so many at once.
    """
    unknown = [name for name in counts if name not in geometry.by_name]
    if unknown:
        offered = ", ".join(geometry.by_name)
        raise ImpossibleLayout(f"{geometry.model} has no profile {unknown[0]}: it has {offered}")
    wanted = Counter({name: count for name, count in counts.items() if count})
    fitting = [layout for layout in all_layouts(geometry) if _counts(layout) == wanted]
    if not fitting:
        listed = ", ".join(f"{count}x {name}" for name, count in wanted.items())
        raise ImpossibleLayout(f"{geometry.model} cannot be divided into {listed} at once")
    held, free = frozenset(used), frozenset(idle)

    def rank(layout: Layout) -> tuple[int, int, int, list[int]]:
        blocked = sum(bool(_in_the_way(place, held - layout)) for place in layout - held)
        starts = sorted(place.start for place in layout)
        return -blocked, len(layout & held), len(layout & free), starts

    best = max(fitting, key=rank)
    missing = sorted(best - held - free, key=_start)
    leaving = tuple(sorted(held - best, key=_start))
    present, create, blocked = held | (free & best), list[Place](), dict[Place, tuple[Place, ...]]()
    for place in missing:
        if geometry.conflict({*present, *create}, place):
            # Without one in its place, compute slices or media engines are missing.
            blocked[place] = _in_the_way(place, leaving) or leaving
        else:
            create.append(place)
    destroy = tuple(sorted(free - best, key=_start))
    return LayoutChange(best, destroy, tuple(create), blocked, leaving)


def _counts(layout: Layout) -> Counter[str]:
    return Counter(place.profile.name for place in layout)


def _in_the_way(place: Place, held: Collection[Place]) -> tuple[Place, ...]:
    return tuple(sorted((other for other in held if other.mask & place.mask), key=_start))


def _start(place: Place) -> int:
    return place.start
