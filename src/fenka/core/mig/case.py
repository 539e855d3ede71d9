"""A planning case: cards with their instances, and requests. And what a plan consists of."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from fenka.core.errors import InvalidCase
from fenka.core.mig.geometry import Geometry, Place, SliceSize


class State(StrEnum):
    """An instance's use, by which a plan may move or destroy it."""

    USED = "used"
    IDLE = "idle"
    MOVABLE = "movable"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """An instance that exists.

    Attributes:
        place: its profile and start.
        state: USED and SHARED instances stay, MOVABLE ones may be destroyed if they get another place.
        job: the id of what uses a MOVABLE instance.
        slices: what a SHARED instance holds already.
    """

    place: Place
    state: State
    job: str = ""
    slices: tuple[SliceSize, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedCard:
    """A card.

    Attributes:
        name: its id in the plan.
        geometry: of its model.
        mig: whether MIG is enabled.
        busy: whether MIG is disabled and cannot be enabled now.
        instances: none without MIG.
    """

    name: str
    geometry: Geometry
    mig: bool = True
    busy: bool = False
    instances: tuple[PlannedInstance, ...] = ()


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """A request for an instance of its own, by name: the model of the card is not asked for."""

    name: str
    profile: str
    value: int = 1


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """A request for a part of an instance, beside others."""

    name: str
    room: SliceSize
    value: int = 1


@dataclass(frozen=True)
class MigCase:
    """A planning problem. Raises InvalidCase if it contradicts itself.

    Attributes:
        cards: all cards.
        requests: those that are pending.
        moves: how many movable instances may be destroyed.
        conversions: on how many cards MIG may be enabled.
    """

    cards: tuple[PlannedCard, ...]
    requests: tuple[ProfileRequest | PlannedSlice, ...]
    moves: int = 0
    conversions: int = 0

    def __post_init__(self) -> None:
        _check_names("card", (card.name for card in self.cards))
        _check_names("request", (request.name for request in self.requests))
        jobs = (instance.job for card in self.cards for instance in card.instances)
        _check_names("movable instance", (job for job in jobs if job))
        for card in self.cards:
            _check_card(card)
        for request in self.requests:
            self._check_request(request)

    @cached_property
    def profile_requests(self) -> dict[str, list[ProfileRequest]]:
        """Requests by profile, the most valuable first."""
        by_profile: dict[str, list[ProfileRequest]] = {}
        for request in sorted(self.requests, key=lambda request: -request.value):
            if isinstance(request, ProfileRequest):
                by_profile.setdefault(request.profile, []).append(request)
        return by_profile

    @cached_property
    def slice_requests(self) -> dict[SliceSize, list[PlannedSlice]]:
        """Requests by size, the most valuable first."""
        by_room: dict[SliceSize, list[PlannedSlice]] = {}
        for request in sorted(self.requests, key=lambda request: -request.value):
            if isinstance(request, PlannedSlice):
                by_room.setdefault(request.room, []).append(request)
        return by_room

    def _check_request(self, request: ProfileRequest | PlannedSlice) -> None:
        if isinstance(request, ProfileRequest):
            if not any(request.profile in card.geometry.by_name for card in self.cards):
                raise InvalidCase(
                    f"request {request.name!r}: no card has a profile {request.profile!r}; "
                    f"{_profiles_here(self.cards)}"
                )
            return
        rooms = [
            card.geometry.largest_slice(profile)
            for card in self.cards
            for profile in card.geometry.profiles
        ]
        if not any(room.holds(request.room) for room in rooms):
            raise InvalidCase(
                f"request {request.name!r} asks for {request.room.memory_mib} MiB and "
                f"{request.room.compute} percent of compute: no instance of these cards is so large"
            )


def remaining_size(geometry: Geometry, instance: PlannedInstance) -> SliceSize:
    """Return what the slices of an instance leave free."""
    size = geometry.largest_slice(instance.place.profile)
    for held in instance.slices:
        size = size.less(held)
    return size


def _check_names(kind: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidCase(
                f"{kind} {name!r} is given {count} times: each needs a name of its own"
            )


def _check_card(card: PlannedCard) -> None:
    if card.instances and not card.mig:
        raise InvalidCase(f"card {card.name!r} has instances, but its MIG mode is off")
    present: list[Place] = []
    for instance in card.instances:
        place = instance.place
        where = f"card {card.name!r}: {place}"
        if place.start not in place.profile.starts:
            starts = ", ".join(map(str, place.profile.starts))
            raise InvalidCase(f"{where} is impossible: {place.profile.name} begins at {starts}")
        if conflict := card.geometry.conflict(present, place):
            raise InvalidCase(f"{where} is impossible: {conflict}")
        present.append(place)
        _check_use(where, card.geometry, instance)


def _check_use(where: str, geometry: Geometry, instance: PlannedInstance) -> None:
    if bool(instance.job) != (instance.state is State.MOVABLE):
        raise InvalidCase(f"{where} is {instance.state}: movable instances have an id, others none")
    if instance.slices and instance.state is not State.SHARED:
        raise InvalidCase(f"{where} is {instance.state}: only shared instances have slices")
    if not remaining_size(geometry, instance).holds(SliceSize(0)):
        raise InvalidCase(f"{where}: its slices exceed what the instance has")


def _profiles_here(cards: Iterable[PlannedCard]) -> str:
    models = {card.geometry.model: card.geometry for card in cards}
    if not models:
        return "the case has no cards"
    return "; ".join(
        f"{model} has {', '.join(geometry.by_name)}" for model, geometry in sorted(models.items())
    )


@dataclass(frozen=True, slots=True)
class Enable:
    """Enable MIG on a card."""

    card: str


@dataclass(frozen=True, slots=True)
class Destroy:
    """Destroy the instance at a place, compute instances included."""

    card: str
    place: Place


@dataclass(frozen=True, slots=True)
class Create:
    """Create an instance at a place, with its largest compute instance."""

    card: str
    place: Place


Step = Enable | Destroy | Create


@dataclass(frozen=True, slots=True)
class PlannedTarget:
    """An instance of the final layout: card and start."""

    card: str
    start: int


@dataclass(frozen=True)
class MigPlan:
    """Steps in their order, and what they serve.

    Attributes:
        steps: each is legal when it is made.
        served: the instances of requests by name.
        moved: the new instances of movable jobs.
    """

    steps: tuple[Step, ...] = ()
    served: dict[str, PlannedTarget] = field(default_factory=dict)
    moved: dict[str, PlannedTarget] = field(default_factory=dict)
