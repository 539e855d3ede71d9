"""Random cases for the planner."""

import random
from collections.abc import Sequence

from fenka.core.mig.case import (
    MigCase,
    PlannedCard,
    PlannedInstance,
    PlannedSlice,
    ProfileRequest,
    State,
)
from fenka.core.mig.geometry import Geometry, SliceSize
from fenka.core.mig.layouts import all_layouts

STATES = (State.USED, State.USED, State.IDLE, State.MOVABLE, State.SHARED)


def random_card(rng: random.Random, name: str, geometry: Geometry) -> PlannedCard:
    """Return a card with some instances, with none, or without MIG."""
    if rng.random() < 0.2:
        return PlannedCard(name, geometry, mig=False, busy=rng.random() < 0.3)
    rows = all_layouts(geometry)
    layout = sorted(rng.choice(rows), key=lambda place: place.start)
    instances = []
    for place in layout[: rng.randrange(4)]:
        state = rng.choice(STATES)
        job = f"{name}-{place.start}" if state is State.MOVABLE else ""
        room = geometry.largest_slice(place.profile)
        slices = (
            (SliceSize(room.memory_mib // 3, room.compute // 3),) if state is State.SHARED else ()
        )
        instances.append(PlannedInstance(place, state, job, slices))
    return PlannedCard(name, geometry, instances=tuple(instances))


def random_case(
    rng: random.Random, models: Sequence[Geometry], cards: int, requests: int, slices: int
) -> MigCase:
    """Return a case with at most these numbers of cards, requests for profiles and for slices."""
    chosen = [
        random_card(rng, f"g{number}", rng.choice(models))
        for number in range(rng.randint(1, cards))
    ]
    geometries = [card.geometry for card in chosen]
    wanted = [
        ProfileRequest(
            f"r{number}", rng.choice(rng.choice(geometries).profiles).name, rng.randint(1, 4)
        )
        for number in range(rng.randint(0, requests))
    ]
    parts = []
    for number in range(rng.randint(0, slices)):
        geometry = rng.choice(geometries)
        room = geometry.largest_slice(rng.choice(geometry.profiles))
        part = rng.choice((0.3, 0.45, 0.6, 1.0))
        compute = rng.choice((0, int(room.compute * part)))
        asked = SliceSize(int(room.memory_mib * part), compute)
        parts.append(PlannedSlice(f"s{number}", asked, rng.randint(1, 4)))
    return MigCase(tuple(chosen), (*wanted, *parts), rng.randint(0, 2), rng.randint(0, 1))
