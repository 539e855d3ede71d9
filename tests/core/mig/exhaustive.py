"""Plans by exhaustion, written from the definition alone: what the planner is compared with.

And a check of any plan against the rules, step by step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product

from fenka.core.mig.case import (
    Create,
    Destroy,
    Enable,
    MigCase,
    MigPlan,
    PlannedCard,
    ProfileRequest,
    State,
    remaining_size,
)
from fenka.core.mig.geometry import Geometry, Place, Profile, SliceSize

Score = tuple[int, int, int, Fraction, int]
"""Value, -moves, -conversions, flexibility, -idle instances destroyed: the larger the better."""


def legal(geometry: Geometry, places: list[Place]) -> bool:
    """Return whether a set of instances can exist together."""
    slices = [number for p in places for number in range(p.start, p.start + p.profile.size)]
    return (
        len(slices) == len(set(slices))
        and sum(place.profile.compute for place in places) <= geometry.compute
        and sum("+me" in place.profile.name for place in places) <= 1
        and all(places.count(place) == 1 for place in places)
    )


def layouts(geometry: Geometry) -> list[list[Place]]:
    """Return all legal sets of instances."""
    places = [Place(each, start) for each in geometry.profiles for start in each.starts]
    rows: list[list[Place]] = [[]]
    for place in places:
        rows += [[*row, place] for row in rows if legal(geometry, [*row, place])]
    return rows


def fitting(geometry: Geometry, layout: list[Place], profile: Profile) -> int:
    """Return how many instances of a profile fit beside a layout, by trying all sets of starts."""
    for count in range(len(profile.starts), 0, -1):
        for starts in combinations(profile.starts, count):
            if legal(geometry, layout + [Place(profile, start) for start in starts]):
                return count
    return 0


def flexibility(geometry: Geometry, layout: list[Place]) -> Fraction:
    """Return the sum over plain profiles of size x capacity / capacity when empty."""
    return sum(
        (
            Fraction(each.size * fitting(geometry, layout, each), fitting(geometry, [], each))
            for each in geometry.profiles
            if "+" not in each.name
        ),
        Fraction(0),
    )


@dataclass(frozen=True)
class _Final:
    """A card's final state: what others may use, and what it costs."""

    card: PlannedCard
    layout: list[Place]
    kept: list[Place]
    lost: list[Profile]

    @property
    def free(self) -> list[Place]:
        return [place for place in self.layout if place not in self.kept]


def _finals(card: PlannedCard, moves: int) -> Iterator[_Final]:
    if not card.mig:
        yield _Final(card, [], [], [])
        if card.busy:
            return
    fixed = [each.place for each in card.instances if each.state in (State.USED, State.SHARED)]
    movable = [each.place for each in card.instances if each.state is State.MOVABLE]
    for layout in layouts(card.geometry):
        if all(place in layout for place in fixed) and (card.mig or layout):
            kept = [place for place in movable if place in layout]
            if len(movable) - len(kept) <= moves:
                lost = [place.profile for place in movable if place not in kept]
                yield _Final(card, layout, [*fixed, *kept], lost)


def best_score(case: MigCase) -> Score:
    """Return the score of the best plan."""
    best: Score | None = None
    for finals in product(*(list(_finals(card, case.moves)) for card in case.cards)):
        moves = sum(len(final.lost) for final in finals)
        conversions = sum(bool(final.layout and not final.card.mig) for final in finals)
        if moves > case.moves or conversions > case.conversions:
            continue
        value = _most_value(case, finals)
        if value is None or (best is not None and value < best[0]):
            continue
        score = (value, -moves, -conversions, *_remains(finals))
        best = score if best is None else max(best, score)
    assert best is not None
    return best


def _remains(finals: tuple[_Final, ...]) -> tuple[Fraction, int]:
    """Return the flexibility and the negative number of idle instances that go."""
    total, destroyed = Fraction(0), 0
    for final in finals:
        if final.card.mig or final.layout:
            total += flexibility(final.card.geometry, final.layout)
        for each in final.card.instances:
            if each.state is State.IDLE and each.place not in final.layout:
                destroyed += not legal(final.card.geometry, [*final.layout, each.place])
    return total, -destroyed


def _most_value(case: MigCase, finals: tuple[_Final, ...]) -> int | None:
    """Return the most value that these layouts serve, None if a job has no instance."""
    free = [(final.card.geometry, place) for final in finals for place in final.free]
    for final in finals:
        for profile in final.lost:
            home = next(
                (
                    each
                    for each in free
                    if each[0] == final.card.geometry and each[1].profile == profile
                ),
                None,
            )
            if home is None:
                return None
            free.remove(home)
    shared = [
        remaining_size(final.card.geometry, each)
        for final in finals
        for each in final.card.instances
        if each.state is State.SHARED
    ]
    rooms = [geometry.largest_slice(place.profile) for geometry, place in free]
    names = [place.profile.name for _, place in free]
    return _assign(case, 0, (*rooms, *shared), (*names, *("" for _ in shared)))


def _assign(
    case: MigCase, number: int, rooms: tuple[SliceSize, ...], names: tuple[str, ...]
) -> int:
    """Return the most value of the requests from `number` on. names: of instances that nobody has yet."""
    if number == len(case.requests):
        return 0
    request = case.requests[number]
    best = _assign(case, number + 1, rooms, names)
    tried = set()
    for index, (room, name) in enumerate(zip(rooms, names, strict=True)):
        if (room, name) in tried:
            continue
        tried.add((room, name))
        if isinstance(request, ProfileRequest):
            if name != request.profile:
                continue
            left = SliceSize(0)
        elif name == "taken" or not room.holds(request.room) or room.memory_mib == 0:
            continue
        else:
            left = room.less(request.room)
        use = "taken" if isinstance(request, ProfileRequest) else ""
        after = (*rooms[:index], left, *rooms[index + 1 :])
        uses = (*names[:index], use, *names[index + 1 :])
        best = max(best, request.value + _assign(case, number + 1, after, uses))
    return best


def check(case: MigCase, plan: MigPlan) -> Score:
    """Make the steps one by one, check every rule, and return the score."""
    cards = {card.name: card for card in case.cards}
    enabled = {card.name for card in case.cards if card.mig}
    present = {card.name: {each.place for each in card.instances} for card in case.cards}
    instances = {
        (card.name, each.place.start): each for card in case.cards for each in card.instances
    }
    gone, created, conversions = [], set(), 0
    for step in plan.steps:
        match step:
            case Enable(name):
                assert name not in enabled
                assert not cards[name].busy
                enabled.add(name)
                conversions += 1
            case Destroy(name, place):
                assert place in present[name]
                present[name].remove(place)
                gone.append(instances[name, place.start])
            case Create(name, place):
                assert name in enabled
                assert place.start in place.profile.starts
                assert legal(cards[name].geometry, [*present[name], place])
                present[name].add(place)
                created.add((name, place.start))
    assert all(each.state in (State.IDLE, State.MOVABLE) for each in gone)
    moved = [each for each in gone if each.state is State.MOVABLE]
    assert conversions <= case.conversions
    assert len(moved) <= case.moves
    value, users = _check_users(case, plan, present, {each.job for each in moved})
    assert created <= users, "an instance is created for nobody"
    remains = Fraction(0)
    for name in enabled:
        occupied = [place for place in present[name] if _occupied(name, place, instances, users)]
        remains += flexibility(cards[name].geometry, occupied)
    idle = sum(each.state is State.IDLE for each in gone)
    return value, -len(moved), -conversions, remains, -idle


def _occupied(
    name: str,
    place: Place,
    instances: Mapping[tuple[str, int], object],
    users: set[tuple[str, int]],
) -> bool:
    instance = instances.get((name, place.start))
    state = getattr(instance, "state", State.IDLE)
    return (name, place.start) in users or (
        state is not State.IDLE and getattr(instance, "place", None) == place
    )


def _check_users(
    case: MigCase, plan: MigPlan, present: Mapping[str, set[Place]], lost: set[str]
) -> tuple[int, set[tuple[str, int]]]:
    """Check that requests and jobs have what they need; return the value, and the instances with users."""
    cards = {card.name: card for card in case.cards}
    before = {(card.name, each.place): each for card in case.cards for each in card.instances}
    profiles = {
        each.job: (card, each.place.profile)
        for (_, _), each in before.items()
        for card in case.cards
        if each in card.instances and each.job
    }
    rooms: dict[tuple[str, int], SliceSize | None] = {}

    def place_of(name: str, start: int) -> Place:
        return next(place for place in present[name] if place.start == start)

    def state_of(name: str, place: Place) -> State:
        # A job's old place may be created again for somebody else.
        instance = before.get((name, place))
        return State.IDLE if instance is None or instance.job in lost else instance.state

    assert set(plan.moved) == lost
    for job, target in plan.moved.items():
        card, profile = profiles[job]
        place = place_of(target.card, target.start)
        assert (place.profile, cards[target.card].geometry) == (profile, card.geometry)
        assert state_of(target.card, place) is State.IDLE
        assert (target.card, target.start) not in rooms
        rooms[target.card, target.start] = None
    requests = {request.name: request for request in case.requests}
    for name, target in plan.served.items():
        request, place = requests[name], place_of(target.card, target.start)
        key = (target.card, target.start)
        state = state_of(target.card, place)
        if isinstance(request, ProfileRequest):
            assert place.profile.name == request.profile
            assert state is State.IDLE
            assert key not in rooms
            rooms[key] = None
            continue
        assert state in (State.IDLE, State.SHARED)
        geometry = cards[target.card].geometry
        if key not in rooms:
            rooms[key] = (
                remaining_size(geometry, before[target.card, place])
                if state is State.SHARED
                else geometry.largest_slice(place.profile)
            )
        room = rooms[key]
        assert room is not None
        assert room.holds(request.room)
        rooms[key] = room.less(request.room)
    return sum(requests[name].value for name in plan.served), set(rooms)
