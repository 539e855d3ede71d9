"""Plans for several cards and several requests at once.

The objective, in this order: the most value, the fewest moves, the fewest conversions, the largest
flexibility of the cards that have MIG in the end, the fewest idle instances destroyed.

`options.py` reduces each card to its useful layouts, `join.py` combines the cards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fenka.core.mig.bound import Bound
from fenka.core.mig.case import (
    Case,
    Create,
    Destroy,
    Enable,
    Instance,
    Plan,
    PlannedCard,
    State,
    Step,
    Target,
)
from fenka.core.mig.geometry import Geometry, Place, Profile
from fenka.core.mig.join import Join
from fenka.core.mig.options import CardOptions, Demands, Hosting, Options, layout_table

FIRST_WIDTH = 100
"""States of the first search, whose result limits the second one."""
WIDTH = 60_000
"""States that are kept after each card. Up to four cards need fewer, so that plans for them are optimal."""


def plan(case: Case, width: int = WIDTH) -> Plan:
    """Return the best steps for a case.

    width: how many states are compared after each card. The result is optimal if they suffice.
    """
    if not case.cards:
        return Plan()
    demands = Demands(case)
    seen: dict[PlannedCard, Options] = {}
    sizes: list[tuple[PlannedCard, Options]] = []
    for card in case.cards:
        shape = _anonymous(card)
        if shape not in seen:
            seen[shape] = CardOptions(shape, demands).options()
        sizes.append((card, seen[shape]))
    models = list(dict.fromkeys(card.geometry for card in case.cards))
    # Cards with few options first: their states are few, too.
    sizes.sort(key=lambda each: (models.index(each[0].geometry), len(each[1].costs)))
    cards = [card for card, _ in sizes]
    join = Join(
        demands,
        [options for _, options in sizes],
        [card.geometry for card in cards],
        Bound(demands, cards),
    )
    result = join.best(min(FIRST_WIDTH, width))
    if width > FIRST_WIDTH:
        result = join.best(width, known=result)
    if result is None:
        return plan(replace(case, moves=0), width)
    chosen = {
        card.name: options.hostings[row]
        for (card, options), row in zip(sizes, result.rows, strict=True)
    }
    return _Assignment(case, [chosen[card.name] for card in case.cards]).plan()


def _anonymous(card: PlannedCard) -> PlannedCard:
    """Return the card without its name and those of its jobs, so that equal cards are computed once."""
    instances = (replace(each, job="job" if each.job else "") for each in _by_start(card))
    return replace(card, name="", instances=tuple(instances))


def _by_start(card: PlannedCard) -> list[Instance]:
    """Return the instances in the order that options are computed in, whatever the case's order is."""
    return sorted(card.instances, key=lambda each: each.place.start)


@dataclass
class _Use:
    """An instance of the final layout that somebody may use.

    contents: counts of slices by size; None if it serves a request or a job alone.
    """

    card: PlannedCard
    place: Place
    contents: tuple[int, ...] | None = None
    used: bool = False

    @property
    def target(self) -> Target:
        return Target(self.card.name, self.place.start)


class _Assignment:
    """Turns the chosen option of every card into steps, and names who gets what."""

    def __init__(self, case: Case, chosen: Sequence[Hosting]) -> None:
        self._case = case
        self._kept = [
            _kept_jobs(card, hosting) for card, hosting in zip(case.cards, chosen, strict=True)
        ]
        self._uses = [
            use
            for card, hosting in zip(case.cards, chosen, strict=True)
            for use in _uses(card, hosting)
        ]

    def plan(self) -> Plan:
        """Return the plan."""
        moved = dict(self._move_jobs())
        served = dict(self._serve_profiles()) | dict(self._serve_slices())
        return Plan(tuple(self._steps()), served, moved)

    def _alone(self, profile: str) -> Iterator[_Use]:
        return (
            use
            for use in self._uses
            if use.contents is None and not use.used and use.place.profile.name == profile
        )

    def _move_jobs(self) -> Iterator[tuple[str, Target]]:
        for card, kept in zip(self._case.cards, self._kept, strict=True):
            for each in card.instances:
                if each.state is State.MOVABLE and each.place not in kept:
                    use = self._new_home(card.geometry, each.place.profile)
                    use.used = True
                    yield each.job, use.target

    def _new_home(self, geometry: Geometry, profile: Profile) -> _Use:
        return next(use for use in self._alone(profile.name) if use.card.geometry == geometry)

    def _serve_profiles(self) -> Iterator[tuple[str, Target]]:
        for name, requests in self._case.profile_requests.items():
            for request, use in zip(requests, list(self._alone(name)), strict=False):
                use.used = True
                yield request.name, use.target

    def _serve_slices(self) -> Iterator[tuple[str, Target]]:
        for kind, requests in enumerate(self._case.slice_requests.values()):
            places = (
                use
                for use in self._uses
                if use.contents is not None
                for _ in range(use.contents[kind])
            )
            for request, use in zip(requests, places, strict=False):
                use.used = True
                yield request.name, use.target

    def _steps(self) -> list[Step]:
        destroys: list[Step] = []
        enables: list[Step] = []
        creates: list[Step] = []
        for card, kept in zip(self._case.cards, self._kept, strict=True):
            uses = [use.place for use in self._uses if use.used and use.card is card]
            present = [each.place for each in card.instances]
            new = [place for place in uses if place not in present]
            layout = [*kept, *new]
            idle = [each.place for each in card.instances if each.state is State.IDLE]
            for place in (each for each in idle if each in uses):
                layout.append(place)
            for place in (each for each in idle if each not in uses):
                if card.geometry.conflict(layout, place):
                    destroys.append(Destroy(card.name, place))
                else:
                    layout.append(place)
            destroys += [
                Destroy(card.name, each.place)
                for each in card.instances
                if each.state is State.MOVABLE and each.place not in kept
            ]
            enables += [Enable(card.name)] * (not card.mig and bool(new))
            creates += [Create(card.name, place) for place in new]
        return [*destroys, *enables, *creates]


def _layout(card: PlannedCard, hosting: Hosting) -> list[Place]:
    if hosting.layout < 0:
        return []
    table = layout_table(card.geometry)
    places = int(table.places[hosting.layout])
    return [place for place, bit in table.bits.items() if places & bit]


def _kept_jobs(card: PlannedCard, hosting: Hosting) -> list[Place]:
    """Return the places of used, shared and movable instances that stay."""
    layout = _layout(card, hosting)
    return [
        each.place
        for each in card.instances
        if each.state is not State.IDLE and each.place in layout
    ]


def _uses(card: PlannedCard, hosting: Hosting) -> Iterator[_Use]:
    """Return the instances that are there for requests, shared ones included."""
    contents = iter(hosting.contents)
    for each in _by_start(card):
        if each.state is State.SHARED and hosting.contents:
            yield _Use(card, each.place, next(contents))
    kept = _kept_jobs(card, hosting)
    serving = [place for place in _layout(card, hosting) if place not in kept]
    for number, profile in enumerate(card.geometry.profiles):
        places = [place for place in serving if place.profile == profile]
        holding = hosting.hosts[number] if hosting.hosts else 0
        for place in places[:holding]:
            yield _Use(card, place, next(contents))
        for place in places[holding:]:
            yield _Use(card, place)
