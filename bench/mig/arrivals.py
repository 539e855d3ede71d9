"""Measure which requests get an instance when they arrive and end over time; others are lost.

Four A100, Poisson arrivals, exponential durations of mean 1, a load of 0.8 of the cards' memory slices. Half
of the instances are of notebooks that may be stopped and started elsewhere. The bound moves all freely.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from fenka.core.mig.case import MigCase, PlannedCard, PlannedInstance, ProfileRequest, State
from fenka.core.mig.geometry import Geometry, Place
from fenka.core.mig.layouts import Layout, all_layouts
from fenka.core.mig.plan import plan

Preference = Callable[[list[tuple[Geometry, Layout]], str], tuple[int, int] | None]
Counts = tuple[int, ...]

CARDS, LOAD, ARRIVALS, WARM_UP = 4, 0.8, 8000, 500
MOVES = 2
"""Notebooks that are moved for one request at most."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. until: when it ends, if it is served."""

    name: str
    time: float
    until: float
    profile: str
    movable: bool


@dataclass
class Tally:
    """What was requested and served after the warm-up: requests, and slices of memory."""

    requests: int = 0
    served: int = 0
    slices: int = 0
    served_slices: int = 0
    moves: int = 0

    def shares(self) -> str:
        """Return the percentages of requests and of memory that were served."""
        return (
            f"{100 * self.served / self.requests:.1f}/{100 * self.served_slices / self.slices:.1f}"
        )


def arrivals(geometry: Geometry, weights: Mapping[str, int], seed: str) -> Iterator[Arrival]:
    """Yield the requests of a mix."""
    rng, now = random.Random(seed), 0.0
    names = list(weights)
    sizes = [geometry.by_name[name].size for name in names]
    mean = sum(map(int.__mul__, sizes, weights.values())) / sum(weights.values())
    axis = max(profile.size for profile in geometry.profiles)
    for number in range(ARRIVALS):
        now += rng.expovariate(LOAD * CARDS * axis / mean)
        (name,) = rng.choices(names, list(weights.values()))
        yield Arrival(f"r{number}", now, now + rng.expovariate(1), name, rng.random() < 0.5)


class Cards:
    """The cards, and who is where on them."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.held: list[dict[Place, Arrival]] = [{} for _ in range(CARDS)]

    def layouts(self) -> list[tuple[Geometry, Layout]]:
        """Return the cards as rules see them."""
        return [(self.geometry, frozenset(held)) for held in self.held]

    def put(self, arrival: Arrival, number: int, start: int) -> None:
        """Place a request."""
        place = Place(self.geometry.by_name[arrival.profile], start)
        assert not self.geometry.conflict(self.held[number], place)
        self.held[number][place] = arrival

    def end(self, arrival: Arrival) -> None:
        """Remove a request, wherever it is."""
        for held in self.held:
            for place in [place for place, each in held.items() if each == arrival]:
                del held[place]

    def move_and_put(self, arrival: Arrival) -> int | None:
        """Place a request by moving others. Return how many were moved; None if that does not help."""
        cards = tuple(
            PlannedCard(
                str(number),
                self.geometry,
                instances=tuple(
                    PlannedInstance(place, State.MOVABLE, each.name)
                    if each.movable
                    else PlannedInstance(place, State.USED)
                    for place, each in held.items()
                ),
            )
            for number, held in enumerate(self.held)
        )
        request = ProfileRequest(arrival.name, arrival.profile)
        result = plan(MigCase(cards, (request,), moves=MOVES))
        if arrival.name not in result.served:
            return None
        jobs = {each.name: each for held in self.held for each in held.values()}
        for name in result.moved:
            self.end(jobs[name])
        for name, target in {**result.moved, **result.served}.items():
            self.put(jobs.get(name, arrival), int(target.card), target.start)
        return len(result.moved)


def by_rule(
    geometry: Geometry, requests: list[Arrival], choose: Preference, *, moves: bool = False
) -> Tally:
    """Serve requests by a rule. moves: where it finds no place, notebooks may be moved."""
    cards, tally = Cards(geometry), Tally()

    def serve(arrival: Arrival) -> bool:
        place = choose(cards.layouts(), arrival.profile)
        if place is not None:
            cards.put(arrival, *place)
            return True
        moved = cards.move_and_put(arrival) if moves else None
        tally.moves += moved or 0
        return moved is not None

    _run(geometry, requests, tally, serve, cards.end)
    return tally


def by_bound(geometry: Geometry, requests: list[Arrival], names: list[str]) -> Tally:
    """Serve whatever fits on the cards if everything is placed anew each time."""
    most = {
        tuple(sum(place.profile.name == name for place in layout) for name in names)
        for layout in all_layouts(geometry)
        if all(place.profile.name in names for place in layout)
    }

    @cache
    def fits(counts: Counts, cards: int) -> bool:
        if not any(counts):
            return True
        return cards > 0 and any(
            fits(tuple(max(0, a - b) for a, b in zip(counts, each, strict=True)), cards - 1)
            for each in most
            if any(a and b for a, b in zip(counts, each, strict=True))
        )

    held = dict.fromkeys(names, 0)

    def serve(arrival: Arrival) -> bool:
        held[arrival.profile] += 1
        if fits(tuple(held.values()), CARDS):
            return True
        held[arrival.profile] -= 1
        return False

    def end(arrival: Arrival) -> None:
        held[arrival.profile] -= 1

    tally = Tally()
    _run(geometry, requests, tally, serve, end)
    return tally


def _run(
    geometry: Geometry,
    requests: list[Arrival],
    tally: Tally,
    serve: Callable[[Arrival], bool],
    end: Callable[[Arrival], None],
) -> None:
    running: list[tuple[float, int, Arrival]] = []
    for number, arrival in enumerate(requests):
        while running and running[0][0] <= arrival.time:
            end(heapq.heappop(running)[2])
        served = serve(arrival)
        if served:
            heapq.heappush(running, (arrival.until, number, arrival))
        if number >= WARM_UP:
            size = geometry.by_name[arrival.profile].size
            tally.requests, tally.slices = tally.requests + 1, tally.slices + size
            tally.served += served
            tally.served_slices += size * served
